"""From what a user says to data sets: which kind of data a path holds, and whether it fits the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.train.data.apart import KeptApart
from galvatron.train.data.chat import Chat, chat_file
from galvatron.train.data.dataset import Dataset, split
from galvatron.train.data.documents import StorySource, TextSource, text_source
from galvatron.train.data.examples import Examples
from galvatron.train.data.images import image_folder, saved_normalisation
from galvatron.train.data.language import LanguageData, PackedStream
from galvatron.train.data.objectives import SpanLengths, sample_maker_of
from galvatron.train.data.requirements import ImageRequirements, Objective, TokenRequirements, requirements_of
from galvatron.train.data.synthetic import synthetic
from galvatron.train.data.tokens import default_cache, pack, trained_on
from galvatron.train.data.vocabulary import ByteTokenizer, SavedTokenizer, Tokenizer, has_tokenizer

__all__ = ["Data", "DataOptions", "check_paths", "open_data"]

_STORIES = 4000
"""Of the source "stories": a good megabyte."""


@dataclass(frozen=True)
class Data:
    """What a run trains on, and what it is evaluated on."""

    train: Dataset
    held_out: Dataset | None = None
    tokenizer: Path | None = None
    """Folder of the tokenizer, to be kept with the trained model; None for bytes, images and synthetic data."""
    documents: bool = False
    """Whether rows hold documents that are kept apart."""


class DataOptions(TypedDict, total=False):
    """What may be said about data besides what they are."""

    tokenizer: str | Path | None
    """A folder, "bytes", or "train"; else that of the model's folder."""
    model_folder: Path | None
    """Its ``preprocessor_config.json`` also says how images are normalised."""
    seed: int
    """Decides generated data only."""
    cache: Path | None
    """Where tokens are kept."""
    held_out: float
    """The share of samples kept for evaluation."""
    text_field: str | None
    """Of tables and lines of JSON: the field with the text; else "text"."""
    pack: bool | None
    """Whether several documents stand in a row, or one; attention keeps them apart. None: conversations are packed so,
    and other text is one stream that is cut without regard to documents."""


def open_data(
    spec: str | Path | None, config: Mapping[str, Any], training: Training, **options: Unpack[DataOptions]
) -> Data:
    """The data that ``spec`` names, for the model of this configuration (the content of a ``config.json``).

    ``spec``: None or "synthetic"; "stories", generated English; or a path: for language models a file or folder of
    ``.txt``, ``.jsonl``, ``.parquet`` or ``.arrow``, or what ``save_to_disk`` of Hugging Face's datasets wrote; for
    image models a folder of class folders.
    """
    tokenizer, model_folder = options.get("tokenizer"), options.get("model_folder")
    seed, cache, held_out = options.get("seed", 0), options.get("cache"), options.get("held_out", 0.0)
    needs = requirements_of(config, training)
    spec = spec or "synthetic"
    made_up = str(spec) == "synthetic"
    if tokenizer is not None and (made_up or isinstance(needs, ImageRequirements)):
        raise InvalidInput(
            f"tokenizer {str(tokenizer)!r}: {'synthetic data' if made_up else 'an image model'} needs none; leave it "
            "out, or name the text to train a language model on"
        )
    evaluated: Dataset | None = None
    folder = None
    dataset: Dataset
    if made_up:
        dataset = synthetic(config, training, seed=seed)
    elif isinstance(needs, ImageRequirements):
        root = _existing(spec)
        if not root.is_dir():
            raise InvalidInput(f"data {str(root)!r}: is a file; expected a folder of class folders with images")
        normalisation = saved_normalisation(model_folder, needs.channels)
        dataset = image_folder(root, needs, normalisation, augment=True)
        evaluated = replace(dataset, augment=False)
    else:
        cache = cache or default_cache()
        chat = None if str(spec) == "stories" else chat_file(_existing(spec))
        packed = options.get("pack")
        if chat is not None:
            apart = KeptApart(config=config, needs=needs, cache=cache, packed=packed is not False)
            saved = _chat_tokenizer(tokenizer, model_folder, chat)
            folder, dataset = saved.folder, apart.of_chat(chat, saved)
        else:
            field = options.get("text_field") or "text"
            source = StorySource(_STORIES, seed) if str(spec) == "stories" else text_source(_existing(spec), field)
            chosen, folder = _tokenizer(tokenizer, model_folder, source, needs, cache)
            if packed is None:
                dataset = _text(source, chosen, needs, cache)
            else:
                dataset = KeptApart(config=config, needs=needs, cache=cache, packed=packed).of_text(source, chosen)
    documents = isinstance(dataset, Examples)
    if not held_out:
        return Data(dataset, None, folder, documents)
    train, held = split(dataset, held_out, evaluated=evaluated)
    return Data(train, held, folder, documents)


def check_paths(spec: str | Path | None, tokenizer: str | Path | None) -> None:
    """Refuse data or a tokenizer that are not there; whether they fit the model is seen when they are opened."""
    if spec is not None and str(spec) not in ("synthetic", "stories"):
        _existing(spec)
    if tokenizer is not None and str(tokenizer) not in ("bytes", "train"):
        SavedTokenizer(Path(tokenizer))


def _existing(spec: str | Path) -> Path:
    path = Path(spec)
    if not path.exists():
        raise InvalidInput(
            f"data {str(spec)!r}: no such file or folder, and nothing is fetched from a network; give a path, "
            "'synthetic' or 'stories' (a dataset of the Hugging Face hub: download it, then give its folder)"
        )
    return path


def _tokenizer(
    given: str | Path | None, model_folder: Path | None, source: TextSource, needs: TokenRequirements, cache: Path
) -> tuple[Tokenizer, Path | None]:
    """The tokenizer, and its folder if it has one."""
    if given is None and model_folder is not None and has_tokenizer(model_folder):
        given = model_folder
    if given is None and isinstance(source, StorySource):
        given = "train"
    if given is None:
        raise InvalidInput(
            f"data {source.name!r}: no tokenizer was given, and the model's folder has none; give the folder of one, "
            "'bytes' (each byte a token), or 'train' (trained on this data)"
        )
    sentinels = SpanLengths.of(needs.length).spans if needs.objective is Objective.SPANS else 0
    if str(given) == "bytes":
        return ByteTokenizer(sentinels), None
    if str(given) == "train":
        trained = trained_on(source, cache, words=needs.vocabulary, sentinels=sentinels)
        return trained, trained.folder
    saved = SavedTokenizer(Path(given))
    return saved, saved.folder


def _chat_tokenizer(given: str | Path | None, model_folder: Path | None, chat: Chat) -> SavedTokenizer:
    """That of a chat model, with its template."""
    if given is None and model_folder is not None and has_tokenizer(model_folder):
        given = model_folder
    if given is None or str(given) in ("bytes", "train"):
        raise InvalidInput(
            f"data {str(chat.path)!r}: conversations need the tokenizer of a chat model, but "
            f"{'none' if given is None else repr(str(given))} was given; give its folder"
        )
    return SavedTokenizer(Path(given))


def _text(source: TextSource, tokenizer: Tokenizer, needs: TokenRequirements, cache: Path) -> LanguageData:
    words = tokenizer.vocabulary.size
    if words > needs.vocabulary:
        raise InvalidInput(
            f"tokenizer: it has {words} tokens, the model's vocabulary {needs.vocabulary}; take the model's own "
            "tokenizer, 'train', or a model with a larger vocab_size"
        )
    maker = sample_maker_of(needs, tokenizer.vocabulary)
    packed = pack(source, tokenizer, cache)
    dataset = LanguageData(PackedStream(packed), maker)
    if not len(dataset):
        raise InvalidInput(
            f"data {source.name!r}: has {len(packed.tokens)} tokens; one sample takes {maker.tokens}; give more text "
            "or a shorter sequence length"
        )
    return dataset
