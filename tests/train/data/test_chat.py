"""Conversations and packed documents: the loss counts exactly what is to be learned, as documents alone would."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow as arrow
import pytest
import torch
from longer import longer
from parity import cluster_of
from pyarrow import parquet
from ranks import ranks
from small_models import config
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training, schedule_named
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.train.data.apart import check_kept_apart
from galvatron.train.data.dataset import collate
from galvatron.train.data.examples import Examples, rows_of
from galvatron.train.data.opening import open_data
from galvatron.train.data.order import generator_of
from galvatron.train.data.vocabulary import train_tokenizer

_PLAIN = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_MARKED = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}</s>{% endgeneration %}{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_FORGETS = (
    "{% for message in messages %}<{{ message['role'] }}>{% if loop.last or message['role'] != 'assistant' %}"
    "{{ message['content'] }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_WORDS = ["a", "be", "cat", "door", "even", "far", "good", "home", "into", "just", "know", "look", "more", "never"]
_VOCABULARY = 320


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of a tokenizer with a chat template."""
    base = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(_WORDS * 20, base, words=_VOCABULARY, sentinels=0)

    def with_template(template: str) -> Path:
        folder = tmp_path_factory.mktemp("chat")
        loaded = AutoTokenizer.from_pretrained(str(base))
        loaded.chat_template = template
        loaded.save_pretrained(str(folder))
        return folder

    return with_template


def _talks(count: int, turns: int = 2) -> list[dict[str, Any]]:
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, 4)))

    return [
        {"messages": [{"role": role, "content": text()} for _ in range(turns) for role in ("user", "assistant")]}
        for _ in range(count)
    ]


def _file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


_CONFIG = config("llama", vocab_size=_VOCABULARY, max_position_embeddings=256)
_TRAINING = Training(dropout=False, sequence_length=160)


def _model() -> Any:
    kind: Any = LlamaForCausalLM
    return kind(LlamaConfig(**{key: own for key, own in _CONFIG.items() if key != "model_type"}))


def _opened(data: Path, folder: Path, cache: Path, **options: Any) -> Examples:
    found = open_data(data, _CONFIG, _TRAINING, tokenizer=folder, cache=cache, **options).train
    assert isinstance(found, Examples)
    return found


def _batch(data: Examples) -> dict[str, Tensor]:
    return collate([data.sample(index, generator_of(0, index)) for index in range(len(data))])


def _by_hand(talks: list[dict[str, Any]], folder: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and labels with transformers alone: each message written and tokenized by itself, which this template
    allows, for every message ends with a special token."""
    loaded = AutoTokenizer.from_pretrained(str(folder))
    found = []
    for talk in talks:
        ids: list[int] = []
        labels: list[int] = []
        for message in talk["messages"]:
            opening = loaded(f"<{message['role']}>", add_special_tokens=False)["input_ids"]
            content = loaded(f"{message['content']}</s>", add_special_tokens=False)["input_ids"]
            ids += opening + content
            counts = message["role"] == "assistant"
            labels += [-100] * len(opening) + (content if counts else [-100] * len(content))
        found.append((ids, labels))
    return found


def _stock_loss(documents: list[tuple[list[int], list[int]]], weights: Path) -> tuple[float, dict[str, Tensor], int]:
    """Each conversation alone through the stock model: mean over all targets, its gradients, and how many."""
    model: Any = AutoModelForCausalLM.from_pretrained(weights).train()
    total, targets = torch.zeros(()), 0
    for ids, labels in documents:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        wanted = torch.tensor(labels[1:])
        total = total + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        targets += int((wanted != -100).sum())
    torch.autograd.backward(total / targets)
    return float(total.detach() / targets), {name: own.grad for name, own in model.named_parameters()}, targets


def _trained(plan: galvatron.Plan, weights: Path, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model = galvatron.parallelize(None, plan, weights=weights, device="cpu")
    loss = float(model.forward_backward(batch))
    return loss, {name: own.clone() for name, own in model.whole_gradients()}


@pytest.mark.parametrize(
    ("template", "pack", "stages"),
    [
        (_MARKED, True, [["tp2", "sdp2", "tp2", "dp2"]]),
        (_PLAIN, False, [["single"] * 2, ["single"] * 2]),
        longer(_PLAIN, True, [["sdp2"] * 4]),
        longer(_MARKED, False, [["dp2"] * 4]),
    ],
)
def test_the_loss_counts_the_answers(
    template: str, pack: bool, stages: list[list[str]], tokenizer: Callable[[str], Path], tmp_path: Path
) -> None:
    """Packed or not, by the template's marks or by what answers add: as each conversation alone in the stock model."""
    folder, talks = tokenizer(template), _talks(8)
    data = _opened(_file(tmp_path / "chat.jsonl", talks), folder, tmp_path / "cache", pack=pack)
    assert len(data) == 8 if not pack else len(data) < 8
    batch = _batch(data)
    batch = {name: own[: len(own) // 2 * 2] for name, own in batch.items()}
    chosen = [talks[document] for row in data.rows[: len(batch["labels"])] for document in row]
    torch.manual_seed(0)
    _model().save_pretrained(tmp_path / "weights")
    loss, gradients, targets = _stock_loss(_by_hand(chosen, folder), tmp_path / "weights")
    assert int((batch["labels"] != -100).sum()) == targets
    spec = load_any_model(_CONFIG, _TRAINING)
    request = Request(model=spec, cluster=cluster_of(2), batch=len(batch["labels"]), schedule=schedule_named("1f1b"))
    plan = priced(request, stages, micro_batches=1)
    for ours, found in ranks(2).run(_trained, plan, tmp_path / "weights", batch):
        assert ours == pytest.approx(loss, rel=1e-5)
        for name, own in gradients.items():
            torch.testing.assert_close(found[name], own, rtol=1e-3, atol=1e-5)


def test_prompts_and_completions(tokenizer: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tokenizer(_PLAIN)
    rows = [{"prompt": "a cat", "completion": " into home"}, {"prompt": "look", "completion": " good"}]
    data = _opened(_file(tmp_path / "pairs.jsonl", rows), folder, tmp_path / "cache", pack=False)
    loaded = AutoTokenizer.from_pretrained(str(folder))
    for index, row in enumerate(rows):
        sample = data.sample(index, generator_of(0, index))
        kept = sample["labels"][sample["labels"] != -100]
        assert loaded.decode(kept) == row["completion"] + "</s>"
        whole = len(loaded(row["prompt"])["input_ids"]) + len(kept)
        assert loaded.decode(sample["input_ids"][:whole]) == f"{row['prompt']}{row['completion']}</s>"


def test_text_by_documents(tokenizer: Callable[[str], Path], tmp_path: Path) -> None:
    """With a field of another name; positions start anew with each document, and longer ones are several."""
    texts = [" ".join(_WORDS[:count]) for count in (2, 3, 14, 4)] + [" ".join(_WORDS * 14)]
    path = _file(tmp_path / "text.jsonl", [{"body": text} for text in texts])
    data = _opened(path, tokenizer(_PLAIN), tmp_path / "cache", pack=True, text_field="body")
    loaded = AutoTokenizer.from_pretrained(str(tokenizer(_PLAIN)))
    batch = _batch(data)
    found = []
    for ids, positions, labels in zip(batch["input_ids"], batch["position_ids"], batch["labels"], strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for first, last in pairwise(begins):
            assert positions[first:last].tolist() == list(range(last - first))
            if (labels[first:last] != -100).any():
                assert labels[first] == -100
                assert torch.equal(labels[first + 1 : last], ids[first + 1 : last])
                found.append(ids[first:last].tolist())
    documents = [data.ids[first:last].tolist() for first, last in pairwise(data.starts)]
    assert sorted(found) == sorted(documents)
    assert len(documents) > len(texts)
    assert loaded.decode([token for document in documents for token in document]) == "</s>".join([*texts, ""])
    with pytest.raises(InvalidInput, match="'text' is missing"):
        _opened(path, tokenizer(_PLAIN), tmp_path / "other", pack=True)


def test_rows_are_full() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(2, 40) for _ in range(300)]
    rows = rows_of(lengths, 64, packed=True)
    assert sorted(document for row in rows for document in row) == list(range(300))
    assert all(sum(lengths[document] for document in row) <= 64 for row in rows)
    assert len(rows) <= 1.03 * sum(lengths) / 64 + 1


@pytest.mark.parametrize(
    ("template", "rows", "expected"),
    [
        (_FORGETS, _talks(2), "line 1: message 2 cannot be found in the conversation"),
        (_PLAIN, [{"messages": [{"role": "user", "content": "a"}]}], "no message is of the assistant"),
        (_PLAIN, [*_talks(1), {"text": "a"}], "line 2: the field 'messages' is missing"),
        (_PLAIN, [{"messages": "a"}], "messages are no list"),
        (_PLAIN, [{"prompt": "a", "completion": 3}], "completion is a int; expected text"),
        (_PLAIN, _talks(1, turns=40), "1 of 1 documents have more than 160 tokens"),
    ],
)
def test_what_is_not_certain_is_refused(
    template: str, rows: list[dict[str, Any]], expected: str, tokenizer: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=expected.replace("(", r"\(")):
        _opened(_file(tmp_path / "chat.jsonl", rows), tokenizer(template), tmp_path / "cache")


def test_models_that_cannot_keep_documents_apart_are_refused(tmp_path: Path, tokenizer: Callable[[str], Path]) -> None:
    for kept in ("llama", "gpt2"):
        check_kept_apart(config(kept), 64)
    check_kept_apart(config("llama", vocab_size=32), 64)
    rotation = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    longer = config("llama", max_position_embeddings=64, rope_parameters=rotation)
    check_kept_apart(longer, 64)
    with pytest.raises(InvalidInput, match="because above 64 tokens it rotates all of a batch by the longest document"):
        check_kept_apart(longer, 65)
    mamba = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "num_hidden_layers": 2, "vocab_size": 64}
    with pytest.raises(InvalidInput, match="cannot be kept apart, because it takes no position_ids"):
        check_kept_apart(mamba, 64)
    data = _file(tmp_path / "chat.jsonl", _talks(2))
    with pytest.raises(InvalidInput, match="are for causal language models"):
        open_data(data, config("bert", vocab_size=_VOCABULARY), _TRAINING, tokenizer=tokenizer(_PLAIN), cache=tmp_path)
    with pytest.raises(InvalidInput, match=r"need a tokenizer with a folder.* but 'bytes' was given"):
        open_data(data, _CONFIG, _TRAINING, tokenizer="bytes", cache=tmp_path)


def test_the_stock_model_keeps_documents_apart_without_a_cache() -> None:
    """As we run it; with a cache it does not."""
    model = _model().eval()
    ids = torch.randint(_VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        alone = model(input_ids=ids[:, 5:]).logits
        apart, mixed = (
            model(input_ids=ids, position_ids=positions, use_cache=cache).logits[:, 5:] for cache in (False, True)
        )
    torch.testing.assert_close(apart, alone)
    assert not torch.allclose(mixed, alone, atol=1e-3)


def test_tables_of_conversations_are_those_of_the_lines(tmp_path: Path, tokenizer: Callable[[str], Path]) -> None:
    """In a table every message has the fields of all others; the template must not see those that are empty."""
    talks = _talks(6)
    talks[0]["messages"][0]["name"] = "ann"
    template = _PLAIN.replace("<{{ message['role'] }}>", "<{{ message['role'] }}{{ '!' if 'name' in message }}>")
    folder = tokenizer(template)
    lines = _opened(_file(tmp_path / "chat.jsonl", talks), folder, tmp_path / "cache")
    parquet.write_table(arrow.Table.from_pylist(talks), tmp_path / "chat.parquet")
    datasets.Dataset.from_list(talks).save_to_disk(tmp_path / "saved")
    for name in ("chat.parquet", "saved"):
        assert _opened(tmp_path / name, folder, tmp_path / "cache").fingerprint == lines.fingerprint
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.decode(lines.ids).count("!") == 1, "the template tells absent fields from others"


def test_a_template_that_changed_is_another_tokenizer(tmp_path: Path, tokenizer: Callable[[str], Path]) -> None:
    path, folder = _file(tmp_path / "chat.jsonl", _talks(3)), tokenizer(_PLAIN)
    before = _opened(path, folder, tmp_path / "cache").fingerprint
    (folder / "chat_template.jinja").write_text(_PLAIN.replace("</s>", "!</s>"))
    assert _opened(path, folder, tmp_path / "cache").fingerprint != before
