"""Grades of recompute, and offload: training equals the stock model in one process, what stays is what is predicted,
and nothing is sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dropping import equal, observed, with_dropout
from experts_oracle import case as expert_case
from experts_oracle import compare
from keeping import kept_by_forward
from longer import longer
from oracle import Case, batches, first_weights, single_process
from parity import build, cluster_of, difference, spec_of, train
from ranks import ranks
from small_models import config
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Cluster, Strategy, schedule_named
from galvatron.planner.cost import GALVATRON, CostModel
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.runtime import collectives, offload, selective
from galvatron.runtime.offload import HostMemory
from galvatron.runtime.selective import Grade, Selective

GRADES = ("rs", "ra", "host")


def _cluster(devices: int) -> Cluster:
    """With a link to the host."""
    flat = cluster_of(devices)
    return replace(flat, device=replace(flat.device, host_bytes_per_s=1e10, host_memory_bytes=1 << 40))


def _plan(case: Case) -> galvatron.Plan:
    request = Request(
        model=spec_of(case), cluster=_cluster(case.devices), batch=case.batch, schedule=schedule_named(case.schedule)
    )
    return priced(request, case.stages, micro_batches=case.micro_batches)


def _case(family: str, *stages: list[str], **options: Any) -> Case:
    blocks = "n_layer" if family == "gpt2" else "num_hidden_layers"
    changes: dict[str, Any] = {blocks: sum(map(len, stages)) - 2}
    if family == "llama":  # in fp32 GPUs have fused attention for these only
        changes["num_key_value_heads"] = config(family)["num_attention_heads"]
    return Case(config=config(family, **changes), stages=list(stages), **options)


def _trained(case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]]) -> Any:
    """On a rank; even the smallest tensor goes to the host."""
    with patch.object(offload, "LEAST_BYTES", 0):
        return train(case, plan, folder, given)


def _blocks(grade: str) -> list[str]:
    return ["dp2", f"dp2+{grade}", f"sdp2+{grade}", f"tp2+{grade}", f"tp2+sp+{grade}", "dp2"]


@pytest.mark.parametrize(
    "case",
    [
        *(_case("llama", _blocks(grade), clip=0.5) for grade in GRADES),
        *(_case("gpt2", ["single", f"single+{own}"], [f"single+{own}", "single"], micro_batches=4) for own in GRADES),
        *(longer(_case("gpt2", _blocks(grade))) for grade in GRADES),
        *(longer(_case("bert", _blocks(grade), padding=True)) for grade in GRADES),
        longer(_case("llama", ["sdp2", "dp2+zero2+rs", "tp2+ra", "sdp2"], schedule="gpipe", micro_batches=2)),
        longer(_case("llama", ["ring2", "ring2+host", "ulysses2+host", "dp2"], micro_batches=2)),
        *(longer(_case("gpt2", ["dp2", f"ring2+{own}", f"ulysses2+{own}", "ring2"])) for own in GRADES),
    ],
    ids=lambda case: f"{case.config['model_type']}: {case.stages}",
)
def test_equals_one_process(case: Case) -> None:
    found = ranks(case.devices).run(_trained, case, _plan(case), first_weights(case), batches(case))
    different = difference(case, found, single_process(case))
    assert different is None, different


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("mixtral", [["dp4", "sdp4+rs", "dp2-tp2+ra", "dp4"]]),
        longer("qwen3_moe", [["dp4", "dp2-tp2/ep4+rs", "sdp4/ep4+ra", "dp4"]]),
        longer("qwen3_moe", [["dp4", "dp2-tp2+rs", "sdp4+host", "dp4"]]),
        longer("qwen3_moe", [["dp2", "dp2/ep2+ra"], ["tp2/ep2+rs", "sdp2"]]),
        longer("deepseek_v3", [["dp4", "dp2-tp2+rs", "dp2-tp2/ep4+rs", "sdp4"]]),
        longer("gpt_oss", [["dp4", "sdp4+rs", "sdp4/ep4+rs", "dp4"]]),
    ],
)
def test_layers_with_experts(family: str, stages: list[list[str]]) -> None:
    """Models without a family of their own; the planner offers no grades beside EP, but they run."""
    assert compare(expert_case(family, *stages)) is None


@pytest.mark.parametrize(
    ("family", "strategy", "grade"),
    [
        ("gpt2", "dp2-tp2", "rs"),
        longer("bert", "sdp2-tp2", "rs"),
        longer("bert", "dp4", "host"),
        longer("gpt2", "tp4+sp", "rs"),
    ],
)
def test_dropout_draws_the_same_again(family: str, strategy: str, grade: str) -> None:
    """Bit by bit what it is without recompute."""
    plain = with_dropout(family, strategy)
    (_, *middle, last), first = plain.stages[0], strategy.removesuffix("+sp")
    plain = replace(plain, stages=[[first, *middle, last]])
    flagged = replace(plain, stages=[[first, *(f"{own}+{grade}" for own in middle), last]])
    given = batches(plain)
    with patch("dropping.plan_for", _plan):
        ours, theirs = observed(flagged, given), observed(plain, given)
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == other.losses
        for a, b in zip(one.held, other.held, strict=True):
            torch.testing.assert_close(a.gradient, b.gradient, rtol=1e-5, atol=1e-7)


# What stays


_SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
_WIDE = config("llama", vocab_size=64, num_hidden_layers=3, **_SIZES)


def _predicted(case: Case, strategy: str) -> int:
    """Bytes that the cost model says a block keeps on a rank for all samples."""
    spec = spec_of(case)
    cost = CostModel(model=spec, cluster=_cluster(case.devices), conventions=GALVATRON)
    costs = cost.stage([Strategy.parse(strategy)], 1)
    tables = costs.tables(np.array(case.batch), np.array(1))
    kind = [own.name for own in spec.kinds].index("decoder")
    return int(tables.activation_bytes[kind, 0])


def _kept(case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]], mutant: str = "") -> int:
    """On a rank: what the second forward keeps, which knows what backward needs."""
    with _mutated(mutant):
        return kept_by_forward(case, plan, folder, given[0], 2)


@pytest.mark.parametrize(
    "strategy",
    [
        "dp2+rs",
        longer("dp2"),
        longer("dp2+ra"),
        longer("tp2+rs"),
        longer("tp2+ra"),
        longer("tp2"),
        longer("sdp2+rs"),
        "tp2+sp+rs",
        longer("tp2+sp+ra"),
    ],
)
def test_what_stays_is_what_is_predicted(strategy: str) -> None:
    """Three blocks, and what embedding and head keep, which is the same whatever the blocks do."""
    ours, predicted = _more_than_recomputed(strategy)
    assert ours == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(("mutant", "sign"), [("nothing", -1), longer("more", 1)])
def test_a_rule_that_keeps_too_little_or_too_much_shows(mutant: str, sign: int) -> None:
    ours, predicted = _more_than_recomputed("dp2+rs", mutant)
    assert sign * (ours - predicted) > 0.1 * predicted


def _more_than_recomputed(strategy: str, mutant: str = "") -> tuple[int, int]:
    """What blocks keep more than if they were recomputed, found and predicted."""
    axes, found = strategy.partition("+")[0], []
    for middle in (strategy, axes + ("+sp" if "+sp" in strategy else "") + "+rc"):
        case = Case(config=_WIDE, stages=[[axes, *[middle] * 3, axes]], batch=4, dtype=torch.float32, steps=1)
        kept = ranks(2).run(_kept, case, _plan(case), first_weights(case), batches(case), mutant)
        found.append((kept[0], 3 * _predicted(case, middle)))
    (ours, predicted), (least, predicted_least) = found
    return ours - least, predicted - predicted_least


def _sent(case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]], mutant: str) -> list[int]:
    """On a rank: all-reduces, all-gathers and reduce-scatters of an iteration."""
    with _mutated(mutant):
        model = build(case, plan, folder)
        model.forward_backward(given[0])
        counts = []
        with ExitStack() as stack:
            for place, name in ((dist, "all_reduce"), (collectives, "all_gather_into"), (collectives, _SCATTER)):
                counted = Mock(wraps=getattr(place, name))
                stack.enter_context(patch.object(place, name, counted))
                counts.append(counted)
            model.forward_backward(given[0])
    return [counted.call_count for counted in counts]


_SCATTER = "reduce_scatter_into"


@contextmanager
def _mutated(mutant: str) -> Iterator[None]:
    """A rule that keeps nothing, or not what other ranks sent, or more than it should."""
    rule = selective.is_kept
    rules = {
        "nothing": lambda operation, grade: False,
        "more": lambda operation, grade: rule(operation, grade) or "silu" in str(operation),
        "unsent": lambda operation, grade: rule(operation, grade) and selective.SENT not in str(operation),
    }
    with ExitStack() as stack:
        if mutant:
            stack.enter_context(patch.object(selective, "is_kept", rules[mutant]))
        yield


@pytest.mark.parametrize(("strategy", "regathered"), [("tp2", 0), ("tp2+sp", 1)])
def test_nothing_is_sent_twice(strategy: str, regathered: int) -> None:
    """But for the inputs of projections under sequence parallelism, where the projections are not kept."""
    counts = {}
    for grade, mutant in (("", ""), ("+rs", ""), ("+ra", ""), ("+rs", "unsent"), ("+rs", "nothing")):
        case = _case("llama", ["tp2", *[f"{strategy}{grade}"] * 2, "tp2"], steps=1)
        found = ranks(2).run(_sent, case, _plan(case), first_weights(case), batches(case), mutant)
        counts[grade + mutant] = found[0]
    plain = counts[""]
    assert counts["+rs"] == plain
    # Two blocks, each with two regions whose inputs are gathered.
    assert counts["+ra"] == [plain[0], plain[1] + regathered * 4, plain[2]]
    for mutant in ("+rsunsent", "+rsnothing"):
        assert sum(counts[mutant]) > sum(plain)


# Single operations


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, tensor: Tensor) -> Tensor:
        inner = functional.gelu(self.first(tensor))
        hidden = self.second(inner * (torch.rand_like(inner) > 0.5))
        output: Tensor = self.third(functional.gelu(hidden * (torch.rand_like(hidden) > 0.5)))
        return output


def test_what_is_drawn_and_kept_moves_the_generator() -> None:
    """Flash attention with dropout draws and is kept: what draws after it must draw what it drew."""
    model, given = _Small().double(), torch.randn(4, 16, dtype=torch.float64)
    kept = Selective(Grade.PRODUCTS)
    rule, seen = selective.is_kept, []

    def drawn_too(operation: Any, grade: Grade) -> bool:
        if "rand_like" not in str(operation):
            return rule(operation, grade)
        seen.append(operation)
        return len(seen) % 2 == 1  # the first of the two

    gradients = []
    for contexts in (None, kept.contexts):
        model.zero_grad()
        torch.manual_seed(3)
        with patch.object(selective, "is_kept", drawn_too):
            if contexts is None:
                model(given).sum().backward()
            else:
                run = lambda own: (torch.manual_seed(3), model(own))[1]  # noqa: E731
                checkpoint(
                    run, given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
                ).sum().backward()
        gradients.append([own.grad.clone() for own in model.parameters()])  # type: ignore[union-attr]
    assert len(seen) >= 4
    assert equal(*gradients)


def test_a_result_that_is_changed_in_place_is_named() -> None:
    layer = nn.Linear(4, 4, bias=False)

    def run(given: Tensor) -> Tensor:
        made: Tensor = layer(given)
        squared = made.relu().pow(2)
        made.detach().add_(1)
        return squared

    output = checkpoint(
        run, torch.randn(2, 4), use_reentrant=False, preserve_rng_state=False,
        context_fn=Selective(Grade.PRODUCTS).contexts,
    )  # fmt: skip
    with pytest.raises(InvalidInput, match=r"changes in place the result of a matrix product.*use \+rc"):
        output.sum().backward()


def test_the_last_product_is_not_kept_once_that_is_known() -> None:
    model, kept = _Small(), Selective(Grade.PRODUCTS)
    for _ in range(2):
        contexts = kept.contexts()
        with patch.object(kept, "contexts", lambda made=contexts: made):
            output = checkpoint(model, torch.randn(2, 16), use_reentrant=False, context_fn=kept.contexts)
        stored = [result is not None for _, result in contexts[0]._results.made]  # type: ignore[attr-defined]
        output.sum().backward()
    assert kept.learned == (3, 2)
    assert stored == [True, True, False]


# The host


def test_each_storage_goes_to_the_host_once_and_comes_back_a_layer_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    host = HostMemory(torch.device("cpu"))
    layers, given = [_Small().double() for _ in range(5)], torch.randn(4, 16, dtype=torch.float64)
    mask = torch.ones(4, 16, dtype=torch.float64)
    order: list[str] = []
    restored, fetch = offload._View.restored, offload._Moved.fetch
    numbers: dict[int, int] = {}

    def fetched(own: Any) -> None:
        if own._here is None:
            order.append(f"fetch {numbers[id(own)]}")
        fetch(own)

    def used(own: Any) -> Tensor:
        order.append(f"use {numbers[id(own._moved)]}")
        return restored(own)

    monkeypatch.setattr(offload._Moved, "fetch", fetched)
    monkeypatch.setattr(offload._View, "restored", used)
    made = offload._Moved.__init__
    current = 0

    def numbered(own: Any, *args: Any) -> None:
        made(own, *args)
        numbers[id(own)] = current
        alive.append(own)

    alive: list[Any] = []
    monkeypatch.setattr(offload._Moved, "__init__", numbered)
    gradients = []
    for moves in (False, True):
        torch.manual_seed(0)
        hidden = given.clone().requires_grad_()
        for current, layer in enumerate(layers):  # noqa: B007
            layer.zero_grad()
            if moves:
                with host.around(layer.parameters(), [{"mask": mask}], (0, 0)):
                    hidden = layer(hidden) * mask
            else:
                hidden = layer(hidden) * mask
        torch.autograd.backward(hidden.sum())
        gradients.append([own.grad.clone() for layer in layers for own in layer.parameters()])  # type: ignore[union-attr]
    assert equal(*gradients)
    last = {number: max(place for place, what in enumerate(order) if what == f"fetch {number}") for number in (0, 1, 2)}
    first = {number: order.index(f"use {number}") for number in range(5)}
    assert not {"fetch 3", "fetch 4"} & set(order), "the last two are still there"
    assert last[2] < first[3]
    assert last[1] < first[2]
    assert last[0] < first[1]
    assert len({own._was.cdata for own in alive}) == len(alive), "a storage was copied twice"
    assert mask.untyped_storage()._cdata not in {own._was.cdata for own in alive}
    assert host.moved_bytes == sum(len(own._host) for own in alive) > 0


def test_bytes_on_the_host_are_what_a_layer_saves() -> None:
    case = Case(
        config=_WIDE, stages=[["single", *["single+host"] * 3, "single"]], batch=4, dtype=torch.float32, steps=1
    )
    moved = _moved(case)
    full = 3 * _predicted(replace(case, stages=[["single"] * 5]), "single")
    assert moved == pytest.approx(full, rel=0.1)


def _moved(case: Case) -> int:
    (found,) = ranks(1).run(_moved_bytes, case, _plan(case), first_weights(case), batches(case)[0])
    return int(found)


def _moved_bytes(case: Case, plan: galvatron.Plan, folder: Path, given: dict[str, Tensor]) -> int:
    with patch.object(offload, "LEAST_BYTES", 0):
        model = build(case, plan, folder)
        model.forward_backward(given)
    layers: Any = model._pipeline.stage.stage_layers
    moved: int = layers[1].saving.host.moved_bytes
    return moved
