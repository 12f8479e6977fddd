"""The tables of docs/evaluation.md, as markdown, from raw results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cells import BATCH_STEP, Run
from estimation import estimations
from systems import SYSTEMS
from verdicts import Column, broken_promises, columns

__all__ = ["estimation_table", "main_tables", "plans_table", "search_table", "summary", "verdict_table"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_TITLES = {
    "dp": "DP",
    "sdp": "SDP",
    "tp": "TP",
    "pp": "PP (GPipe)",
    "3d": "3D",
    "dp+tp": "DP+TP",
    "dp+pp": "DP+PP",
    "galvatron": "**ours**",
    "galvatron-extended": "ours, with extensions",
}
assert set(_TITLES) == {system.name for system in SYSTEMS}
_STOCK = {"dp": "DDP", "sdp": "FSDP2", "tp": "DTensor", "pp": "`torch.distributed.pipelining`"}


def main_tables(runs: Sequence[Run]) -> str:
    """A table a model: samples a second (batch), with the program that ran it."""
    parts = []
    for model in dict.fromkeys(run.model for run in runs):
        own = [column for column in columns(runs) if column.model == model]
        rows = [
            [_TITLES[system], _program(system, own), *(_entry(column, system) for column in own)]
            for system in _TITLES
            if any(column.of(system) for column in own)
        ]
        head = [model, "program", *(column.budget for column in own)]
        parts.append(_table(head, rows))
    return "\n\n".join(parts) if parts else _NOTHING


_NOTHING = "*No runs yet: the command above makes them.*"


def _program(system: str, own: Sequence[Column]) -> str:
    run = next(run for column in own if (run := column.of(system)))
    return _STOCK[system] if run.program == "stock" else "ours"


def _entry(column: Column, system: str) -> str:
    run = column.of(system)
    if run is None:
        return "–"
    if run.status == "oom":  # with a larger batch there was no time yet for a smaller one
        return "OOM" if run.batch <= BATCH_STEP else f"OOM at {run.batch}"
    if run.status != "ok":
        return "failed"
    text = f"{run.samples_per_s:.2f} ({run.batch})"
    fastest = max(one.samples_per_s for one in column.runs if one.status == "ok")
    return f"**{text}**" if run.samples_per_s == fastest else text


def verdict_table(runs: Sequence[Run]) -> str:
    """What must hold, column by column, and over all."""
    if not runs:
        return _NOTHING
    rows = []
    for column in columns(runs):
        baseline = column.best_baseline
        rows.append(
            [
                column.model,
                f"{column.budget}{_notes(column)}",
                "–" if baseline is None else f"{_TITLES[baseline.system]} {baseline.samples_per_s:.2f}",
                "–" if column.lead is None else f"{column.lead:.2f}",
                _yes(column.leads),
                "–" if column.predicted_best is None else f"{column.predicted_best:.2f}",
                "–" if column.extended_lead is None else f"{column.extended_lead:.2f}",
            ]
        )
    head = [
        "model", "budget", "best baseline", "ours over it", "at least as fast", "predicted best over measured best",
        "with extensions over the baseline",
    ]  # fmt: skip
    broken = broken_promises(runs)
    told = f"Plans of ours said to fit that ran out of memory: {_named(broken.standing) or 'none'}."
    if broken.mended:
        told += f" With earlier figures of cluster or model: {_named(broken.mended)}."
    return f"{_table(head, rows)}\n\n{told}"


def _notes(column: Column) -> str:
    boots, still_open = column.boots, column.open_systems
    notes = [f"{boots} boots"] * (boots > 1) + [f"rows open: {still_open}"] * (still_open > 0)
    return f" ({', '.join(notes)})" if notes else ""


def _named(runs: Sequence[Run]) -> str:
    return "; ".join(f"{run.cell} at batch {run.batch}" for run in runs)


def summary(runs: Sequence[Run]) -> str:
    """The verdicts in a few sentences."""
    begun = [column for column in columns(runs) if column.leads is not None]
    compared = [column for column in begun if not column.open_systems]
    if not any(column.lead for column in compared):
        return _NOTHING
    leads = [column.lead for column in compared if column.lead is not None]
    best = [column.predicted_best for column in compared if column.predicted_best is not None]
    ours = next(one for one in reversed(estimations(runs)) if one.program == "galvatron")
    promises = broken_promises(runs)
    broken, before = len(promises.standing), len(promises.mended)
    behind = ", ".join(f"{column.model} at {column.budget}" for column in compared if not column.leads)
    extended = [column.extended_lead for column in compared if column.extended_lead is not None]
    partly = ", ".join(f"{column.model} at {column.budget}" for column in begun if column.open_systems)
    return (
        f"Our plan is at least as fast as the best baseline, within the spread of the runs, in "
        f"{sum(column.leads is True for column in compared)} of {len(compared)} columns (model and budget"
        f"{f', not {behind}' if behind else ''}; {min(leads):.2f} to {max(leads):.2f} times its throughput"
        f"{f'; begun: {partly}' if partly else ''}). "
        f"{_extended(extended)}What was "
        f"predicted to be best is within 5% of the best measured in {sum(one >= 0.95 for one in best)} of {len(best)}. "
        f"Predicted iterations are off by {ours.time:.1%} on average, without the overlap slowdown by "
        f"{ours.time_without_slowdown:.1%}, memory by {ours.memory:.1%}; {broken or 'no'} plan"
        f"{'s' if broken > 1 else ''} of ours said to fit ran out of memory"
        f"{f' ({before} did, planned with earlier figures)' if before else ''}."
    )


def _extended(leads: Sequence[float]) -> str:
    if not leads:
        return ""
    ahead = sum(lead >= 1 for lead in leads)
    return (
        f"With 1F1B, recompute, ZeRO-2 and sequence parallelism it is ahead in {ahead} of {len(leads)} "
        f"({min(leads):.2f} to {max(leads):.2f} times). "
    )


def _yes(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "**no**"


def estimation_table(runs: Sequence[Run]) -> str:
    found = estimations(runs)
    if not found:
        return _NOTHING
    rows = [
        [
            one.model,
            "ours" if one.program == "galvatron" else "stock",
            str(one.runs),
            f"{one.time:.1%} ({one.bias:+.1%})",
            f"{one.time_without_slowdown:.1%} ({one.bias_without_slowdown:+.1%})",
            f"{one.memory:.1%}",
        ]
        for one in found
    ]
    return _table(["model", "runtime", "runs", "time", "time, without the slowdown", "memory"], rows)


def search_table(content: Mapping[str, Any]) -> str:
    """Seconds over layers; content of the results of ``search_time.py``."""
    names = {"full": "all", "dp+tp": "DP+TP", "dp+pp": "DP+PP"}
    rows = [
        [
            names[row["space"]],
            f"{row['memory_gib']} GB",
            str(row["layers"]),
            f"{row['ours_s']:.3f}",
            f"{row['table_s']:.2f}",
            f"{row['paper_s']:.1f}",
            _gain(row["ours_samples_per_s"], row["table_samples_per_s"]),
        ]
        for row in content["rows"]
    ]
    head = ["dimensions", "memory", "layers", "ours, s", "table, s", "paper, s", "our plan over the table's"]
    return _table(head, rows)


def _gain(ours: float | None, table: float | None) -> str:
    if ours is None:
        return "nothing fits"
    return "the table finds none" if table is None else f"{ours / table - 1:+.1%}"


def plans_table(drawn: Sequence[Mapping[str, Any]]) -> str:
    """The drawings with their plans in words; content of the results of ``plans_drawn.py``."""
    parts = []
    for one in drawn:
        where = "the paper's machine" if one["cluster"] == "paper" else "the virtual cluster"
        title = f"{one['model']}, {one['budget']}, {where}"
        stages = "; ".join(f"stage {number}: {stage}" for number, stage in enumerate(one["plan"]))
        parts.append(f"![{title}](evaluation/{one['drawing']})\n\n{title}, batch {one['batch']}: {stages}.")
    return "\n\n".join(parts)
