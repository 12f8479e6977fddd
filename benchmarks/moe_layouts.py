"""Published layouts of models with experts, priced by our cost model beside the planner's own choice.

    python benchmarks/moe_layouts.py      prints a table, writes benchmarks/results/moe_layouts.json

Each published layout becomes a plan by hand on the cluster that it ran on; the planner then plans for the same batch.
The models are those of ``moe_search.py``, in bf16 and with balanced experts. No figure of ours was fitted to these
runs. What the cost model does not know of a run (FP8, hidden all-to-alls, interleaved stages) is said beside it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from galvatron.core.files.clusters import load_cluster
from galvatron.core.spec import Cluster
from galvatron.core.units import format_bytes
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request, try_plan
from galvatron.planner.plan.setup import Setup, request_for
from moe_search import MODELS

RESULTS = Path(__file__).parent / "results" / "moe_layouts.json"
_TOKENS = 4096
_SHAPES = {shape.name: shape for shape in MODELS}


def _b200() -> Cluster:
    """8 B200: of the H100's figures, each times what the data sheets of the two say."""
    cluster = load_cluster("h100-8")
    device = replace(
        cluster.device,
        name="B200-180GB",
        memory_bytes=178 * 2**30,
        memory_bytes_per_s=cluster.device.memory_bytes_per_s * 8000 / 3350,
        bf16_flops_per_s=(cluster.device.bf16_flops_per_s or 0.0) * 2250 / 989,
        bf16_products_flops_per_s=(cluster.device.bf16_products_flops_per_s or 0.0) * 2250 / 989,
        bf16_attention_flops_per_s=(cluster.device.bf16_attention_flops_per_s or 0.0) * 2250 / 989,
    )
    (node,) = cluster.levels
    return replace(
        cluster, name="b200-8", device=device, levels=(replace(node, bytes_per_s=2 * node.bytes_per_s),), source=""
    )


def _h800() -> Cluster:
    """2048 H800: the chip of the H100, with 160 GB/s of NVLink (DeepSeek-V3's report, Section 3.2.2)."""
    cluster = load_cluster("h100-1024")
    node, outer = cluster.levels
    return replace(
        cluster,
        name="h800-2048",
        device=replace(cluster.device, name="H800-SXM5-80GB"),
        levels=(replace(node, bytes_per_s=160e9), replace(outer, units=256)),
        source="",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A run that somebody published."""

    model: str
    run: str
    cluster: Callable[[], Cluster]
    batch: int
    micro_batches: int
    strategy: str
    """Of the layers with experts."""
    outside: str
    """Of all others."""
    stages: int = 1
    published: float
    """Tokens a second and device."""
    source: str
    unknown: str
    """What we had to assume, or what the cost model does not know of it."""


LAYOUTS = (
    Layout(
        model="mixtral-8x7b",
        run="64 H100, EP8 PP4, interleaved 8 times",
        cluster=lambda: load_cluster("h100-64"),
        batch=256,
        micro_batches=16,
        strategy="dp16/dp2-ep8+zero2",
        outside="dp16+zero2",
        stages=4,
        published=0.0,
        source="Megatron Core's README of MoE: reference mapping; 468 TFLOP/s",
        unknown="interleaved stages; that 468 TFLOP/s are of this mapping",
    ),
    Layout(
        model="qwen3-30b-a3b",
        run="8 H100, FSDP8 with EP8",
        cluster=lambda: load_cluster("h100-8"),
        batch=512,
        micro_batches=32,
        strategy="sdp8/ep8+rc",
        outside="sdp8",
        published=12040,
        source="NeMo Automodel's performance summary",
        unknown="batch, micro-batches and recompute are assumed; balance was forced",
    ),
    Layout(
        model="qwen3-30b-a3b",
        run="8 B200, FSDP8",
        cluster=_b200,
        batch=256,
        micro_batches=16,
        strategy="sdp8+rc",
        outside="sdp8",
        published=19500,
        source="pith-train issue 79",
        unknown="batch, micro-batches and recompute are assumed",
    ),
    Layout(
        model="qwen3-30b-a3b",
        run="8 B200, PP2 EP4",
        cluster=_b200,
        batch=256,
        micro_batches=32,
        strategy="dp4/ep4+zero2+rc",
        outside="dp4+zero2",
        stages=2,
        published=17500,
        source="pith-train issue 79",
        unknown="batch, micro-batches and recompute are assumed",
    ),
    Layout(
        model="qwen3-30b-a3b",
        run="8 B200, DP2 × EP4",
        cluster=_b200,
        batch=256,
        micro_batches=16,
        strategy="sdp8/dp2-ep4+rc",
        outside="sdp8",
        published=20300,
        source="pith-train issue 79",
        unknown="batch, micro-batches and recompute are assumed",
    ),
    Layout(
        model="deepseek-v3",
        run="2048 H800, PP16 EP64, ZeRO-1",
        cluster=_h800,
        batch=15360,
        micro_batches=120,
        strategy="dp128/dp2-ep64+zero2+rc",
        outside="dp128+zero2",
        stages=16,
        published=1e12 / (180_000 * 3600),
        source="DeepSeek-V3's report: 180,000 device hours a trillion tokens",
        unknown="FP8 products; all-to-alls to at most 4 nodes a token, hidden behind computation (DualPipe)",
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One layout: what was published, and what we think of it. Tokens are a second and device."""

    model: str
    run: str
    strategy: str
    published_tokens: float
    predicted_tokens: float
    memory: str
    ours: str
    ours_tokens: float | None
    source: str
    unknown: str
    times: dict[str, float]
    """Where the time of the published layout's slowest stage goes, as shares of a micro-batch."""


def _stages(layout: Layout, request: Request) -> list[list[str]]:
    """Equal numbers of blocks in each stage, the longer ones first; embedding and head beside the first and last."""
    names = [layer.name for layer in request.model.layers]
    blocks = len(names) - 2
    sizes = [blocks // layout.stages + (number < blocks % layout.stages) for number in range(layout.stages)]
    sizes[0] += 1
    sizes[-1] += 1
    chosen = [layout.strategy if name == "sparse" else layout.outside for name in names]
    stages, begin = [], 0
    for size in sizes:
        stages.append(chosen[begin : begin + size])
        begin += size
    return stages


def _tokens(plan: Plan) -> float:
    return plan.throughput * _TOKENS / plan.cluster.devices


def _shares(plan: Plan) -> dict[str, float]:
    slowest = max(plan.stages, key=lambda stage: stage.time_s).time
    once = {name: value / plan.micro_batches for name, value in asdict(slowest).items() if name in _ONCE}
    seconds = asdict(slowest) | once
    total = sum(seconds.values())
    return {name.removesuffix("_s"): round(value / total, 3) for name, value in seconds.items() if value / total > 0.01}


_ONCE = ("sync_s", "optimizer_s")


def _published(layout: Layout, plan: Plan) -> float:
    """Of Mixtral operations were published: as many as a forward and twice as many in backward."""
    if layout.published:
        return layout.published
    flops = 3 * sum(layer.forward_flops for layer in plan.model.spec().layers) / _TOKENS
    return 468e12 / flops


def compared(layout: Layout, folder: Path) -> Row:
    """The layout priced, and the planner's plan for the same batch."""
    shape = _SHAPES[layout.model]
    path = folder / f"{shape.name}.toml"
    path.write_text(shape.text, encoding="utf-8")
    request = request_for(path, layout.cluster(), Setup(batch=layout.batch, expert_imbalance=1.0))
    plan = priced(request, _stages(layout, request), micro_batches=layout.micro_batches)
    ours = try_plan(request)
    fits = "" if plan.memory_bytes <= plan.memory_budget_bytes else ", too much"
    chosen = "none fits"
    if ours is not None:
        used = {layer.strategy for stage in ours.stages for layer in stage.layers if layer.layer == "sparse"}
        chosen = f"{len(ours.stages)} × ({', '.join(sorted(used))}), {ours.micro_batches} micro-batches"
    return Row(
        model=layout.model,
        run=layout.run,
        strategy=f"{layout.stages} × {layout.strategy}, {layout.micro_batches} micro-batches",
        published_tokens=round(_published(layout, plan)),
        predicted_tokens=round(_tokens(plan)),
        memory=f"{format_bytes(plan.memory_bytes)}{fits}",
        ours=chosen,
        ours_tokens=None if ours is None else round(_tokens(ours)),
        source=layout.source,
        unknown=layout.unknown,
        times=_shares(plan),
    )


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            row = compared(layout, Path(folder))
            rows.append(row)
            error = row.predicted_tokens / row.published_tokens - 1
            print(f"{row.model}, {row.run}: {row.strategy}")
            print(f"  published {row.published_tokens:,.0f}, predicted {row.predicted_tokens:,.0f} ({error:+.0%})")
            print(f"  {row.memory}; {row.times}")
            print(f"  ours {row.ours_tokens or 0:,.0f}: {row.ours}")
    RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
