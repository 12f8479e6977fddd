"""The paper's larger clusters (Section 5.5), predicted: 16 TITAN RTX in two nodes, and 64 A100 in eight.

The paper's tables for them are not in our copy. What is predicted here was fitted to its table of 8 GPUs, or follows
from what was usual when the paper was written:

- Micro-batches: at most 4, and in pipelines of more than 8 stages one for every two stages.
- The A100 multiplies fp32 tensors in TF32, as PyTorch did by default.
- 3D has 2-way TP and PP on 16 devices and 4-way DP, TP and PP on 64.
- TP on all of 64 devices is impossible: Table 1's sizes of activations say that the models have 32 heads.

    python benchmarks/paper_clusters.py     prints both tables, writes benchmarks/results/paper_clusters.json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from paper_table import SPACES, Cell, Prediction, Setting, predict

__all__ = ["SETTINGS", "predictions", "table"]

RESULTS = Path(__file__).parent / "results" / "paper_clusters.json"
SETTINGS = {
    Setting("titan-rtx-16", (8, 16), 512): ("BERT-Huge-32", "BERT-Huge-48", "ViT-Huge-32", "ViT-Huge-48"),
    Setting("a100-64", (16, 32), 1024): ("BERT-xHuge", "ViT-xHuge"),
}
"""Machines, memories in GiB and largest batches, with the models of each."""


def predictions(setting: Setting) -> list[Prediction]:
    """Every strategy, model and memory of a setting."""
    cells = [
        Cell(memory_gib=memory, strategy=strategy, model=model, throughput=None, batch=None)
        for memory in setting.memories_gib
        for strategy in SPACES
        for model in SETTINGS[setting]
    ]
    return [predict(cell, setting) for cell in cells]


def table(setting: Setting, found: list[Prediction]) -> str:
    """As the paper prints it: samples a second, and the batch in brackets."""
    models = SETTINGS[setting]
    lines = [f"| {setting.machine} | | {' | '.join(models)} |", "|---|---|" + "---|" * len(models)]
    for memory in setting.memories_gib:
        for strategy in SPACES:
            row = {p.cell.model: p for p in found if (p.cell.memory_gib, p.cell.strategy) == (memory, strategy)}
            lines.append(f"| {memory}G | {strategy} | {' | '.join(_entry(row[model]) for model in models)} |")
    return "\n".join(lines)


def _entry(prediction: Prediction) -> str:
    if prediction.best_throughput is None or prediction.batch is None:
        return "OOM"
    return f"{prediction.best_throughput:.2f} ({prediction.batch})"


def main() -> None:
    saved = []
    for setting in SETTINGS:
        found = predictions(setting)
        print(table(setting, found), end="\n\n")
        for each in found:
            cell = {name: value for name, value in asdict(each.cell).items() if name not in ("throughput", "batch")}
            figures = {"batch": each.batch, "samples_per_s": each.best_throughput}
            saved.append({"machine": setting.machine, **cell, **figures})
    RESULTS.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
