"""Text in all its containers, tokenizers of all kinds, and what is said when they do not fit."""

from __future__ import annotations

import csv
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from small_models import config
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.train.data import open_data, stories
from galvatron.train.data.dataset import Dataset
from galvatron.train.data.order import generator_of

LENGTH = 32
DOCUMENTS = [*stories(6), "Zürich – 東京 🙂", "", "the end"]
GPT2 = config("gpt2", vocab_size=600)


def opened(spec: Path | str, cache: Path, tokenizer: str | Path | None = "bytes", family: str = "gpt2") -> Dataset:
    training = Training(sequence_length=LENGTH)
    return open_data(spec, config(family, vocab_size=600), training, tokenizer=tokenizer, cache=cache).train


def bytes_of(dataset: Dataset) -> bytes:
    """The text of byte tokens; ends of documents as zeros."""
    rows = [dataset.sample(index, generator_of(0))["input_ids"] for index in range(len(dataset))]
    return bytes(0 if token == 1 else token - 4 for token in torch.cat(rows).tolist())


def expected(documents: list[str]) -> bytes:
    whole = b"".join(document.encode() + b"\0" for document in documents)
    return whole[: len(whole) // LENGTH * LENGTH]


def write_lines(path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    return path


def write_text_files(path: Path) -> Path:
    (path / "deep").mkdir(parents=True)
    for number, text in enumerate(DOCUMENTS):
        name = f"{number}.txt" if number < 4 else f"deep/{number}.txt"
        (path / name).write_text(text, encoding="utf-8")
    (path / ".hidden.txt").write_text("not this")
    (path / "notes.md").write_text("nor this")
    return path


def write_parquet(path: Path) -> Path:
    path.mkdir()
    for part in (0, 1):
        texts = DOCUMENTS[part * 5 : part * 5 + 5]
        table = arrow.table({"id": list(range(len(texts))), "text": texts})
        parquet.write_table(table, path / f"{part}.parquet")
    return path


def write_arrow_file(path: Path) -> Path:
    table = arrow.table({"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
    with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def write_csv(path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows(enumerate(DOCUMENTS))
    return path


def write_saved(path: Path) -> Path:
    datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(path)
    return path


def write_saved_splits(path: Path) -> Path:
    train, other = (datasets.Dataset.from_dict({"text": texts}) for texts in (DOCUMENTS, ["other"]))
    datasets.DatasetDict({"test": other, "train": train}).save_to_disk(path)
    return path


def write_saved_arrow(path: Path) -> Path:
    """The stream format, as a plain file."""
    write_saved(path)
    return next(path.glob("*.arrow"))


@pytest.fixture(autouse=True)
def _quiet_datasets() -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_lines, "a.jsonl"),
        (write_text_files, "folder"),
        (write_parquet, "tables"),
        (write_arrow_file, "a.arrow"),
        (write_csv, "a.csv"),
        (write_saved, "saved"),
        (write_saved_splits, "splits"),
        (write_saved_arrow, "stream"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_container_gives_the_same_text(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    dataset = opened(write(tmp_path / name), tmp_path / "cache")
    assert bytes_of(dataset) == expected(DOCUMENTS)
    lines = opened(write_lines(tmp_path / "lines.jsonl"), tmp_path / "cache")
    assert dataset.fingerprint == lines.fingerprint, "the same text is the same data set, wherever it lies"


def test_a_long_file_is_one_document(tmp_path: Path) -> None:
    text = "".join(f"{story}\r\n" for story in stories(800))
    (tmp_path / "long.txt").write_text(text, newline="")
    assert bytes_of(opened(tmp_path / "long.txt", tmp_path / "cache")) == expected([text])


def test_changed_text_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a" * 100)
    first = opened(path, tmp_path / "cache")
    path.write_text("b" * 100)
    os.utime(path, ns=(1, 1))
    second = opened(path, tmp_path / "cache")
    assert bytes_of(second) == b"b" * 96
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_a_trained_tokenizer_writes_the_text(tmp_path: Path, family: str) -> None:
    training = Training(sequence_length=LENGTH)
    path = write_lines(tmp_path / "a.jsonl")
    data = open_data(path, config(family, vocab_size=600), training, tokenizer="train", cache=tmp_path / "cache")
    assert data.tokenizer is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(data.tokenizer)
    assert len(tokenizer) <= 600
    kept = opened(path, tmp_path / "cache", data.tokenizer)
    rows = [kept.sample(index, generator_of(0))["input_ids"] for index in range(len(kept))]
    text = tokenizer.decode(torch.cat(rows))
    assert "</s>".join(DOCUMENTS).startswith(text[:-40])
    assert len(text) > 0.8 * sum(map(len, DOCUMENTS))
    assert len(text) > 2 * sum(map(len, rows)), "tokens are longer than bytes"
    sample = data.train.sample(0, generator_of(0))
    assert sample["input_ids"].shape == (LENGTH,)
    if family == "bert":
        assert sample["input_ids"][0] == tokenizer.cls_token_id
        assert sample["input_ids"][-1] == tokenizer.sep_token_id
        assert tokenizer.mask_token_id in sample["input_ids"]
    if family == "t5":
        assert sample["labels"][0] == tokenizer.convert_tokens_to_ids("<extra_id_0>")


def test_the_tokenizer_of_the_models_folder_is_taken(tmp_path: Path) -> None:
    path, training = write_lines(tmp_path / "a.jsonl"), Training(sequence_length=LENGTH)
    trained = open_data(path, GPT2, training, tokenizer="train", cache=tmp_path / "cache")
    found = open_data(path, GPT2, training, model_folder=trained.tokenizer, cache=tmp_path / "other")
    assert found.train.fingerprint == trained.train.fingerprint


def test_stories_are_fixed_and_have_structure() -> None:
    """The same text everywhere; and the sums in it are right."""
    text = list(stories(500, seed=3))
    assert text == list(stories(500, seed=3))
    assert text[:5] != list(stories(5, seed=4))
    numbers = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for story in text:
        words = story.lower().replace(",", "").split()
        for sign, factor in (("plus", 1), ("minus", -1)):
            at = words.index(sign)
            one, other, total = words[at - 1], words[at + 1], words[at + 3]
            if {one, other, total} <= set(numbers):
                assert numbers.index(one) + factor * numbers.index(other) == numbers.index(total)


def bad_line(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    return folder / "a.jsonl"


def no_json(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"text": "fine"}\n\n{"text": \n')
    return folder / "a.jsonl"


def other_field(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"content": "x"}\n')
    return folder / "a.jsonl"


def half_character(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"text": "\\ud800"}\n')
    return folder / "a.jsonl"


def no_utf8(folder: Path) -> Path:
    (folder / "a.txt").write_bytes("Zürich".encode("latin-1"))
    return folder / "a.txt"


def no_column(folder: Path) -> Path:
    parquet.write_table(arrow.table({"content": ["x"]}), folder / "a.parquet")
    return folder / "a.parquet"


def null_row(folder: Path) -> Path:
    parquet.write_table(arrow.table({"text": ["x", None]}), folder / "a.parquet")
    return folder / "a.parquet"


def cut_off(folder: Path) -> Path:
    path = write_parquet(folder / "tables") / "0.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    return path


def damaged_dataset(folder: Path) -> Path:
    path = write_saved(folder / "saved")
    (path / "state.json").write_text("{}")
    return path


def several_splits(folder: Path) -> Path:
    write_lines(folder / "train.jsonl")
    return write_lines(folder / "test.jsonl").parent


def mixed_kinds(folder: Path) -> Path:
    (folder / "a.txt").write_text("x")
    return write_lines(folder / "b.jsonl").parent


def unknown_kind(folder: Path) -> Path:
    (folder / "a.pdf").write_text("x")
    return folder / "a.pdf"


def nothing(folder: Path) -> Path:
    return folder


def no_text(folder: Path) -> Path:
    (folder / "a.jsonl").write_text("\n")
    return folder / "a.jsonl"


def too_short(folder: Path) -> Path:
    (folder / "a.txt").write_text("too short")
    return folder / "a.txt"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (bad_line, r"a.jsonl, line 2: the field 'text' is 3; expected a string"),
        (no_json, r"a.jsonl, line 3: is not JSON"),
        (other_field, r"line 1: the field 'text' is missing \(it has 'content'; name another with --text-field\)"),
        (half_character, r"line 1: half of a character"),
        (no_utf8, r"a.txt: is not UTF-8 text \(byte 0xfc\)"),
        (no_column, r"a.parquet, row 0: the field 'text' is missing \(it has 'content'; name"),
        (null_row, r"a.parquet, row 1: the field 'text' is None"),
        (cut_off, r"0.parquet: cannot be read"),
        (damaged_dataset, r"saved: cannot be read after 0 rows"),
        (several_splits, r"has files of several splits \(test.jsonl, train.jsonl\); give the file or folder of one"),
        (mixed_kinds, r"files ending in .jsonl and .txt"),
        (unknown_kind, r"a.pdf': expected a file ending in .txt, .jsonl"),
        (nothing, r"the folder has no files ending in"),
        (no_text, r"a.jsonl: holds no text"),
        (too_short, r"has 10 tokens; one sample takes 32"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_text_is_named(tmp_path: Path, write: Callable[[Path], Path], said: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(InvalidInput, match=said):
        opened(write(folder), tmp_path / "cache")


def test_what_is_not_here_is_not_fetched(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    with pytest.raises(InvalidInput, match="'wikitext': no such file or folder, and nothing is fetched"):
        opened("wikitext", tmp_path)
    with pytest.raises(InvalidInput, match="tokenizer 'bert-base-uncased': no such folder"):
        opened(path, tmp_path, "bert-base-uncased")
    with pytest.raises(InvalidInput, match="no tokenizer was given"):
        opened(path, tmp_path, None)
    with pytest.raises(InvalidInput, match=r"holds none of tokenizer.json"):
        opened(path, tmp_path, tmp_path)


def test_a_tokenizer_that_nothing_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="tokenizer 'bytes': synthetic data needs none"):
        open_data(None, GPT2, Training(sequence_length=LENGTH), tokenizer="bytes")
    with pytest.raises(InvalidInput, match="tokenizer 'bytes': an image model needs none"):
        open_data(tmp_path, config("vit"), Training(), tokenizer="bytes")


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        opened(write_lines(tmp_path / "a.jsonl"), tmp_path, folder)


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, training = write_lines(tmp_path / "a.jsonl"), Training(sequence_length=LENGTH)
    trained = open_data(path, GPT2, training, tokenizer="train", cache=tmp_path)
    with pytest.raises(InvalidInput, match=r"it has \d+ tokens, the model's vocabulary 300"):
        open_data(path, config("gpt2", vocab_size=300), training, tokenizer=trained.tokenizer, cache=tmp_path)
    with pytest.raises(InvalidInput, match="it has 260 tokens, the model's vocabulary 67"):
        open_data(path, config("gpt2"), training, tokenizer="bytes", cache=tmp_path)
    with pytest.raises(InvalidInput, match="vocabulary of 67 is too small; expected at least 260"):
        open_data(path, config("gpt2"), training, tokenizer="train", cache=tmp_path)


def test_damaged_tokens_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    opened(path, tmp_path / "cache")
    (file,) = (tmp_path / "cache").rglob("tokens.bin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match=r"tokens.bin: has \d+ bytes; expected \d+; delete"):
        opened(path, tmp_path / "cache")


def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, tables = write_saved(tmp_path / "saved"), write_parquet(tmp_path / "tables")
    for path, module in ((saved, "datasets"), (tables, "datasets")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InvalidInput, match=r'not installed; pip install "galvatron\[data\]"'):
            opened(path, tmp_path / "cache")


def test_data_to_evaluate_on_are_read_with_the_same_tokenizer(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl")
    (tmp_path / "other.txt").write_text("quite another text " * 20)
    training = Training(sequence_length=LENGTH)
    data = open_data(
        path, GPT2, training, tokenizer="train", cache=tmp_path / "cache", evaluation=tmp_path / "other.txt"
    )
    assert data.held_out is not None
    assert data.tokenizer is not None
    whole = open_data(path, GPT2, training, tokenizer="train", cache=tmp_path / "cache")
    assert data.train.fingerprint == whole.train.fingerprint, "nothing is held out of the training data"
    loaded = AutoTokenizer.from_pretrained(data.tokenizer)
    ids = data.held_out.sample(0, generator_of(0))["input_ids"]
    assert str(loaded.decode(ids)).startswith("quite another text")
    with pytest.raises(InvalidInput, match="eval-data 'x': given, but the training data are made up"):
        open_data(None, GPT2, training, evaluation="x")


@pytest.mark.parametrize("text", ["null", "NA", "", "12"])
def test_texts_that_look_like_none_or_numbers_stay_texts_or_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(f'text\n"{text}"\n' + '"some words"\n' * 20)
    found = bytes_of(opened(tmp_path / "a.csv", tmp_path / "cache"))
    assert found == expected([text, *["some words"] * 20])


def test_a_long_file_has_the_tokens_that_it_has_as_one_text(tmp_path: Path) -> None:
    """Files are read in parts. Tokenizers like Llama 2's put a space before each text."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "▁", *"abcd\n"])}
    spaced = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    spaced.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain = PreTrainedTokenizerFast(tokenizer_object=spaced, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    plain.save_pretrained(tmp_path / "tokenizer")
    text = "".join(random.Random(1).choices("abc d\n", k=200_000))
    (tmp_path / "text.txt").write_text(text)
    dataset = opened(tmp_path / "text.txt", tmp_path / "cache", tmp_path / "tokenizer")
    rows = [dataset.sample(index, generator_of(0))["input_ids"] for index in range(len(dataset))]
    whole = plain(text, add_special_tokens=False)["input_ids"] + [2]
    assert torch.cat(rows).tolist() == whole[: len(rows) * LENGTH]
    assert len(whole) - len(rows) * LENGTH < LENGTH
