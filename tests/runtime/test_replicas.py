"""Replicas that differ are found, and named with their parameter and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from longer import longer
from oracle import Case
from parity import plan_for
from ranks import ranks
from small_models import config
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import galvatron
from galvatron.core.errors import Unequal
from galvatron.runtime.pending_loss import PendingLoss
from galvatron.runtime.same_batches import Marks, mark_of
from galvatron.runtime.same_start import start_alike

_MIXED = [["dp4", "dp2-tp2", "dp2-sdp2", "dp4+zero2"]]
_NORM, _SPLIT, _SHARDED = "transformer.h.0.ln_1.bias", "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.ln_1.weight"


def _case(stages: list[list[str]]) -> Case:
    return Case(config=config("gpt2"), stages=stages, micro_batches=2)


def _scale(values: Tensor) -> None:
    values.mul_(1.01)


def _lose(values: Tensor) -> None:
    values.flatten()[-1] = torch.nan


def _swap(values: Tensor) -> None:
    values.copy_(values.flip(0))  # the norm stays


def _round(values: Tensor) -> None:
    values.mul_(1 + 1e-6)


_CHANGES: dict[str, Callable[[Tensor], None]] = {"scale": _scale, "lose": _lose, "swap": _swap, "round": _round}


# On a rank


def _changed(plan: galvatron.Plan, name: str, rank: int, change: str) -> str | None:
    """What the comparison says after one rank's part of a parameter was changed by hand."""
    model = galvatron.parallelize(None, plan, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for local in model.locals:
            if local.name == name:
                torch.nn.init.normal_(local.master, generator=torch.Generator().manual_seed(0))
    model.compare_replicas()
    with torch.no_grad():
        for local in model.locals:
            if local.name == name and model.rank == rank:
                _CHANGES[change](local.master)
    try:
        model.compare_replicas()
    except Unequal as error:
        return str(error)
    return None


def _from_memory(plan: galvatron.Plan, content: dict[str, Any], other: str) -> str | float:
    """How far from rank 0's own model the ranks start if rank 2's is another; or what is said of it."""
    odd = torch.distributed.get_rank() == 2
    torch.manual_seed(1 if odd and other == "seed" else 0)
    width = content["n_embd"] // (2 if odd and other == "size" else 1)
    model: Any = GPT2LMHeadModel(GPT2Config(**{**content, "n_embd": width}))
    if odd and other == "last row":  # as of an embedding that was enlarged
        with torch.no_grad():
            model.transformer.wte.weight[-1].fill_(3.0)
    if odd and other == "frozen":
        model.transformer.wpe.weight.requires_grad_(False)
    torch.manual_seed(0)
    expected: Any = GPT2LMHeadModel(GPT2Config(**content))
    try:
        made = galvatron.parallelize(None if odd and other == "none" else model, plan, device="cpu")
    except Unequal as error:
        return str(error)
    own = dict(expected.named_parameters())
    return max(float((own[name] - whole).abs().max()) for name, whole in made.whole_parameters())


def _batches(plan: galvatron.Plan, change: str) -> str | None:
    """What the first step says if rank 1 is given another batch."""
    model = galvatron.parallelize(None, plan, device="cpu")
    ids = torch.randint(60, (plan.batch, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    model.forward_backward(batch)
    if torch.distributed.get_rank() == 1:
        if change == "other":
            ids = torch.randint(60, ids.shape, generator=torch.Generator().manual_seed(1))
            batch = {"input_ids": ids, "labels": ids.clone()}
        elif change == "one token":
            batch["input_ids"][1, 3] += 1
        elif change == "longer":
            batch = {name: torch.cat([own, own], 1) for name, own in batch.items()}
    model.compares_batches = True
    try:
        model.forward_backward(batch)
    except Unequal as error:
        return str(error)
    return None


# In the parent


@pytest.mark.parametrize(
    ("name", "rank", "change", "holders", "different"),
    [
        longer(_NORM, 2, "scale", "ranks 0, 1, 2, 3", "rank 2"),
        longer(_NORM, 0, "swap", "ranks 0, 1, 2, 3", "rank 0"),
        longer(_NORM, 1, "lose", "ranks 0, 1, 2, 3", "rank 1"),
        (_SPLIT, 3, "scale", "ranks 1, 3", "rank 3"),
        (_SHARDED, 2, "swap", "ranks 0, 2", "rank 2"),
    ],
)
def test_a_replica_changed_by_hand_is_named(name: str, rank: int, change: str, holders: str, different: str) -> None:
    found = ranks(4).run(_changed, plan_for(_case(_MIXED)), name, rank, change)
    assert len(set(found)) == 1, "all ranks say the same"
    assert found[0] is not None
    assert f"{holders} hold the same part of {name}, but {different} no longer has" in found[0]


def test_rounding_is_no_difference() -> None:
    assert ranks(4).run(_changed, plan_for(_case(_MIXED)), _NORM, 2, "round") == [None] * 4


def test_stages_are_compared_each_for_itself() -> None:
    plan = plan_for(_case([["dp2", "dp2"], ["sdp2", "dp2"]]))
    (found,) = set(ranks(4).run(_changed, plan, "transformer.ln_f.weight", 3, "scale"))
    assert "ranks 2, 3 hold the same part of transformer.ln_f.weight" in found


@pytest.mark.parametrize("other", ["seed", "last row", "same"])
def test_ranks_start_from_the_model_of_rank_0(other: str) -> None:
    """Also where layers are sharded, so that no two ranks hold the same."""
    case = _case([["sdp4"] * 4])
    assert ranks(4).run(_from_memory, plan_for(case), case.config, other) == [0.0] * 4


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("none", "rank 2 from a seed; give all ranks"),
        ("size", "trained on rank 2; build the same model on all ranks"),
        ("frozen", "transformer.wpe.weight is [16, 32] in float32, trained on rank 0, [16, 32] in float32, frozen"),
    ],
)
def test_ranks_that_were_given_other_models_are_refused(other: str, says: str) -> None:
    case = _case([["sdp4"] * 4])
    (found,) = set(ranks(4).run(_from_memory, plan_for(case), case.config, other))
    assert says in found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("other", "ranks were given different batches: samples 0, 1, 2, 3"),
        ("one token", "sample 1 of 'input_ids' on rank 1 differ"),
        ("longer", "16] in int64 on rank 1; give every rank the same whole batch"),
        ("same", None),
    ],
)
@pytest.mark.parametrize("stages", [[["dp2"] * 4], [["tp2"] * 4]])
def test_batches_that_differ_between_ranks_are_noticed(change: str, says: str | None, stages: list[list[str]]) -> None:
    plan = plan_for(_case(stages))
    (found,) = set(ranks(2).run(_batches, plan, change))
    if change == "one token" and stages[0][0] == "dp2":
        assert found is None, "nobody else reads that sample"
    else:
        assert (found is None) if says is None else says in found


_READ: tuple[Any, ...] = (float, lambda loss: loss.tolist(), lambda loss: torch.stack([loss]))


def _later(plan: galvatron.Plan, kind: str) -> list[str | None]:
    """What reading each of three losses says, where rank 1 is given other batches from the second on: its value read,
    by a method and by a function."""
    model = galvatron.parallelize(None, plan, device="cpu")
    read = model.evaluate if kind == "evaluated" else model.forward_backward
    said: list[str | None] = []
    for step in range(3):
        seed = step if kind == "same" or step == 0 else 10 * step + torch.distributed.get_rank()
        ids = torch.randint(60, (plan.batch, 8), generator=torch.Generator().manual_seed(seed))
        loss = read({"input_ids": ids, "labels": ids.clone()})
        try:
            _READ[step](loss)
            said.append(None)
        except Unequal as error:
            said.append(str(error))
            float(loss)  # once is enough
    return said


@pytest.mark.parametrize("stages", [[["dp2"] * 4], [["single"] * 2] * 2])
@pytest.mark.parametrize("kind", ["trained", "evaluated", "same"])
def test_later_batches_that_differ_are_noticed_with_the_loss(kind: str, stages: list[list[str]]) -> None:
    """A loader whose second epoch is shuffled differently on each rank."""
    for first, *others in ranks(2).run(_later, plan_for(_case(stages)), kind):
        assert first is None
        for said in others:
            assert (said is None) == (kind == "same")
            assert said is None or said.startswith("batch: ranks were given batches with different labels")


def test_other_labels_have_another_mark() -> None:
    """Of a classifier's, too: 8 labels of two kinds are few."""
    labels = torch.stack([torch.tensor([number >> place & 1 for place in range(8)]) for number in range(256)])
    assert len({float(mark_of({"labels": own})) for own in labels}) > 250
    assert len({round(float(mark_of({"labels": own.double()})), 2) for own in labels}) > 150, "rounded, as compared"


def _marks(per_rank: list[Tensor]) -> tuple[Marks, Tensor, Tensor]:
    """As the ranks sum them."""
    marks = torch.stack([mark_of({"labels": own}) for own in per_rank]).double()
    return Marks(len(per_rank), exact=not per_rank[0].is_floating_point()), marks.sum(), marks.square().sum()


@pytest.mark.parametrize("kind", ["scores", "several at once", "huge", "classes"])
@pytest.mark.parametrize("ranks_", [2, 3, 64])
def test_marks_of_labels_of_each_kind(kind: str, ranks_: int) -> None:
    """Also where all ranks but the last have the same, and whatever the size of scores."""
    generator = torch.Generator().manual_seed(5)
    scores, others = torch.randn(2, 12, 4, generator=generator)
    if kind == "several at once":
        scores, others = (scores > 0).float(), (others > 0).float()
    elif kind == "huge":
        scores, others = scores * 1e30, others * 1e30
    elif kind == "classes":
        scores, others = (scores * 8).long(), (others * 8).long()
    equal = _marks([scores] * ranks_)
    assert not equal[0].differ(*equal[1:])
    last = _marks([*[scores] * (ranks_ - 1), others])
    assert last[0].differ(*last[1:])
    if kind != "classes":
        rounded = _marks([*[scores] * (ranks_ - 1), scores.bfloat16().float() if kind == "huge" else scores + 1e-6])
        assert not rounded[0].differ(*rounded[1:]), "kernels of different devices may round differently"


def test_a_loss_as_a_tensor_is_no_number_where_labels_differ() -> None:
    """Nobody waits for the GPU to raise."""
    _, total, squares = _marks([torch.tensor([1]), torch.tensor([2])])
    marks = Marks(2, exact=True)
    assert PendingLoss(torch.stack([torch.tensor(1.5).double(), total, squares]), None, marks).tensor().isnan()
    equal = _marks([torch.tensor([1])] * 2)
    assert PendingLoss(torch.stack([torch.tensor(1.5).double(), *equal[1:]]), None, marks).tensor() == 1.5


def _drawn() -> Tensor:
    """On a rank: a buffer that each has drawn by itself."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 2)
    model.register_buffer("own", torch.randn(3, dtype=torch.complex64), persistent=False)
    start_alike(model, torch.device("cpu"), seeded=True)
    return cast(Tensor, model.own)


def test_buffers_that_are_not_saved_are_made_alike() -> None:
    """Complex ones too, of rotary positions."""
    first, second = ranks(2).run(_drawn)
    assert torch.equal(first, second)
