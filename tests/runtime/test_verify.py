"""The comparison with the stock model passes where training is right, and finds deliberate breaks."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from longer import longer
from mutants import under
from parity import cluster_of
from ranks import ranks
from torch import Tensor, nn
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

import galvatron
from galvatron.core.errors import Unequal
from galvatron.core.spec import ONE_F_ONE_B
from galvatron.families.layer import Batch
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.runtime.tied.in_stage import resplit
from galvatron.runtime.verify import difference, verify

_CPU = torch.device("cpu")
_MIXED = ["sdp4", "dp4", "sdp4+rc", "dp4+zero2", "dp2-sdp2", "sdp4"]
_PIPELINE = [["dp2", "sdp2", "dp2"], ["sdp2+rc", "dp2", "dp2"]]


def _config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        architectures=["Qwen2ForCausalLM"],
    )


def _model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Qwen2ForCausalLM._from_config(_config(), attn_implementation="sdpa")
    return model


@cache
def _spec() -> galvatron.ModelSpec:
    ids = torch.zeros((1, 32), dtype=torch.long)
    return galvatron.describe(_model(), {"input_ids": ids, "labels": ids})


def _plan(stages: list[list[str]]) -> galvatron.Plan:
    request = Request(model=_spec(), cluster=cluster_of(4), batch=32, schedule=ONE_F_ONE_B)
    return priced(request, stages, micro_batches=4)


def _unchecked(strategies: list[str]) -> galvatron.Plan:
    """A plan with strategies that the planner would not offer."""
    plan = _plan([["dp4"] * len(strategies)])
    (stage,) = plan.stages
    layers = tuple(replace(layer, strategy=own) for layer, own in zip(stage.layers, strategies, strict=True))
    return replace(plan, stages=(replace(stage, layers=layers),))


# On a rank


def _difference(plan: galvatron.Plan, broken: str | None = None) -> str | None:
    if broken is None:
        return difference(_model(), plan, device=_CPU)
    target, replacement = _BREAKS[broken]
    with patch(target, replacement):
        return difference(_model(), plan, device=_CPU)


def _lost(weight: Tensor, *places: Any) -> Tensor:
    return resplit(weight, *places).detach()


def _same(batch: Batch) -> Tensor:
    return batch["labels"]


_BREAKS: dict[str, tuple[str, Any]] = {
    "tied gradients lost": ("galvatron.runtime.assembly.resplit", _lost),
    "labels not shifted": ("galvatron.families.generic.layers.causal_targets", _same),
}


def _left_behind(plan: galvatron.Plan) -> tuple[int, bool]:
    """Groups that were not given back, and whether the next random numbers are as without the comparison."""
    known, model = set(dist.distributed_c10d._world.pg_map), _model()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    verify(model, plan, device=_CPU)
    new = set(dist.distributed_c10d._world.pg_map) - known
    return len(new), torch.equal(torch.rand(3), expected)


def _built(plan: galvatron.Plan, check: bool | None) -> str:
    """What parallelize says when labels are not shifted."""
    with patch("galvatron.families.generic.layers.causal_targets", _same):
        try:
            galvatron.parallelize(_model(), plan, device="cpu", check=check)
        except Unequal as error:
            return str(error)
    return ""


# In the parent


@pytest.mark.parametrize("stages", [[_MIXED], longer(_PIPELINE)])
def test_passes_where_training_is_right(stages: list[list[str]]) -> None:
    assert ranks(4).run(_difference, _plan(stages)) == [None] * 4


@pytest.mark.parametrize(
    ("broken", "strategies", "says"),
    [
        ("tied gradients lost", ["tp4", "dp4", "dp4", "dp4", "dp4", "dp4"], r"embed_tokens\.weight by"),
        ("labels not shifted", _MIXED, "its loss is"),
    ],
)
def test_breaks_are_found_and_named_on_all_ranks(broken: str, strategies: list[str], says: str) -> None:
    found = ranks(4).run(_difference, _unchecked(strategies), broken)
    assert len(set(found)) == 1
    assert found[0] is not None
    assert found[0].startswith("Qwen2ForCausalLM: ")
    assert "--space dp" in found[0]
    assert re.search(says, found[0])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["dp averages instead of summing", "sdp averages instead of summing"])
def test_gradients_averaged_instead_of_summed_are_found(mutant: str) -> None:
    found = ranks(4).run(under, mutant, _difference, _plan([_MIXED]))
    assert found[0] is not None
    assert re.search("gradients of .* parameters differ", found[0])


@pytest.mark.slow
def test_nothing_is_left_behind() -> None:
    assert ranks(4).run(_left_behind, _plan(_PIPELINE)) == [(0, True)] * 4


@pytest.mark.slow
def test_parallelize_checks_unknown_families_unless_told_not_to() -> None:
    plan = _plan([["dp4"] * 6])
    assert all("does not train as the stock model" in said for said in ranks(4).run(_built, plan, None))
    assert ranks(4).run(_built, plan, False) == [""] * 4


class _Own(nn.Module):
    """No Hugging Face model, and one whose loss is not its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def _squares(output: Tensor, batch: Any) -> Tensor:
    loss: Tensor = (output.mean(-1) - batch["labels"]).square().sum()
    return loss


def _own(plan: galvatron.Plan, width: int) -> tuple[str | None, list[str]]:
    torch.manual_seed(0)
    model = _Own(width) if width < 1000 else _Own(8).to("meta")
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("galvatron.runtime.verify")
    logger.addHandler(handler)
    try:
        ids = torch.arange(40).view(8, 5) % 10
        verify(model, plan, device=_CPU, example={"ids": ids, "labels": ids}, loss=_squares)
    except Unequal as error:
        return str(error), warned
    finally:
        logger.removeHandler(handler)
    return None, warned


def test_a_model_of_ones_own_is_compared_itself() -> None:
    ids = torch.arange(40).view(8, 5) % 10
    spec = galvatron.describe(_Own(), {"ids": ids, "labels": ids})
    request = Request(model=spec, cluster=cluster_of(2), batch=8, schedule=ONE_F_ONE_B)
    plan = priced(request, [["dp2", "sdp2", "dp2", "sdp2"]], micro_batches=2)
    assert ranks(2).run(_own, plan, 8) == [(None, [])] * 2
    (_, warned), (error, silent) = ranks(2).run(_own, plan, 1000)
    assert error is None
    assert silent == []
    assert "_Own is not compared with the stock model before it trains" in warned[0]


def _pali_gemma() -> PaliGemmaForConditionalGeneration:
    text = {
        "model_type": "gemma", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8, "projection_dim": 32,
    }  # fmt: skip
    config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=63, projection_dim=32)
    return PaliGemmaForConditionalGeneration(config)


def _mixing(plan: galvatron.Plan) -> str | None:
    torch.manual_seed(0)
    return difference(_pali_gemma(), plan, device=_CPU)


def test_a_stock_model_whose_rows_depend_on_the_padding_of_others_is_named() -> None:
    """Text alone, which this model masks only where some row is padded. It also hands its mask to another model."""
    ids = torch.zeros((1, 16), dtype=torch.long)
    spec = galvatron.describe(_pali_gemma(), {"input_ids": ids, "labels": ids})
    request = Request(model=spec, cluster=cluster_of(2), batch=2, schedule=ONE_F_ONE_B)
    for said in ranks(2).run(_mixing, priced(request, [["dp2"] * len(spec.layers)])):
        assert "PaliGemmaForConditionalGeneration: the stock model itself computes a row otherwise alone" in said
