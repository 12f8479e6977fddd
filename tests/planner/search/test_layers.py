"""Stages that are alike: numbers against signatures, for all stages of random models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from galvatron.planner.search.layers import Layers


@pytest.mark.parametrize("seed", range(4))
def test_stages_have_one_number_exactly_where_they_have_one_signature(seed: int) -> None:
    """What would break: a stage that is priced as another, or the last one as if more followed."""
    rng = np.random.default_rng((11, seed))
    for _ in range(40):
        count, kind_count = int(rng.integers(1, 14)), int(rng.integers(1, 4))
        kinds = np.repeat(rng.integers(0, kind_count, count), rng.integers(1, 4, count))[:count]
        layers = Layers(kinds, kind_count)
        most = int(rng.integers(1, count + 1))
        spans = layers.spans(most)
        signatures = dict[Any, Any]()
        for end in range(count + 1):
            for width in range(most + 1):
                number = int(spans.number[end, width])
                assert (number > 0) == (0 < width <= end)
                if number:
                    signatures.setdefault(number, set()).add(layers.signature(end - width, end))
        assert all(len(alike) == 1 for alike in signatures.values())
        every = [next(iter(alike)) for alike in signatures.values()]
        assert len(set(every)) == len(every)
        assert sorted(signatures) == list(range(1, len(spans.ends)))
        for number, (signature,) in signatures.items():
            end = int(spans.ends[number])
            assert layers.signature(end - int(spans.widths[number]), end) == signature
        assert spans.ends[0] - spans.widths[0] < 0, "the number of no stage"
        wider = layers.spans(count)
        assert (wider.number[:, : most + 1] == spans.number).all()
