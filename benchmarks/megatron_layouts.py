"""Published layouts of Megatron, priced from their flags beside what was published.

    python benchmarks/megatron_layouts.py      prints a table, writes benchmarks/results/megatron_layouts.json

Priced with compiled blocks and fused attention, as a user of today gets it. The rates of the presets were fitted to
published runs (``published.py``), the two of GPT-3 among them, with the kernels that those had.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from galvatron.families import load_cluster
from galvatron.measure.models import load_any_model
from galvatron.planner.exchange.pricing import price_layout, source_named
from galvatron.planner.exchange.views import price_entry
from galvatron.planner.plan.setup import request_for

RESULTS = Path(__file__).parent / "results" / "megatron_layouts.json"
_GPT3 = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 4 "
    "--micro-batch-size 1 --global-batch-size 64 --seq-length 2048 --bf16"
)
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 1 --bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A run that somebody published."""

    model: str
    cluster: str
    flags: str
    iteration_s: float | None = None
    tokens_per_s_per_device: float | None = None
    tflops_per_device: float | None = None
    source: str


LAYOUTS = (
    Layout(
        model="gpt3-175b",
        cluster="a100-80gb-64",
        flags=f"{_GPT3} --sequence-parallel --recompute-granularity selective",
        iteration_s=13.75,
        source="Korthikanti et al. 2022, Table 5: present work",
    ),
    Layout(
        model="gpt3-175b",
        cluster="a100-80gb-64",
        flags=f"{_GPT3} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        iteration_s=18.13,
        source="Korthikanti et al. 2022, Table 5: full recompute",
    ),
    Layout(
        model="mixtral-8x7b",
        cluster="h100-64",
        flags="--expert-model-parallel-size 8 --pipeline-model-parallel-size 4 "
        f"--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 256 --seq-length 4096 {_OVERLAP}",
        tflops_per_device=468,
        source="Megatron Core's README of MoE: reference mapping",
    ),
    Layout(
        model="llama3-70b",
        cluster="h100-64",
        flags="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 "
        f"--num-layers-per-virtual-pipeline-stage 2 --sequence-parallel --global-batch-size 128 --seq-length 8192 "
        f"{_OVERLAP}",
        tokens_per_s_per_device=1602,
        source="Megatron Bridge 25.11's performance summary, in FP8",
    ),
)


def main() -> None:
    """Price each layout."""
    source, rows = source_named("megatron"), []
    for layout in LAYOUTS:
        setup = source.setup(layout.flags, load_cluster(layout.cluster).devices)
        price = price_layout(request_for(layout.model, layout.cluster, setup, load_any_model), source, layout.flags)
        entry = price_entry(price)
        rows.append({"published": asdict(layout), "priced": entry})
        print(f"{layout.model} on {layout.cluster}: {layout.source}")
        for name in ("iteration_s", "tokens_per_s_per_device", "tflops_per_device"):
            print(f"  {name}: published {getattr(layout, name)}, priced {entry[name]:.4g}")
        print(f"  fits: {entry['fits']}, {entry['memory_bytes'] / 2**30:.1f} GiB")
    RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
