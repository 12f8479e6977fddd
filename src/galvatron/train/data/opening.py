"""From what a user says to data sets: which kind of data a path holds, and whether it fits the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.train.data.apart import KeptApart
from galvatron.train.data.chat import Chat, chat_in
from galvatron.train.data.dataset import Dataset, split
from galvatron.train.data.documents import StorySource, TextSource, text_source
from galvatron.train.data.examples import Examples
from galvatron.train.data.images import image_folder, image_processor
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
    """The share of samples kept for evaluation; not beside ``evaluation``."""
    evaluation: str | Path | None
    """Data of the same kinds to evaluate on, read with the same tokenizer."""
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
    ``.txt``, ``.jsonl``, ``.parquet``, ``.arrow`` or ``.csv``, or what ``save_to_disk`` of Hugging Face's datasets
    wrote; for image models a folder of class folders.
    """
    tokenizer, evaluation = options.get("tokenizer"), options.get("evaluation")
    held_out = options.get("held_out", 0.0)
    needs = requirements_of(config, training)
    spec = spec or "synthetic"
    made_up = str(spec) == "synthetic"
    if tokenizer is not None and (made_up or isinstance(needs, ImageRequirements)):
        raise InvalidInput(
            f"tokenizer {str(tokenizer)!r}: {'synthetic data' if made_up else 'an image model'} needs none; leave it "
            "out, or name the text to train a language model on"
        )
    if evaluation is not None and made_up:
        raise InvalidInput(f"eval-data {str(evaluation)!r}: given, but the training data are made up; give --data too")
    if made_up:
        return _parted(synthetic(config, training, seed=options.get("seed", 0)), held_out)
    if isinstance(needs, ImageRequirements):
        processor = image_processor(options.get("model_folder"), needs)
        images = image_folder(_image_root(spec), needs, processor, augment=True)
        if evaluation is not None:
            return Data(images, image_folder(_image_root(evaluation), needs, processor, augment=False))
        return _parted(images, held_out, evaluated=replace(images, augment=False))
    text = _Text(config, needs, options)
    source = text.source(spec)
    chosen, folder = text.tokenizer(source)
    dataset = text.dataset(source, chosen)
    documents = isinstance(dataset, Examples)
    if evaluation is not None:
        return Data(dataset, text.dataset(text.source(evaluation), chosen), folder, documents)
    return replace(_parted(dataset, held_out), tokenizer=folder, documents=documents)


def _parted(dataset: Dataset, held_out: float, evaluated: Dataset | None = None) -> Data:
    return Data(*split(dataset, held_out, evaluated=evaluated)) if held_out else Data(dataset)


def _image_root(spec: str | Path) -> Path:
    root = _existing(spec)
    if not root.is_dir():
        raise InvalidInput(f"data {str(root)!r}: is a file; expected a folder of class folders with images")
    return root


class _Text:
    """How a model's text is read: the data to train on and those to evaluate on alike."""

    def __init__(self, config: Mapping[str, Any], needs: TokenRequirements, options: DataOptions) -> None:
        self._config, self._needs, self._options = config, needs, options
        self._cache = options.get("cache") or default_cache()

    def source(self, spec: str | Path) -> Chat | TextSource:
        if str(spec) == "stories":
            return StorySource(_STORIES, self._options.get("seed", 0))
        path, field = _existing(spec), self._options.get("text_field")
        chat = chat_in(path) if field is None else None  # a field that is named holds text
        return chat or text_source(path, field or "text")

    def tokenizer(self, source: Chat | TextSource) -> tuple[Tokenizer, Path | None]:
        """The tokenizer, and its folder if it has one."""
        given, model_folder = self._options.get("tokenizer"), self._options.get("model_folder")
        if given is None and model_folder is not None and has_tokenizer(model_folder):
            given = model_folder
        if isinstance(source, Chat):
            saved = _chat_tokenizer(given, source)
            return saved, saved.folder
        return _tokenizer(given, source, self._needs, self._cache)

    def dataset(self, source: Chat | TextSource, tokenizer: Tokenizer) -> Dataset:
        packed = self._options.get("pack")
        apart = KeptApart(config=self._config, needs=self._needs, cache=self._cache, packed=packed is not False)
        if isinstance(source, Chat):
            known = tokenizer if isinstance(tokenizer, SavedTokenizer) else _chat_tokenizer("bytes", source)
            return apart.of_chat(source, known)
        if packed is None:
            return _text(source, tokenizer, self._needs, self._cache)
        return apart.of_text(source, tokenizer)


def check_paths(specs: Iterable[str | Path | None], tokenizer: str | Path | None) -> None:
    """Refuse data or a tokenizer that are not there; whether they fit the model is seen when they are opened."""
    for spec in specs:
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
    if not path.is_file() and not path.is_dir():
        raise InvalidInput(f"data {str(spec)!r}: is a pipe or a device; expected a file or a folder")
    return path


def _tokenizer(
    given: str | Path | None, source: TextSource, needs: TokenRequirements, cache: Path
) -> tuple[Tokenizer, Path | None]:
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


def _chat_tokenizer(given: str | Path | None, chat: Chat) -> SavedTokenizer:
    """That of a chat model, with its template; of prompts and completions any that has a folder."""
    if given is None or str(given) in ("bytes", "train"):
        raise InvalidInput(
            f"data {chat.name!r}: conversations need a tokenizer with a folder, that of a chat model for messages, but "
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
