"""The intake: what is tried, what counts as equal, and what the tables say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from longer import longer

import intake_run
from galvatron.core.errors import InvalidInput
from galvatron.families.registry import layered_model
from intake_models import architectures, small_config
from intake_table import counts, read, rendered, write_report


def _row(name: str, **columns: str) -> dict[str, Any]:
    """``columns``: reasons; an empty one is equal."""
    made = {
        column: {"outcome": "refused" if columns.get(column) else "equal", "reason": columns.get(column, "")}
        for column in ("planned", "DP", "SDP", "PP", "TP", "EP", "plan")
    }
    return {"architecture": name, "head": "causal", "tp_plan": True, "ep_plan": False, "columns": made}


def test_every_head_is_looked_at() -> None:
    found = architectures()
    heads = {"causal", "masked", "seq2seq", "speech", "image", "image and text", "image and text, with images"}
    assert heads == {own.head for own in found.values()}
    assert {"LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification"} <= set(
        found
    )
    assert len(found) > 300


@pytest.mark.parametrize(
    ("name", "field", "kinds"),
    [
        ("JambaForCausalLM", "layers_block_type", {"mamba", "attention"}),
        ("Qwen3NextForCausalLM", "layer_types", {"linear_attention", "full_attention"}),
        ("Gemma3ForCausalLM", "layer_types", {"sliding_attention", "full_attention"}),
    ],
)
def test_every_kind_of_layer_is_kept(name: str, field: str, kinds: set[str]) -> None:
    small: Any = small_config(architectures()[name].default())
    assert len(getattr(small, field)) == small.num_hidden_layers <= 12
    assert set(getattr(small, field)) == kinds


def test_dense_blocks_before_experts_are_kept() -> None:
    small: Any = small_config(architectures()["DeepseekV3ForCausalLM"].default())
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (1, 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("HYV4ForCausalLM", "argument 'prev_topk_indices' .* would have to travel too"),
        ("IBertForMaskedLM", r"forward changes ibert\.embeddings\.embeddings_act1\.x_min, by statistics of a batch"),
        longer(
            "Qwen3OmniMoeThinkerForConditionalGeneration", "its own loss of a trial batch fails .*vision_start_token_id"
        ),
    ],
)
def test_models_that_fail_when_they_run_are_refused_before(name: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        layered_model(architectures()[name].model()[0])


def test_a_gradient_that_is_twice_as_large_is_wrong() -> None:
    """Three steps of Adam would not see it."""
    theirs = {"weight": torch.tensor([0.5, -0.25]), "bias": torch.tensor([1e-9])}
    ours = {"weight": 2 * theirs["weight"], "bias": torch.tensor([2e-9])}
    off = intake_run._gradients_off(theirs, iter(ours.items()))
    assert off is not None
    assert off.startswith("gradient of weight is off by 0.5")
    assert intake_run._gradients_off(theirs, iter({**ours, "weight": theirs["weight"]}.items())) is None


def test_a_parameter_that_nobody_holds_is_wrong() -> None:
    one = torch.ones(2)
    theirs = intake_run._Reference(
        parameters={"weight": one, "lost": torch.ones(1)}, first_names={"weight": "weight", "lost": "lost"}
    )
    assert intake_run._parameters_off(theirs, iter({"weight": one}.items())) == "lost is no parameter under the plan"
    tied = intake_run._Reference(
        parameters={"weight": one, "again": one}, first_names={"weight": "weight", "again": "weight"}
    )
    assert intake_run._parameters_off(tied, iter({"again": one}.items())) is None
    assert intake_run._parameters_off(tied, iter({"weight": torch.tensor([1.0, torch.nan])}.items())) is not None


def test_losses() -> None:
    assert intake_run._losses_off([2.0, 1.0], [2.0001, 1.0]) is None
    assert intake_run._losses_off([2.0, 1.0], [2.0, 1.01]) == "loss of step 1 is 1.01 instead of 1"
    assert intake_run._losses_off([2.0], [float("nan")]) is not None


def test_the_last_result_counts(tmp_path: Path) -> None:
    path = tmp_path / "intake.jsonl"
    assert read(path) == {}
    rows = [_row("A", TP="no"), _row("B"), _row("A")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert list(read(path)) == ["A", "B"]
    assert counts(list(read(path).values())) == [2] * 7


def test_reasons_of_one_kind_are_one() -> None:
    rows = [_row("A", TP="A: 3 heads"), _row("B", TP="B: 5 heads"), {**_row("C"), "columns": {}, "crashed": "it hangs"}]
    text = rendered(rows)
    assert "| 1 | **failed**: it hangs | 1 | C |" in text
    assert "| 2 | N heads | 2 | A, B |" in text
    assert "| B | yes | equal | equal | equal | 2 | equal | equal |" in text


def test_the_document_keeps_what_is_around(tmp_path: Path) -> None:
    document = tmp_path / "models.md"
    document.write_text("before\n", encoding="utf-8")
    write_report({"A": _row("A")}, document)
    document.write_text(document.read_text(encoding="utf-8") + "after\n", encoding="utf-8")
    write_report({"B": _row("B")}, document)
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert text.count("Every architecture of transformers") == 1
    assert "| B |" in text
    assert "| A |" not in text
