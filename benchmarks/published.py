"""Published training runs, priced as they ran: what presets promise beside what people measured.

    python benchmarks/published.py      prints the table, writes it to docs/published.md and results/published.json
    python benchmarks/published_fit.py  fits the rooflines of the presets again and says how stable they are (minutes)

``data/published_runs.csv`` has the runs, ``data/published_sources.csv`` where each comes from and what it does not say.
Each run becomes a plan by hand on a preset: its model from its dimensions, its layout, batch and recompute.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from galvatron.core.files.clusters import load_cluster
from galvatron.core.spec import ONE_F_ONE_B, Attention, Cluster, Device, ModelSpec, Precision, Strategy, Training
from galvatron.families.bert.facts import Bert
from galvatron.families.gpt2.facts import Gpt2
from galvatron.families.llama.facts import Llama
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.setup import Setup, request_for

__all__ = ["HERE", "Priced", "Run", "predicted", "price", "published", "read_runs", "read_sources"]

HERE = Path(__file__).parent
_PAGE = HERE.parent / "docs" / "published.md"
_WEAK = "-500w"
"""torchtitan's H100: with HBM2e of 2.4 TB/s, limited to 500 W."""
_WEAK_RATE = (989 + 835) / 2 / 989
"""Its peak is "between SXM and NVL" (footnote 2 of its table): halfway."""

_mpt = partial(Gpt2, vocabulary=50368, activation="gelu", embedding_dropout=0, hidden_dropout=0, attention_dropout=0)
_gpt = partial(Gpt2, vocabulary=51200, activation="gelu")
_llama3 = partial(Llama, vocabulary=128256, kv_heads=8)
_llama2 = partial(Llama, hidden=8192, heads=64, kv_heads=8)
MODELS: dict[str, Callable[..., Gpt2 | Llama | Bert]] = {
    "mpt-760m": partial(_mpt, hidden=1536, layers=24, heads=12),
    "mpt-1b": partial(_mpt, hidden=2048, layers=24, heads=16),
    "mpt-3b": partial(_mpt, hidden=2560, layers=32, heads=20),
    "mpt-7b": partial(_mpt, hidden=4096, layers=32, heads=32),
    "mpt-13b": partial(_mpt, hidden=5120, layers=40, heads=40),
    "mpt-30b": partial(_mpt, hidden=7168, layers=48, heads=56),
    "mpt-70b": partial(_mpt, hidden=8192, layers=80, heads=64),
    "gpt-1.7b": partial(_gpt, hidden=2304, layers=24, heads=24),
    "gpt-3.6b": partial(_gpt, hidden=3072, layers=30, heads=32),
    "gpt-7.5b": partial(_gpt, hidden=4096, layers=36, heads=32),
    "gpt-18.4b": partial(_gpt, hidden=6144, layers=40, heads=48),
    "gpt-22b": partial(_gpt, hidden=6144, layers=48, heads=64),
    "gpt-175b": partial(_gpt, hidden=12288, layers=96, heads=96),
    "gpt-530b": partial(_gpt, hidden=20480, layers=105, heads=128),
    "gpt-1t": partial(_gpt, hidden=25600, layers=128, heads=160),
    "llama2-7b": Llama,
    "llama2-13b": partial(Llama, hidden=5120, layers=40, heads=40, inner=13824),
    "llama2-34b": partial(_llama2, layers=48, inner=22016),
    "llama2-70b": partial(_llama2, layers=80, inner=28672),
    "llama3-8b": partial(_llama3, inner=14336),
    "llama3-70b": partial(_llama3, hidden=8192, layers=80, heads=64, inner=28672),
    "llama3-405b": partial(_llama3, hidden=16384, layers=126, heads=128, inner=53248),
    "llama-1.2b": partial(_llama3, hidden=2048, layers=16, heads=32, head_dim=64, inner=8192, tied=True),
    "qwen3-4b": partial(
        Llama, hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, inner=9728, vocabulary=151936, tied=True
    ),
    "bert-huge": partial(Bert, hidden=1280, layers=32, heads=16, inner=5120, hidden_dropout=0.0, attention_dropout=0.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that somebody published; the columns of ``published_runs.csv``."""

    source: str
    role: str
    """``fit``: the presets' rooflines were fitted to it; ``held out``: not; ``beyond``: not what our runtime does."""
    model: str
    device: str
    gpus: int
    network: str
    """Between nodes, as ``--node-link`` takes it; empty: as in the preset."""
    tokens: int
    """Of a sample."""
    batch: int
    micro_batch: int
    """Samples of each data-parallel rank."""
    tp: int
    pp: int
    chunks: int
    """Of each stage: more than one where stages are interleaved."""
    data: str
    """dp or sdp: the data-parallel axis, outside that of TP."""
    sequence_parallel: str
    recompute: str
    """none, full, half (of the blocks) or selective (all but products)."""
    attention: str
    kernels: str
    figure: float
    unit: str

    @property
    def layout(self) -> str:
        """In short."""
        ranks = self.gpus // self.tp // self.pp
        parts = [f"{self.data}{ranks}" if ranks > 1 else "", f"tp{self.tp}" if self.tp > 1 else ""]
        parts += ["sp" if self.sequence_parallel == "yes" else "", f"pp{self.pp}" if self.pp > 1 else ""]
        return " ".join(part for part in parts if part) or "single"


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A run with its price; throughputs are tokens a second and device."""

    run: Run
    published: float
    predicted: float
    by_one_rate: float
    """What would be predicted without the preset's roofline."""
    share_of_peak: float
    """As published: model operations a second over the data sheet's."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def read_runs() -> list[Run]:
    numbers = {"gpus", "tokens", "batch", "micro_batch", "tp", "pp", "chunks"}
    rows = _rows("published_runs.csv")
    return [
        Run(**{name: int(own) if name in numbers else own for name, own in (row | _figure(row)).items()})  # type: ignore[arg-type]
        for row in rows
    ]


def _figure(row: dict[str, str]) -> dict[str, Any]:
    return {"figure": float(row["figure"])}


def read_sources() -> dict[str, dict[str, str]]:
    return {row["source"]: row for row in _rows("published_sources.csv")}


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / "data" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------------------- prices


def _spec(run: Run) -> ModelSpec:
    made = MODELS[run.model]
    facts = made() if run.model == "bert-huge" else made(positions=max(run.tokens, 2048))
    training = Training(
        precision=Precision.BF16,
        attention=Attention(run.attention),
        sequence_length=run.tokens,
        compile=run.kernels != "eager",
        float8=run.kernels == "float8",
    )
    return facts.spec(run.model, training)


@cache
def _preset(device: str, gpus: int, network: str) -> Cluster:
    name = f"{device}:{gpus}" if gpus <= 8 else f"{device}-{gpus}"
    return load_cluster(name, node_link=network or None)


def _cluster(run: Run, changed: Callable[[str, Device], Device]) -> Cluster:
    preset = run.device.removesuffix(_WEAK)
    cluster = _preset(preset, run.gpus, run.network)
    device = changed(preset, cluster.device)
    if run.device.endswith(_WEAK):

        def slower(rate: float | None) -> float | None:
            return None if rate is None else _WEAK_RATE * rate

        device = replace(
            device,
            memory_bytes=96 * 10**9,
            memory_bytes_per_s=0.8 * 2.4e12,
            bf16_flops_per_s=slower(device.bf16_flops_per_s),
            bf16_products_flops_per_s=slower(device.bf16_products_flops_per_s),
            bf16_attention_flops_per_s=slower(device.bf16_attention_flops_per_s),
            float8_flops_per_s=slower(device.float8_flops_per_s),
        )
    return replace(cluster, device=device)


def _unchanged(preset: str, device: Device) -> Device:
    return device


def _one_rate(preset: str, device: Device) -> Device:
    return replace(device, bf16_products_flops_per_s=None, bf16_attention_flops_per_s=None)


def price(run: Run, changed: Callable[[str, Device], Device] = _unchanged) -> Plan:
    """The plan that ran. ``changed``: the devices of presets with other figures."""
    compiled = run.kernels != "eager"
    request = request_for(_spec(run), _cluster(run, changed), Setup(batch=run.batch, compile=compiled))
    if run.chunks > 1:
        schedule = replace(ONE_F_ONE_B, chunks=run.chunks, bubble=1 / run.chunks)
        request = replace(request, schedule=schedule)
    ranks = run.gpus // run.tp // run.pp
    return priced(request, _stages(run, request), micro_batches=run.batch // (run.micro_batch * ranks))


def _stages(run: Run, request: Request) -> list[list[Strategy]]:
    """Equal numbers of blocks in each stage, the longer ones first; embedding and head beside the first and last."""
    ranks = run.gpus // run.tp // run.pp
    axes = [f"{run.data}{ranks}" if ranks > 1 else "", f"tp{run.tp}" if run.tp > 1 else ""]
    plain = Strategy.parse("-".join(axis for axis in axes if axis) or "single")
    split = replace(plain, sequence_parallel=run.sequence_parallel == "yes")
    recomputed = {
        "none": (split, split),
        "half": (split, replace(split, recompute=True)),
        "full": (replace(split, recompute=True),) * 2,
        "selective": (replace(split, selective_recompute=True),) * 2,
    }[run.recompute]
    blocks = len(request.model.layers) - 2
    head = replace(split, fused_loss="fused loss" in run.kernels)
    inside = [replace(recomputed[number % 2], float8=run.kernels == "float8") for number in range(blocks)]
    chosen = [plain, *inside, head]
    sizes = [blocks // run.pp + (number < blocks % run.pp) for number in range(run.pp)]
    sizes[0] += 1
    sizes[-1] += 1
    ends = [sum(sizes[: number + 1]) for number in range(run.pp)]
    return [chosen[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def published(run: Run) -> float:
    """What was published, as tokens a second and device."""
    model = _spec(run)
    if run.unit == "tokens/s":
        return run.figure
    if run.unit == "s":
        return run.batch * run.tokens / run.figure / run.gpus
    if run.unit == "model TFLOP/s":
        return run.figure * 1e12 * run.tokens / (3 * model.forward_flops)
    if run.unit != "hardware TFLOP/s":
        raise ValueError(f"unit: {run.unit!r} is unknown")
    facts = MODELS[run.model]()  # equation 3 of megatron-2021, which counts the recomputed forward too
    wide = facts.layers * facts.hidden
    share = 1 + run.tokens / (6 * facts.hidden) + facts.vocabulary / (16 * wide)
    return run.figure * 1e12 / (96 * wide * facts.hidden * share)


def predicted(run: Run, changed: Callable[[str, Device], Device] = _unchanged) -> float:
    """What the cost model says, in the same unit."""
    return price(run, changed).throughput * run.tokens / run.gpus


def compared(run: Run) -> Priced:
    model, seen = _spec(run), published(run)
    peak = _preset(run.device.removesuffix(_WEAK), run.gpus, run.network).device.peak_flops_per_s(Precision.BF16)
    achieved = 3 * model.forward_flops / run.tokens * seen
    return Priced(
        run=run,
        published=seen,
        predicted=predicted(run),
        by_one_rate=predicted(run, _one_rate),
        share_of_peak=achieved / (peak or 1.0),
    )


# ---------------------------------------------------------------------------------------------------------- report


_OURS = "recipe"
"""The source of the runs that nobody else published."""


def summary(errors: Iterable[float], name: str) -> str:
    sizes = sorted(map(abs, errors))
    high = sizes[int(0.9 * (len(sizes) - 1))]
    return f"| {name} | {len(sizes)} | {statistics.median(sizes):.1%} | {high:.1%} | {sizes[-1]:.1%} |"


def tables(rows: list[Priced]) -> str:
    """What stands in docs/published.md."""
    sources = read_sources()
    counted = [row for row in rows if row.run.role != "beyond"]
    lines = ["| runs | number | median error | 90th percentile | worst |", "|---|---|---|---|---|"]
    lines.append(summary((row.error for row in counted), "all"))
    for ours, name in ((False, "published by others"), (True, "our own, on one H200")):
        lines.append(summary((row.error for row in counted if (row.run.source == _OURS) is ours), name))
    for role, name in (("fit", "fitted to"), ("held out", "held out")):
        lines.append(summary((row.error for row in rows if row.run.role == role), name))
    for device in ("a100-80gb", "h100", "h200"):
        own = [row for row in counted if row.run.device.removesuffix(_WEAK) == device]
        lines.append(summary((row.error for row in own), f"on `{device}`"))
    plain = (row.by_one_rate / row.published - 1 for row in counted)
    lines.append(summary(plain, "all, if each device had one rate for all layers"))
    for source, facts in sources.items():
        own = [row for row in rows if row.run.source == source]
        lines += ["", f"**{facts['title']}** ([{facts['place']}]({facts['url']})). Assumed: {facts['assumed']}."]
        lines += ["", "| model | devices | layout | batch × tokens | recompute | kernels | published | predicted | |"]
        lines += ["|---|---|---|---|---|---|---|---|---|", *map(_line, own)]
    return "\n".join(lines) + "\n"


def _line(row: Priced) -> str:
    run = row.run
    kernels = f"{run.kernels}{', eager attention' if run.attention == 'eager' else ''}"
    size = f"{run.batch:,} × {run.tokens:,}"
    seen = f"{row.published:,.0f} ({row.share_of_peak:.0%})"
    return (
        f"| {run.model} | {run.gpus} {run.device} | {run.layout} | {size} | {run.recompute} | {kernels} | {seen} | "
        f"{row.predicted:,.0f} | {row.error:+.1%} |"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [compared(run) for run in read_runs()]
    text = tables(rows)
    print(text)
    saved = [asdict(row) | {"error": round(row.error, 4)} for row in rows]
    results = HERE / "results" / "published.json"
    results.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = _PAGE.read_text(encoding="utf-8")
    section = re.compile(r"(<!-- runs -->\n).*?(<!-- /runs -->)", re.DOTALL)
    _PAGE.write_text(section.sub(lambda found: f"{found[1]}{text}{found[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
