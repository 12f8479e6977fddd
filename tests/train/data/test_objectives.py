"""From tokens to samples: what is hidden, what is predicted, and that nothing of the text is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import IGNORED
from galvatron.train.data.objectives import Causal, Masked, SpanLengths, Spans, sample_maker_of
from galvatron.train.data.order import generator_of
from galvatron.train.data.requirements import Objective, TokenRequirements
from galvatron.train.data.vocabulary import Vocabulary

BERT = Vocabulary(size=1000, mask=4, start=2, end=3, special=(0, 1, 2, 3, 4))


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 1000, (length,), generator=generator_of(seed))


def wanted(objective: Objective, length: int = 64) -> TokenRequirements:
    return TokenRequirements(objective=objective, vocabulary=1000, length=length, end=1)


def test_causal_labels_are_the_tokens() -> None:
    """The families shift them (docs/models.md)."""
    tokens = text(64)
    sample = Causal(64).sample(tokens, generator_of(0))
    assert torch.equal(sample["input_ids"], tokens)
    assert torch.equal(sample["labels"], tokens)
    assert sample["labels"].data_ptr() != sample["input_ids"].data_ptr()


def test_masked_statistics() -> None:
    """15% are predicted; of these 80% show the mask, 10% another word, 10% themselves; the others are untouched."""
    objective = sample_maker_of(wanted(Objective.MASKED, 256), BERT)
    assert objective.tokens == 254
    hidden = shown_mask = shown_same = total = 0
    for number in range(200):
        tokens = text(254, number)
        tokens[100] = 3  # the end of a document
        sample = objective.sample(tokens, generator_of(1, number))
        seen, labels = sample["input_ids"], sample["labels"]
        whole = torch.cat([torch.tensor([2]), tokens, torch.tensor([3])])
        chosen = labels != IGNORED
        assert seen.shape == labels.shape == (256,)
        assert torch.equal(labels[chosen], whole[chosen])
        assert torch.equal(seen[~chosen], whole[~chosen])
        assert not chosen[[0, 101, 255]].any(), "special tokens are never predicted"
        assert int(chosen.sum()) == round(0.15 * 253), "always as many"
        hidden += int(chosen.sum())
        shown_mask += int((seen[chosen] == 4).sum())
        shown_same += int((seen[chosen] == whole[chosen]).sum())
        total += 253
    assert abs(hidden / total - 0.15) < 0.002
    assert abs(shown_mask / hidden - 0.8) < 0.02
    assert abs(shown_same / hidden - 0.1) < 0.02


def test_masks_differ_with_the_generator_and_are_spread_evenly() -> None:
    objective = Masked(34, BERT, 4)
    counts = torch.zeros(34)
    for number in range(1000):
        counts += objective.sample(text(32), generator_of(number))["labels"] != IGNORED
    inner = counts[1:-1]
    expected = 1000 * 5 / 32
    assert (inner - expected).abs().max() < 5 * expected**0.5


def test_spans_can_be_put_back() -> None:
    """Replacing each sentinel of the input by what follows it in the target gives the text."""
    vocabulary = Vocabulary(size=1100, end=1, sentinels=tuple(range(1099, 999, -1)), special=(1,))
    objective = sample_maker_of(wanted(Objective.SPANS, 512), vocabulary)
    assert isinstance(objective, Spans)
    for number in range(50):
        tokens = text(objective.tokens, number)
        sample = objective.sample(tokens, generator_of(2, number))
        source, target = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert len(source) == 512
        target = [token for token in target if token != IGNORED]
        assert source.pop() == target.pop() == 1
        hidden: dict[int, list[int]] = {}
        for token in target:
            if token >= 1000:
                hidden[token] = []
            else:
                hidden[list(hidden)[-1]].append(token)
        assert list(hidden) == list(range(1099, 1099 - len(hidden), -1))
        back = [token for mark in source for token in hidden.get(mark, [mark])]
        assert back == tokens.tolist()
        assert all(hidden.values())
        assert [token for token in source if token >= 1000] == list(hidden)


def test_lengths_are_those_of_t5() -> None:
    """T5's own figures (its mesh_transformer task setup): inputs of 512 come from 568 tokens, and targets have 114."""
    lengths = SpanLengths.of(512)
    assert lengths.tokens == 568
    assert lengths.hidden + lengths.spans + 1 == 114


@pytest.mark.parametrize("length", [3, 4, 7, 16, 24, 96, 100, 511, 1000, 1024])
def test_inputs_have_exactly_the_length_asked_for(length: int) -> None:
    lengths = SpanLengths.of(length)
    assert lengths.tokens - lengths.hidden + lengths.spans + 1 == length
    assert lengths.target >= lengths.hidden + lengths.spans + 1
    for degree in (2, 3, 4, 6, 8, 12, 16):
        assert length % degree or not lengths.target % degree, "sequence parallelism divides both or neither"


@pytest.mark.parametrize(
    ("objective", "length", "vocabulary", "said"),
    [
        (Objective.MASKED, 64, Vocabulary(size=10), "no mask token"),
        (Objective.MASKED, 2, BERT, "at least 3"),
        (Objective.SPANS, 512, Vocabulary(size=10, sentinels=(9, 8)), "2 sentinels .* need 28"),
        (Objective.SPANS, 2, Vocabulary(size=10, sentinels=(9, 8)), "at least 3 tokens"),
    ],
)
def test_what_cannot_be_made_is_refused(objective: Objective, length: int, vocabulary: Vocabulary, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        sample_maker_of(wanted(objective, length), vocabulary)
