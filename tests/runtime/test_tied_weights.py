"""A weight that several layers use stays one weight, whatever strategies its users have and wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from longer import longer
from oracle import Case, batches, first_weights, single_process
from parity import Trained, build, check, difference, plan_for, train
from ranks import ranks
from small_models import config
from torch import Tensor, nn

import galvatron
from galvatron.families.layer import Activations, Layer
from galvatron.runtime.tied import across_stages
from galvatron.runtime.tied.in_stage import attach_tied

_TIED = {
    "bert": config("bert", num_hidden_layers=1),
    "gpt2": config("gpt2", n_layer=1),
    "llama": config("llama", num_hidden_layers=1, tie_word_embeddings=True),
}

_MORE_PAIRS = {("dp2", "dp2"), ("dp2", "tp2"), ("sdp2", "dp2"), ("tp2", "sdp2")}
"""Left to the longer run: each kind is an owner and a user in others, beside its own and beside another kind."""


def _case(family: str, stages: list[list[str]], steps: int = 2) -> Case:
    return Case(config=_TIED[family], stages=stages, micro_batches=2, clip=0.5, steps=steps)


@pytest.mark.parametrize("family", _TIED)
def test_the_stock_model_is_tied(family: str) -> None:
    """Else these tests would test nothing: the head has no weight of its own."""
    names = single_process(_case(family, [])).parameters
    assert not [name for name in names if name.endswith(("lm_head.weight", "decoder.weight"))]


@pytest.mark.parametrize(
    ("family", "owner", "user"),
    [
        # Another split of the vocabulary
        ("gpt2", "tp4", "dp4"),
        longer("bert", "dp4", "tp4"),
        ("llama", "tp2-dp2", "dp2-tp2"),
        longer("gpt2", "tp4", "tp2-dp2"),
        longer("bert", "dp2-tp2", "tp4"),
        # The owner is sharded
        ("gpt2", "sdp4", "tp4"),
        longer("bert", "sdp2-tp2", "tp2-sdp2"),
        longer("llama", "dp2-sdp2", "dp4"),
        longer("gpt2", "dp4+zero2", "tp4+sp"),
        ("bert", "tp2-dp2+zero2", "sdp4"),
        # The user is, or is recomputed
        longer("gpt2", "tp4", "sdp4+rc"),
        longer("bert", "dp4+rc", "dp4+zero2+rc"),
        ("llama", "sdp4+rc", "sdp4+rc"),
    ],
)
def test_in_one_stage(family: str, owner: str, user: str) -> None:
    check(_case(family, [[owner, "dp2-tp2", user]]))


@pytest.mark.parametrize(
    ("owner", "user"),
    [
        *(longer(*own) if own in _MORE_PAIRS else own for own in product(["dp2", "sdp2", "tp2"], repeat=2)),
        ("dp2+zero2", "tp2"),
        ("tp2", "dp2+zero2"),
    ],
)
def test_across_two_stages(owner: str, user: str) -> None:
    """Each stage has a copy; both get the sum of the gradients, and the norm counts the weight once."""
    check(_case("gpt2", [[owner, "dp2"], [user]]))


@pytest.mark.parametrize(
    ("first", "last"),
    [("tp2-dp2", "sdp2-tp2"), longer("sdp4", "tp4"), longer("tp4", "dp2-sdp2"), longer("dp2-tp2", "dp4+zero2")],
)
def test_across_stages_of_four(first: str, last: str) -> None:
    """Pieces of the two copies overlap without being the same; other stages lie between in the last case."""
    check(_case("bert", [[first, "tp4"], [last]]))


def test_across_stages_with_one_between() -> None:
    check(Case(config=config("gpt2"), stages=[["tp2"], ["dp2"], ["sdp2"], ["sdp2"]], micro_batches=4, clip=0.5))


@pytest.mark.parametrize(
    "stages",
    [
        [["tp4", "sdp4", "dp4", "sdp4", "tp2-dp2", "dp4", "dp2-tp2"]],
        longer([["tp2", "sdp2", "dp2"], ["sdp2", "tp2", "dp2", "dp2"]]),
        longer([["single", "single"], ["single", "single"], ["single", "single"], ["single"]]),
    ],
)
def test_three_users(stages: list[list[str]]) -> None:
    """T5 reads its words in both embeddings and in the head, and each stack shares a table of position biases."""
    check(Case(config=config("t5"), stages=stages, micro_batches=4, clip=0.5, padding=True, steps=2))


def _in_small_pieces(*given: Any) -> Trained:
    """Of a few rows each; the words of these models are one piece else."""
    with patch.object(across_stages, "_CHUNK_BYTES", 1000):
        return train(*given)


@pytest.mark.parametrize(
    "stages", [[["tp2"] * 2, ["sdp2"]], [["dp4"] * 2, ["dp2-tp2"]], [["sdp2-tp2"] * 2, ["tp4"]]], ids=str
)
def test_rows_are_summed_some_at_a_time(stages: list[list[str]]) -> None:
    case = _case("gpt2", stages)
    found = ranks(case.devices).run(_in_small_pieces, case, plan_for(case), first_weights(case), batches(case))
    assert difference(case, found, single_process(case)) is None


def test_a_tied_weight_can_be_asked_for_its_type_before_its_module_runs() -> None:
    """Mamba's head does ``hidden.to(self.lm_head.weight.dtype)``. Its values are NaN meanwhile, so that no use of them
    goes unnoticed."""

    class Head(Layer):
        def forward(self, activations: Activations, context: Any) -> Activations:
            return activations

    user, owner = nn.Linear(2, 3, bias=False, device="meta"), nn.Parameter(torch.ones(3, 2))
    head = Head("head", {"linear": ("linear", user)})
    attach_tied(head, "linear.weight", lambda: owner, torch.empty(0, dtype=torch.bfloat16))
    for _ in range(2):
        assert user.weight.dtype == torch.bfloat16
        assert user.weight.shape == (3, 2)
        assert user.weight.isnan().all()
        assert user(torch.ones(1, 2)).tolist() == [[2.0, 2.0, 2.0]]
        assert not list(user.parameters())


def _copies(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """On a rank: what it holds of the words after training."""
    model = build(case, plan, folder)
    optimizer = model.optimizer(lr=1e-2)
    for batch in given:
        model.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    return {local.name: local.master.detach() for local in model.locals if local.name == "shared.weight"}


def test_copies_in_three_stages_stay_equal_to_the_last_bit() -> None:
    """The encoder's words, the decoder's and the head's: three gradients, added in one order everywhere."""
    stages = [["dp2"] * 2, ["dp2"] * 3, ["dp2"] * 2]
    case = Case(config=config("t5", tie_word_embeddings=True), stages=stages, batch=6, steps=8, dtype=torch.float32)
    folder = first_weights(case)
    first, *others = ranks(6).run(_copies, case, plan_for(case), folder, batches(case))
    assert all(torch.equal(first["shared.weight"], other["shared.weight"]) for other in others)
