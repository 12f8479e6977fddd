"""Weights of one architecture of the intake, in a process of its own: from a folder that the stock model saved, and
back into one that it loads."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import galvatron
from galvatron.families.build import without_weights
from galvatron.families.layer import Batch
from galvatron.families.registry import layered_model
from galvatron.families.weights import persistent_buffers
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.trial import own_loss, trial_batches
from galvatron.runtime.unpriced import facts_of, unpriced
from galvatron.train.checkpoints.export import export_model
from intake_models import LENGTH, Architecture
from intake_run import Outcome, _apart, _on_ranks, _tried
from intake_table import EQUAL, REFUSED, WRONG

__all__ = ["WEIGHT_COLUMNS", "examine_weights"]

WEIGHT_COLUMNS = ("loaded", "exported")
_ROWS = 4
_TOLERANCE = 1e-4


def examine_weights(architecture: Architecture) -> dict[str, Any]:
    """The architecture's row: whether its first loss is the stock model's, and whether what is exported comes back."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        columns = _columns(architecture, Path(folder))
    row = {name: asdict(columns[name]) for name in WEIGHT_COLUMNS}
    return {"columns": row, "seconds": round(time.monotonic() - started, 1)}


def _columns(architecture: Architecture, folder: Path) -> dict[str, Outcome]:
    found: dict[str, Any] = {}

    def prepare() -> None:
        model, training = architecture.model()
        layered = layered_model(without_weights(model))
        batch = trial_batches(layered, model, (_ROWS, LENGTH))["plain"]
        config = {**model.config.to_dict(), "architectures": [type(model).__name__]}  # type: ignore[union-attr, operator]
        facts = replace(facts_of(layered, training, type(model).__name__), config=config)
        plan = replace(unpriced(facts, [["dp2"] * len(layered.layers)]), batch=_ROWS)
        found.update(model=model, batch=batch, plan=plan)

    outcome = _tried(prepare)
    if outcome.outcome != EQUAL:
        return dict.fromkeys(WEIGHT_COLUMNS, outcome)
    model, batch, plan = found["model"], found["batch"], found["plan"]
    outcome = _tried(lambda: found.update(loss=_apart(lambda: _alone(model, batch, folder / "stock"))))
    if outcome.outcome != EQUAL:
        said = f"the stock model itself does not save its weights, load them and compute a loss: {outcome.reason}"
        return dict.fromkeys(WEIGHT_COLUMNS, Outcome(REFUSED, said))
    loaded = _on_ranks(lambda: _loaded(plan, folder, batch, found["loss"]))
    if not (folder / "out" / "config.json").exists():
        return {"loaded": loaded, "exported": loaded if loaded.outcome != EQUAL else Outcome(WRONG, "nothing written")}
    exported: list[Outcome] = []
    outcome = _tried(lambda: exported.append(_apart(lambda: _exported(model, folder))))
    return {"loaded": loaded, "exported": exported[0] if outcome.outcome == EQUAL else outcome}


def _alone(model: nn.Module, batch: Batch, folder: Path) -> float:
    """The stock model saves itself; the loss of what its class loads from there."""
    with torch.no_grad():
        persistent = persistent_buffers(model)
        for name, own in persistent.items():
            if "bias" in name and own.is_floating_point():
                own.add_(torch.rand(own.shape, generator=torch.Generator().manual_seed(0)))  # zeros would hide a loss
    model.save_pretrained(folder)  # type: ignore[operator]
    kind: Any = type(model)
    with torch.no_grad():
        return float(own_loss(kind.from_pretrained(folder).eval(), batch, None))


def _loaded(plan: Plan, folder: Path, batch: Batch, expected: float) -> Outcome:
    """On a rank: the loss of the folder's weights. Writes them again."""
    parallel = galvatron.parallelize(None, plan, weights=folder / "stock", check=False, device="cpu")
    loss = float(parallel.evaluate(batch))  # without the noise that some routers add in training
    export_model(parallel, folder / "out")
    if abs(loss - expected) <= _TOLERANCE * max(1.0, abs(expected)):
        return Outcome(EQUAL)
    return Outcome(WRONG, f"its loss is {loss:.6g} instead of {expected:.6g}")


def _exported(model: nn.Module, folder: Path) -> Outcome:
    """What the stock class makes of the exported folder, beside what it makes of its own."""
    kind: Any = type(model)
    theirs, ours = (_state(kind, folder / name) for name in ("stock", "out"))
    lost = sorted(theirs.keys() ^ ours.keys())
    if lost:
        return Outcome(WRONG, f"{lost[0]} is in one of the folders only")
    off = [name for name, own in theirs.items() if not torch.equal(own, ours[name])]
    return Outcome(WRONG, f"{off[0]} (and {len(off) - 1} others) differs") if off else Outcome(EQUAL)


def _state(kind: Any, folder: Path) -> dict[str, Tensor]:
    loaded, report = kind.from_pretrained(folder, output_loading_info=True)
    missing = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
    state: dict[str, Tensor] = loaded.state_dict()
    return state | {f"not loaded: {name}": torch.empty(0) for name in missing}
