"""Synthetic data: right for each family, and something can be learned from it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from small_models import IMAGES, TOKENS, config

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families.build import build_meta
from galvatron.families.registry import layered_model
from galvatron.train.data import Loader, synthetic, unigram_entropy
from galvatron.train.data.order import generator_of
from galvatron.train.data.requirements import Objective, TokenRequirements, requirements_of
from galvatron.train.data.synthetic import ZipfTokens


def training(family: str) -> Training:
    return Training(sequence_length=16 if family in TOKENS else None, dropout=False)


@pytest.mark.parametrize("family", [*TOKENS, *IMAGES])
def test_a_stock_model_takes_it(family: str) -> None:
    """The stock model, given the batch by name, computes its own loss near that of guessing."""
    how = training(family)
    batch = next(Loader(synthetic(config(family), how), batch=4))
    hollow = build_meta(config(family), how)
    assert layered_model(hollow).required <= batch.keys()
    assert layered_model(hollow).targets(batch) > 0
    torch.manual_seed(0)
    model = type(hollow)(hollow.config)
    guess = math.log(67 if family in TOKENS else 10)
    assert model(**batch).loss.item() == pytest.approx(guess, rel=0.5)


def test_words_follow_zipf() -> None:
    """Word k with probability log(1 + 1/k) / log(n + 1), and the entropy that has."""
    words, count = 50, 200_000
    drawn = Counter(ZipfTokens(3, 3 + words).take(0, count, generator_of(1)).tolist())
    shares = [math.log1p(1 / k) / math.log(words + 1) for k in range(1, words + 1)]
    assert set(drawn) == set(range(3, 3 + words))
    for k, share in enumerate(shares, start=1):
        assert drawn[2 + k] / count == pytest.approx(share, abs=5 * math.sqrt(share / count))
    entropy = -sum(share * math.log(share) for share in shares)
    dataset = synthetic(config("gpt2", vocab_size=words), Training(sequence_length=64))
    assert unigram_entropy(dataset) == pytest.approx(entropy, abs=0.02)
    assert entropy < 0.9 * math.log(words)


def test_images_of_a_class_look_alike() -> None:
    """The nearest mean of other images of the class tells the class."""
    dataset = synthetic(config("vit"), Training())
    samples = [dataset.sample(index, generator_of(index)) for index in range(200)]
    pixels = torch.stack([sample["pixel_values"].flatten() for sample in samples])
    labels = torch.stack([sample["labels"] for sample in samples])
    means = torch.stack([pixels[:100][labels[:100] == label].mean(0) for label in range(10)])
    assert torch.equal(torch.cdist(pixels[100:], means).argmin(1), labels[100:])
    assert unigram_entropy(dataset) == pytest.approx(math.log(10), abs=0.01)
    other = synthetic(config("vit"), Training(), seed=1)
    assert other.fingerprint != dataset.fingerprint


@pytest.mark.parametrize("family", TOKENS)
def test_samples_differ(family: str) -> None:
    dataset = synthetic(config(family), training(family))
    rows = [dataset.sample(index, generator_of(0, index))["input_ids"] for index in range(50)]
    assert not any(torch.equal(one, two) for one, two in pairwise(rows))
    assert all(int(row.min()) >= 0 and int(row.max()) < 67 for row in rows)


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a vocabulary of 20 leaves no words beside 28 special tokens"):
        synthetic(config("t5", vocab_size=20), Training(sequence_length=512))


def test_models_of_unknown_family_are_known_by_their_class() -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 90}
    found = requirements_of(mistral, Training(sequence_length=8))
    assert found == TokenRequirements(objective=Objective.CAUSAL, vocabulary=90, length=8, end=2)
    tagger = {"model_type": "mistral", "architectures": ["MistralForTokenClassification"]}
    with pytest.raises(InvalidInput, match="MistralForTokenClassification: no data is made for models of this kind"):
        requirements_of(tagger, Training())


def test_a_language_model_behind_a_vision_tower_learns_the_next_token() -> None:
    """Its class ends as T5's does, which learns hidden spans."""
    gemma = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"vocab_size": 77, "max_position_embeddings": 16, "eos_token_id": 3},
    }
    found = requirements_of(gemma, Training())
    assert isinstance(found, TokenRequirements)
    assert (found.objective, found.vocabulary, found.length) == (Objective.CAUSAL, 77, 16)
