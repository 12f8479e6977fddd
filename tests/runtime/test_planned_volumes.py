"""What layers send is what the planner charges: tensor parallelism by layer, data parallelism by iteration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from longer import longer
from oracle import Case, batches, first_weights
from parity import build, plan_for, spec_of
from ranks import ranks
from small_models import LAYERS, TOKENS, config
from torch import Tensor
from traffic import Sent, Traffic, one_by_one

import galvatron
from galvatron.core.spec import Kind, TensorParallel


@dataclass(frozen=True)
class _Layer:
    """What one layer sent for one micro-batch."""

    forward: list[Sent]
    backward: list[Sent]


def _layers(case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor]) -> list[_Layer]:
    """On a rank: what each layer sends, run by itself."""
    noted = one_by_one(build(case, plan, folder), batch, Traffic)
    return [_Layer(forward.sent, backward.sent) for forward, backward in noted]


def _strategies(family: str, flags: str) -> list[str]:
    """TP on two devices; embeddings have no sequence parallelism."""
    plain = flags.replace("+sp", "")
    return [
        f"tp2{plain if 'embedding' in layer.name else flags}"
        for layer in spec_of(Case(config=config(family), stages=[])).layers
    ]


def _observed(family: str, flags: str = "") -> list[tuple[TensorParallel | None, list[_Layer]]]:
    """For each layer: what the planner says, and what each of two ranks sent."""
    case = Case(config=config(family), stages=[_strategies(family, flags)], batch=4, dtype=torch.float32, steps=1)
    found = ranks(2).run(_layers, case, plan_for(case), first_weights(case), batches(case)[0])
    planned = [layer.tensor_parallel for layer in spec_of(case).layers]
    assert len(planned) == LAYERS[family]
    return [(layer, [one[number] for one in found]) for number, layer in enumerate(planned)]


def _large(sent: list[Sent], message: int) -> list[Sent]:
    """Without the few numbers a token that the cross-entropy of a split vocabulary exchanges."""
    return [one for one in sent if one.size >= message]


@pytest.mark.parametrize("family", [own if own in ("llama", "swin") else longer(own) for own in LAYERS])
def test_all_reduces_of_tensor_parallelism(family: str) -> None:
    """As many as the planner counts, each of the size it says, and nothing else of that size."""
    for number, (planned, layers) in enumerate(_observed(family)):
        for layer in layers:
            if planned is None:
                assert (layer.forward, layer.backward) == ([], []), f"layer {number} is whole on each rank"
                continue
            message = 4 * planned.message_bytes
            each = [Sent("all_reduce", message, 2)]
            assert _large(layer.forward, message) == planned.forward_collectives * each, f"layer {number}, forward"
            assert _large(layer.backward, message) == planned.backward_collectives * each, f"layer {number}, backward"


def test_a_split_vocabulary_exchanges_three_numbers_a_token() -> None:
    """The largest logit, the sum and the target's: the planner neglects them."""
    *_, (planned, layers) = _observed("bert")
    assert planned is not None
    small = [one for one in layers[0].forward if one.size < 4 * planned.message_bytes]
    assert sum(one.size for one in small) == 4 * 8 * 3 * 4, "samples, tokens, numbers, bytes"
    assert {one.operation for one in small} == {"all_reduce"}


@pytest.mark.parametrize("family", [own if own == "t5" else longer(own) for own in TOKENS])
def test_volume_of_sequence_parallelism(family: str) -> None:
    """The planner's price: of each all-reduce a reduce-scatter and an all-gather remain, and in backward each input is
    gathered again for the weights' gradients."""
    for number, (planned, layers) in enumerate(_observed(family, "+sp")):
        assert planned is not None
        message = 4 * planned.message_bytes
        forward, backward = planned.forward_collectives, planned.backward_collectives
        again = backward if planned.sequence_divides else 0
        expected = (2 * forward + 2 * backward + again) * message / 2
        for layer in layers:
            sent = _large([*layer.forward, *layer.backward], message)
            assert sum(one.volume for one in sent) == expected, f"layer {number}"
            if planned.sequence_divides:
                assert {one.operation for one in sent} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("family", [own if own == "llama" else longer(own) for own in LAYERS])
def test_recompute_repeats_no_more_than_forward(family: str) -> None:
    """Backward sends what it sent, and once more what forward did; the last sum of a layer need not be repeated where
    only the next layer reads it."""
    plain, again = _observed(family), _observed(family, "+rc")
    for number, ((planned, layers), (_, repeated)) in enumerate(zip(plain, again, strict=True)):
        if planned is None:
            continue
        message = 4 * planned.message_bytes
        for layer, other in zip(layers, repeated, strict=True):
            assert other.forward == layer.forward, f"layer {number}"
            extra = len(_large(other.backward, message)) - len(_large(layer.backward, message))
            assert extra in (planned.forward_collectives, planned.forward_collectives - 1), f"layer {number}"


@pytest.mark.parametrize(
    ("owner", "user", "gathers"),
    [("tp4", "dp4", 1), ("tp2-dp2", "dp2-tp2", 1), ("tp4", "dp4+rc", 2), ("dp4", "tp4", 0)],
)
def test_a_borrowed_weight_that_is_split_anew(owner: str, user: str, gathers: int) -> None:
    """The planner's price of it: the owner's parts are gathered in forward, again where that is repeated, and the
    gradient is scattered over the same ranks."""
    case = Case(
        config=config("gpt2", n_layer=1, vocab_size=64),
        stages=[[owner, "dp4", user]],
        batch=4,
        dtype=torch.float32,
        steps=1,
    )
    weight = 4 * spec_of(case).layers[-1].tied_parameters
    group = galvatron.Strategy.parse(owner).degree(Kind.TP)
    expected = [Sent("all_gather", weight, group)] * gathers + [Sent("reduce_scatter", weight, group)] * (gathers > 0)
    for layers in ranks(4).run(_layers, case, plan_for(case), first_weights(case), batches(case)[0]):
        sent = [*layers[-1].forward, *layers[-1].backward]
        assert Counter(one for one in sent if one.size == weight) == Counter(expected)


# Data parallelism, by iteration


def _iteration(case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor]) -> list[Sent]:
    """On a rank: all that one iteration sends, without the loss that ends it."""
    model = build(case, plan, folder)
    model.compares_batches = False  # which the first step does, once
    with Traffic() as traffic:
        model.forward_backward(batch)
    sent: list[Sent] = list(traffic.sent)
    loss = sent.pop()
    own = 1 + len(model.shapes) + 2
    assert loss.size == 8 * own, "the loss, which parameters had a part in it, and two numbers for the labels"
    return sent


@pytest.mark.parametrize(
    ("strategy", "gathers", "scatters", "reductions"),
    [
        ("dp4", 0, 0, 1),
        ("sdp4", 2 * 3, 3, 0),
        longer("sdp4+rc", 2 * 3, 3, 0),
        ("dp4+zero2", 1, 3, 0),
        ("dp2-sdp2", 2 * 3, 3, 1),
        longer("sdp2-dp2", 2 * 3, 3, 1),
    ],
)
def test_data_parallelism_of_three_micro_batches(strategy: str, gathers: int, scatters: int, reductions: int) -> None:
    """A layer's parameters are gathered twice and its gradients scattered once a micro-batch under SDP; under ZeRO-2
    they are gathered once an iteration; DP sums once an iteration what sharding leaves of the gradients. The head,
    whose backward follows at once, is gathered once for both passes, which the planner does not charge less."""
    case = Case(
        config=config("llama", vocab_size=64),  # nothing needs padding, nothing is tied
        stages=[[strategy] * 4],
        batch=12,
        micro_batches=3,
        dtype=torch.float32,
        steps=1,
    )
    parsed = galvatron.Strategy.parse(strategy)
    outer, inner = parsed.degree(Kind.DP), parsed.degree(Kind.SDP)
    sharded = outer if parsed.zero2 else inner
    expected = []
    for layer in spec_of(case).layers:
        size = 4 * layer.parameters
        once = layer.name == "head" and not parsed.zero2
        expected += [Sent("all_gather", size, sharded)] * (gathers // 2 if once else gathers)
        expected += [Sent("reduce_scatter", size, sharded)] * scatters
        expected += [Sent("all_reduce", size // inner, outer)] * reductions
    for sent in ranks(4).run(_iteration, case, plan_for(case), first_weights(case), batches(case)[0]):
        assert Counter(sent) == Counter(expected)
