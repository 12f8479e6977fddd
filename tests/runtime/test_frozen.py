"""Frozen parameters: what one process trains is what every plan trains, and nothing is sent for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from bf16_oracle import excess
from longer import longer
from oracle import Case, Record, batches, stock_model, trained
from parity import Trained, cluster_of, difference, plan_for, run, spec_of
from ranks import ranks
from safetensors.torch import load_file
from small_models import config
from torch import Tensor, nn
from traffic import Sent, Traffic

import galvatron
from galvatron.core.errors import InvalidInput, PlanMismatch
from galvatron.core.spec import Training, schedule_named
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.runtime.compiled import why_not
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.export import export
from galvatron.train.checkpoints.folder import find


@dataclass(frozen=True, kw_only=True)
class _Frozen(Case):
    """A case of which parameters with one of these in their names are frozen."""

    frozen: tuple[str, ...] = ()
    steps: int = 2


def _model(case: _Frozen) -> nn.Module:
    model = stock_model(case)
    for name, own in model.named_parameters():
        own.requires_grad_(not any(part in name for part in case.frozen))
    return model


def _train(case: _Frozen, plan: galvatron.Plan, given: Sequence[dict[str, Tensor]]) -> Trained:
    model = galvatron.parallelize(_model(case), plan, dtype=case.dtype, device="cpu")
    assert all(not local.trained or not any(part in local.name for part in case.frozen) for local in model.locals)
    found = run(case, model, given)
    assert all(local.master.grad is None for local in model.locals if not local.trained)
    return found


def _single(case: _Frozen) -> Record:
    return trained(case, _model(case))


def _check(case: _Frozen) -> None:
    found = ranks(case.devices).run(_train, case, plan_for(case), batches(case))
    assert difference(case, found, _single(case)) is None


_LLAMA = config("llama", vocab_size=64)
_FIRST = ("embed_tokens", "layers.0.")
_LAST = ("lm_head", "model.norm", "layers.1.")
_SOME = ("q_proj", "gate_proj", "norm", "embed_tokens")


_PLANS = [
    [["dp2"] * 4],
    [["sdp2"] * 4],
    [["sdp2+rc", "dp2+zero2", "dp2+zero2+rc", "sdp2"]],
    [["tp2"] * 4],
    [["tp2", "tp2+sp", "tp2+sp+rc", "tp2"]],
    [["single"] * 2, ["single"] * 2],
]


@pytest.mark.parametrize(
    ("stages", "frozen"),
    [
        *((stages, _FIRST) for stages in _PLANS),
        (_PLANS[-1], _LAST),
        (_PLANS[-2], _SOME),
        *(longer(stages, _LAST) for stages in _PLANS[:-1]),
        *(longer(stages, _SOME) for stages in (*_PLANS[:-2], _PLANS[-1])),
    ],
)
def test_trains_as_one_process(stages: list[list[str]], frozen: tuple[str, ...]) -> None:
    _check(_Frozen(config=_LLAMA, stages=stages, batch=4, micro_batches=2, frozen=frozen, clip=0.5))


@pytest.mark.slow
@pytest.mark.skipif(why_not("cpu") is not None, reason=str(why_not("cpu")))
@pytest.mark.parametrize("frozen", [_FIRST, _SOME], ids=["first", "some"])
def test_compiled(frozen: tuple[str, ...]) -> None:
    compiled = Training(dropout=False, compile=True)
    stages = [["dp2", "tp2", "tp2+rc", "sdp2"]]
    _check(_Frozen(config=_LLAMA, stages=stages, batch=4, frozen=frozen, dtype=torch.float32, training=compiled))


@pytest.mark.parametrize(
    ("family", "frozen", "stages"),
    [
        longer("t5", ("relative_attention_bias",), [["dp2", "sdp2", "tp2", "tp2", "dp2", "tp2", "dp2"]]),
        ("t5", ("relative_attention_bias", "shared", "encoder"), [["single"] * 3, ["single"] * 4]),
        longer("t5", ("encoder",), [["single"] * 5, ["single"] * 2]),
        ("gpt2", ("wte", "wpe", "h.0."), [["single"] * 2, ["single"] * 2]),
        ("gpt2", ("wte", "h.1."), [["tp2", "dp2", "tp2", "sdp2"]]),
        longer("bert", ("embeddings", "layer.0."), [["single"], ["single"] * 3]),
        longer("vit", ("layer.0.", "bias"), [["tp2", "tp2", "sdp2", "dp2"]]),
    ],
)
def test_families(family: str, frozen: tuple[str, ...], stages: list[list[str]]) -> None:
    """Tables of position biases, words that are tied and frozen, stages of which nothing trains."""
    _check(_Frozen(config=config(family), stages=stages, batch=4, micro_batches=2, frozen=frozen, schedule="gpipe"))


@pytest.mark.parametrize(
    "stages",
    [[["dp2", "sdp2", "dp2+zero2", "sdp2"]], [["tp2"] * 4], [["single"] * 2, ["single"] * 2]],
    ids=["data", "tensor", "pipeline"],
)
@pytest.mark.parametrize("frozen", [_FIRST, longer(_SOME)], ids=["first", "some"])
def test_in_bf16(stages: list[list[str]], frozen: tuple[str, ...]) -> None:
    """What is frozen is held in bf16: there is no wider master of it."""
    case = _Frozen(config=_LLAMA, stages=stages, batch=4, frozen=frozen, dtype=torch.bfloat16, steps=3)
    found = ranks(2).run(_train, case, plan_for(case), batches(case))
    assert excess(case, found, _model) is None


def _iteration(case: _Frozen, plan: galvatron.Plan, batch: dict[str, Tensor]) -> list[Sent]:
    """On a rank: what the second iteration sends, without the loss that ends it."""
    model = galvatron.parallelize(_model(case), plan, dtype=case.dtype, device="cpu")
    model.forward_backward(batch)
    with Traffic() as traffic:
        model.forward_backward(batch)
    sent: list[Sent] = list(traffic.sent)
    loss = sent.pop()
    own = 1 + len(model.shapes) + 2
    assert loss.size == 8 * own, "the loss, which parameters had a part in it, and two numbers for the labels"
    return sent


def _sent(strategy: str, frozen: tuple[str, ...], stages: int = 1) -> list[list[Sent]]:
    planned = [[strategy] * (4 // stages)] * stages
    case = _Frozen(config=_LLAMA, stages=planned, batch=4, micro_batches=2, frozen=frozen, dtype=torch.float32)
    found: list[list[Sent]] = ranks(2).run(_iteration, case, plan_for(case), batches(case)[0])
    return found


def _sizes() -> list[int]:
    """Bytes of each layer's parameters: embedding, two decoders, head."""
    return [4 * layer.parameters for layer in spec_of(Case(config=_LLAMA, stages=[])).layers]


def test_frozen_layers_are_gathered_for_forward_alone() -> None:
    """Of the two micro-batches: parameters of what has a backward twice, and gradients of what trains. The head's
    backward follows its forward at once, so that it is gathered once for both."""
    first, second, third, head = _sizes()
    expected = [Sent("all_gather", size, 2) for size in (first, second, third, third, head)] * 2
    expected += [Sent("reduce_scatter", size, 2) for size in (third, head)] * 2
    for sent in _sent("sdp2", _FIRST):
        assert Counter(sent) == Counter(expected)


def test_a_frozen_layer_that_gradients_pass_sends_none_of_its_own() -> None:
    first, second, third, head = _sizes()
    expected = [Sent("all_gather", size, 2) for size in (first, second, third, head, first, second, third)] * 2
    expected += [Sent("reduce_scatter", size, 2) for size in (first, second)] * 2
    for sent in _sent("sdp2", _LAST):
        assert Counter(sent) == Counter(expected)


def test_dp_sums_gradients_of_what_trains() -> None:
    for sent in _sent("dp2", _FIRST):
        assert Counter(sent) == Counter(Sent("all_reduce", size, 2) for size in _sizes()[2:])


def test_zero2_scatters_gradients_of_what_trains() -> None:
    *_, third, head = _sizes()
    expected = [Sent("all_gather", size, 2) for size in _sizes()]
    expected += [Sent("reduce_scatter", size, 2) for size in (third, head)] * 2
    for sent in _sent("dp2+zero2", _FIRST):
        assert Counter(sent) == Counter(expected)


def test_tensor_parallelism_sums_no_gradient_below_what_trains() -> None:
    """Forward: the embedding once, decoders twice. Backward: the second decoder twice (its norms train), the head
    once; nothing where the first projections have nothing that trains below them."""
    message = 4 * 2 * 8 * 32
    for frozen, backward in ((_FIRST, 3), ((*_FIRST, "layers.1.input_layernorm"), 2), ((), 5)):
        for sent in _sent("tp2", frozen):
            assert sum(one.size == message for one in sent) == 2 * (5 + backward)


def test_a_frozen_stage_receives_no_gradients() -> None:
    activation = 4 * 2 * 8 * 32
    for frozen, back in ((_FIRST, 0), (_LAST, 2)):
        first, second = _sent("single", frozen, stages=2)
        assert Counter(first) == Counter({Sent("send", activation, 2): 2, Sent("receive", activation, 2): back})
        assert Counter(second) == Counter({Sent("receive", activation, 2): 2, Sent("send", activation, 2): back})


def _refused(case: _Frozen, plan: galvatron.Plan, batch: dict[str, Tensor]) -> list[str]:
    """On a rank: what is said when parameters are frozen or unfrozen later, and when all of them are."""
    said = []
    model = galvatron.parallelize(_model(case), plan, device="cpu")
    for name, parameter in model.named_parameters():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            parameter.requires_grad_(not parameter.requires_grad)
            try:
                model.forward_backward(batch)
            except InvalidInput as error:
                said.append(str(error))
            parameter.requires_grad_(not parameter.requires_grad)
    model.forward_backward(batch)
    try:
        galvatron.parallelize(_model(case).requires_grad_(False), plan, device="cpu")
    except InvalidInput as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("strategy", ["dp2", "sdp2", "dp2+zero2"])
def test_freezing_later_is_refused(strategy: str) -> None:
    case = _Frozen(config=_LLAMA, stages=[[strategy] * 4], batch=4, frozen=("embed_tokens",))
    for said in ranks(2).run(_refused, case, plan_for(case), batches(case)[0]):
        assert "model.embed_tokens.weight: was unfrozen after parallelize" in said[0]
        assert "lm_head.weight: was frozen after parallelize" in said[1]
        assert "all of its parameters are frozen" in said[2]


def _by_the_plan(case: _Frozen, plan: galvatron.Plan) -> tuple[set[str], str]:
    """On a rank: what is frozen in a model that the plan makes, and what is said of one that trains it all."""
    frozen = {local.name for local in galvatron.parallelize(None, plan, device="cpu").locals if not local.trained}
    try:
        galvatron.parallelize(stock_model(case), plan, device="cpu")
    except PlanMismatch as error:
        return frozen, str(error)
    return frozen, ""


def test_a_plan_knows_what_is_frozen() -> None:
    case = _Frozen(config=_LLAMA, stages=[["dp2"] * 4], batch=4)
    training = Training(dropout=False, sequence_length=8, freeze=("model.layers.0.mlp", "model.norm"))
    request = Request(
        model=load_any_model(_LLAMA, training), cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b")
    )
    expected = {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")} | {"model.norm.weight"}
    for frozen, said in ranks(2).run(_by_the_plan, case, priced(request, case.stages, micro_batches=1)):
        assert frozen == expected
        assert "model.layers.0.mlp.gate_proj.weight trains, but the plan was made for one in which it is frozen" in said


def _saved(case: _Frozen, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """On a rank: train, compare replicas, save and export; what there is then."""
    model = galvatron.parallelize(_model(case), plan, dtype=case.dtype, device="cpu")
    optimizer = model.optimizer(lr=1e-3)
    model.forward_backward(given[0])
    optimizer.step()
    model.compare_replicas()
    assert all(bool(optimizer.state.get(local.master)) == local.trained for local in model.locals)
    Checkpoints(folder).save(model, optimizer, {}, step=1, wait=True)
    return {name: own.clone() for name, own in model.whole_parameters()}


def _loaded(case: _Frozen, plan: galvatron.Plan, folder: Path) -> dict[str, Tensor]:
    model = galvatron.parallelize(_model(case), plan, dtype=case.dtype, device="cpu")
    Checkpoints(folder).load(model, model.optimizer(lr=1e-3))
    return {name: own.clone() for name, own in model.whole_parameters()}


def test_checkpoints_hold_what_is_frozen(tmp_path: Path) -> None:
    """In its own narrower type, without states; another plan goes on from it, and exports are of one type."""
    case = _Frozen(config=_LLAMA, stages=[["dp2", "tp2", "sdp2", "tp2"]], batch=4, frozen=_SOME, dtype=torch.bfloat16)
    saved, _ = ranks(2).run(_saved, case, plan_for(case), tmp_path / "run", batches(case))
    other = replace(case, stages=[["sdp2"] * 2 + ["dp2+zero2"] * 2])
    for found in ranks(2).run(_loaded, other, plan_for(other), tmp_path / "run"):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], own) for name, own in saved.items())
    export(find(tmp_path / "run"), tmp_path / "out")
    whole = load_file(tmp_path / "out" / "model.safetensors")
    assert {own.dtype for own in whole.values()} == {torch.float32}
    assert all(torch.equal(whole[name], own) for name, own in saved.items())
