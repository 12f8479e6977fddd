"""Compiled blocks train as the stock model does in one process, whatever the strategy, and are compiled once."""

from __future__ import annotations

import fcntl
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from longer import longer
from oracle import Case, batches, first_weights, single_process
from parity import build, difference, plan_for, run
from ranks import ranks
from small_models import config
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import cpu_vec_isa

import galvatron
from galvatron.core.spec import Training
from galvatron.families.layer import Activations, Layer
from galvatron.runtime import compiled
from galvatron.runtime.compiled import Compiler, compiler, why_not
from galvatron.runtime.selective import Grade

pytestmark = pytest.mark.skipif(why_not("cpu") is not None, reason=str(why_not("cpu")))


def _case(family: str, *stages: list[str], micro_batches: int = 1, **options: float) -> Case:
    layers = {} if family == "t5" else {"num_hidden_layers": sum(map(len, stages)) - 2}
    return Case(
        config=config(family, **layers, **options),
        stages=list(stages),
        micro_batches=micro_batches,
        dtype=torch.float32,
        clip=0.5,
        training=Training(compile=True),
    )


def _counted(
    kernels: bool, case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]]
) -> tuple[object, int, int, list[str]]:
    """What a rank has after training, the graphs compiled until then and after, and what could not be compiled."""
    _without_vectors()
    if kernels:
        torch._dynamo.reset()  # there may be graphs without
    with inductor.patch(fallback_by_default=not kernels):
        model = build(case, plan, folder)
        trained = deepcopy(run(case, model, given))
        first = compiler().graphs
        run(case, model, given)
    return trained, first, compiler().graphs - first, [*compiler().failures, *counters["graph_break"]]


def _without_vectors() -> None:
    """Without this the compiler first compiles four programs, to find out about the processor."""
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]


def _compare(case: Case, *, kernels: bool) -> None:
    found = ranks(2).run(_counted, kernels, case, plan_for(case), first_weights(case), batches(case))
    trained, first, later, failures = zip(*found, strict=True)
    different = difference(case, trained, single_process(case))
    assert different is None, different
    assert min(first) > 0
    assert set(later) == {0}, "blocks were compiled again after the first steps"
    assert failures == ([], [])


@pytest.mark.parametrize(
    "case",
    [
        _case("llama", ["dp2", "dp2", "dp2"]),
        longer(_case("llama", ["tp2", "tp2+rc", "tp2"])),
        longer(_case("llama", ["tp2", "tp2+rc", "sdp2", "dp2"])),
        longer(_case("llama", ["single"] * 2, ["single+rc", "single"], micro_batches=2)),
        longer(_case("llama", ["tp2", "tp2+rs", "tp2+sp+rs", "sdp2+ra", "dp2"], num_key_value_heads=8)),
        longer(_case("llama", ["tp2", "tp2", "tp2+rc", "sdp2", "sdp2+rc", "dp2"])),
        longer(_case("llama", ["single"] * 3, ["single+rc"] * 2, micro_batches=4)),
        longer(_case("llama", ["tp2", "tp2+sp", "tp2+sp+rc", "tp2+sp"])),
        longer(
            _case("llama", ["single", "single+rs"], ["single+ra", "single"], micro_batches=4, num_key_value_heads=8)
        ),
        longer(_case("llama", ["ring2", "ring2", "ulysses2+rs", "ring2+ra", "dp2"], num_key_value_heads=8)),
        longer(_case("bert", ["tp2"] * 4)),
        longer(_case("gpt2", ["tp2", "tp2", "dp2", "tp2"])),
        longer(_case("t5", ["tp2"] * 7)),
        longer(_case("vit", ["tp2", "sdp2", "tp2+rc", "tp2"])),
    ],
    ids=lambda case: f"{case.config['model_type']}: {case.stages}",
)
def test_compiled_as_one_process(case: Case) -> None:
    _compare(case, kernels=True)


@pytest.mark.parametrize(
    "case",
    [
        _case("llama", ["tp2", "tp2+rc", "sdp2", "dp2"]),
        _case("llama", ["single"] * 2, ["single+rc", "single"], micro_batches=2),
    ],
    ids=lambda case: str(case.stages),
)
def test_graphs_as_one_process(case: Case) -> None:
    """Each operation calls PyTorch's own kernel: compiling C++ takes long."""
    _compare(case, kernels=False)


def _dropping(case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]]) -> list[float]:
    model = build(case, plan, folder)
    losses = run(case, model, given).losses
    model.compare_replicas()
    assert not compiler().failures, "what is not compiled draws other numbers"
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp2", "tp2"])
def test_dropout_draws_the_same_again(strategy: str) -> None:
    """What is recomputed drops the same, and so do TP ranks where they compute the same. Layers with dropout and TP are
    not compiled where they keep some results, and then draw other numbers."""
    found = []
    for recompute in ("", "+rc") if strategy == "tp2" else ("", "+rc", "+rs"):
        case = _case("gpt2", [strategy, *[f"{strategy}{recompute}"] * 2, strategy], attn_pdrop=0.2, resid_pdrop=0.2)
        found += ranks(2).run(_dropping, case, plan_for(case), first_weights(case), batches(case))
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-5)
    without = _case("gpt2", [strategy] * 4)
    whole = ranks(2).run(_dropping, without, plan_for(without), first_weights(without), batches(without))
    assert whole[0] != pytest.approx(found[0], rel=1e-3)


def _dropped(given: Tensor, share: float) -> Tensor:
    return torch.nn.functional.dropout(given, share) * share


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
def test_numbers_that_differ_from_layer_to_layer_are_compiled() -> None:
    """PyTorch first takes another number for one that always changes, and then starts again: that is no failure."""
    own = Compiler()
    compiled = own.function(_dropped)
    for share in (0.1, 0.2, 0.3):
        compiled(torch.ones(8, requires_grad=True), share)
    assert own.failures == []


class _Gated(torch.nn.Module):
    """A small feed-forward part with attention before it."""

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.first, self.second = (torch.nn.Linear(16, size) for size in (48, 64, 16))
        self.last = torch.nn.Linear(64, 16)

    def forward(self, given: Tensor) -> Tensor:
        query, key, value = (own.unflatten(-1, (2, 8)).transpose(1, 2) for own in self.projections(given).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = given + self.second(attended.transpose(1, 2).flatten(2)).tanh()
        output: Tensor = self.last(torch.nn.functional.gelu(self.first(hidden)))
        return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grade", "kept"), [(Grade.PRODUCTS, 16 + 48 + 17 + 16 + 64), longer(Grade.ATTENTION, 16 + 17)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
def test_a_compiled_block_keeps_what_its_grade_says(grade: Grade, kept: int) -> None:
    """In elements a token: input, projections, attention (with a sum for each of two heads, one in 8 of its elements
    here), its output's projection, the first product of the feed-forward part; not the last."""
    _without_vectors()
    plain, given = _Gated(), torch.randn(2, 8, 16)
    layer = _Block(deepcopy(plain))
    assert Compiler().compile(layer, grade)
    outcomes, seen = [], dict[Any, Any]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in held:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    held = {own.untyped_storage()._cdata for own in layer.parameters()}
    ways: list[Any] = [plain, lambda own: layer((own,), None)[0]]
    for compute in ways:
        tensor = given.clone().requires_grad_()
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda own: own):
            output = compute(tensor)
        torch.autograd.backward(output.pow(2).sum())
        outcomes.append((output.detach(), tensor.grad))
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert sum(seen.values()) / (2 * 8 * 4) == pytest.approx(kept, abs=2)


class _Doubled(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class _Block(Layer):
    block: torch.nn.Module

    def __init__(self, block: torch.nn.Module | None = None) -> None:
        super().__init__("block", {"block": ("block", block or _Doubled(4, 4))})

    def forward(self, activations: Activations, context: object) -> Activations:
        return (self.block(activations[0]),)


def test_what_does_not_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", SimpleNamespace(compile_fx=fails))
    own, layer, given = Compiler(), _Block(), torch.randn(2, 4)
    expected = layer.block(given)
    own.compile(layer)
    (found,) = layer((given,), None)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert own.failures == ["RuntimeError: no such kernel"]
    assert (
        "is not compiled and runs as it is, with more memory than was planned: RuntimeError: no such kernel"
        in caplog.text
    )


def test_without_a_compiler_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "why_not", lambda device: "no compiler is found")
    assert not compiled.compiles(True, torch.device("cpu"))
    assert (
        "layers are not compiled, and take more memory than was planned (--no-compile): no compiler is found"
        in caplog.text
    )
    caplog.clear()
    assert not compiled.compiles(False, torch.device("cpu"))
    assert not caplog.text


def _packed(case: Case, plan: galvatron.Plan, folder: Path, given: dict[str, Tensor]) -> list[int]:
    """On a rank: graphs compiled after each of some batches with documents of other lengths."""
    _without_vectors()
    model, before = build(case, plan, folder), compiler().graphs
    found = []
    for every in (2, 3, 4, 5, 8):
        places = torch.arange(8).expand(given["input_ids"].shape) % every
        model.forward_backward({**given, "position_ids": places})
        found.append(compiler().graphs - before)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "dropout"), [("ring2", 0.0), ("ulysses2", 0.0), ("ulysses2", 0.1)])
def test_other_documents_do_not_compile_anew(strategy: str, dropout: float) -> None:
    """Once for some number of documents, once for any, once for one document a row."""
    case = _case("llama", ["dp2", strategy, "dp2"], attention_dropout=dropout)
    (given, *_) = batches(case)
    for graphs in ranks(2).run(_packed, case, plan_for(case), first_weights(case), given):
        assert graphs[1] == graphs[3] <= 2
        assert graphs[-1] <= 3


def test_what_another_rank_compiled_is_loaded_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank with a graph holds a lock while it compiles; when it is done, no rank holds one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = torch.fx.symbolic_trace(torch.nn.Identity())

    def locked() -> bool:
        (path,) = tmp_path.glob("galvatron-*.lock")
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    with pytest.raises(RuntimeError, match="fails"), compiled._first_alone(graph, []):
        raise RuntimeError("fails")
    with compiled._first_alone(graph, []):
        assert locked(), "what failed was not done"
    with compiled._first_alone(graph, []):
        assert not locked()
