"""How fast models with experts are planned: three well-known ones, on 64 and on 1024 devices.

    python benchmarks/moe_search.py      prints a table, writes benchmarks/results/moe_search.json

The models are described by figures, as anybody may describe one (docs/models.md): sequences of 4096 tokens, SwiGLU
experts, the busiest device a tenth above the mean. Seconds are those of ``galvatron.plan`` in this process, by the wall
clock and by the processor, the best of several runs; where other programs keep the cores busy only the latter mean
something, and even they are too long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

import galvatron
from galvatron.core.errors import GalvatronError

CLUSTERS = {"h100-64": 512, "h100-1024": 8192}
"""Each with the batch that is asked for beside the best one."""
RESULTS = Path(__file__).parent / "results" / "moe_search.json"
_TOKENS = 4096
_ELEMENT = 4
"""Bytes: figures in a file are those of fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that a model with experts is made of."""

    name: str
    hidden: int
    layers: int
    dense_layers: int = 0
    """Of these, the first ones, without experts."""
    dense_width: int = 0
    experts: int
    experts_of_token: int
    expert_width: int
    shared_width: int = 0
    """Of the expert that every token uses."""
    vocabulary: int
    heads: int
    kv_heads: int
    head_width: int
    attention: int
    """Parameters of a layer's attention."""

    @property
    def text(self) -> str:
        """The model as a file."""
        dense = self._block("dense", self.dense_layers, self.dense_width) if self.dense_layers else ""
        sparse = self._block("sparse", self.layers - self.dense_layers, self.shared_width) + self._experts()
        return f'name = "{self.name}"\n{self._embedding()}{dense}{sparse}{self._head()}'

    def _embedding(self) -> str:
        return _table(
            name="embedding",
            parameters=self.vocabulary * self.hidden,
            forward_flops=0,
            activation_bytes=8 * _TOKENS,
            boundary_bytes=_size(self.hidden),
            tensor_parallel={"forward_collectives": 1, "backward_collectives": 0},
        )

    def _block(self, name: str, count: int, width: int) -> str:
        sparse = name == "sparse"
        router = self.hidden * self.experts * sparse
        used = self.experts_of_token * self.expert_width * sparse
        always = self.attention + 3 * self.hidden * width + router
        heads = self.heads * self.head_width
        return _table(
            name=name,
            count=count,
            parameters=always + 2 * self.hidden + 3 * self.hidden * self.experts * self.expert_width * sparse,
            replicated_parameters=2 * self.hidden + router,
            forward_flops=2 * _TOKENS * (always + 3 * self.hidden * used) + 2 * _TOKENS * _TOKENS * heads,
            split_activation_bytes=_size(2 * heads + 2 * self.kv_heads * self.head_width + 3 * (width + used)),
            replicated_activation_bytes=_size((4 + 2 * self.experts_of_token * sparse) * self.hidden),
            boundary_bytes=_size(self.hidden),
            transient_bytes=_size(max(4 * self.hidden, 3 * width, 2 * used)),
            tensor_parallel={"heads": self.heads, "kv_heads": self.kv_heads, "sequence_length": _TOKENS},
        )

    def _experts(self) -> str:
        used = self.experts_of_token * self.expert_width
        alone = 0 if self.shared_width else 1
        return "\n[layers.experts]\n" + _lines(
            count=self.experts,
            parameters=3 * self.hidden * self.experts * self.expert_width,
            forward_flops=2 * _TOKENS * 3 * self.hidden * used,
            activation_bytes=_size(3 * used),
            replicated_activation_bytes=_size(2 * self.experts_of_token * self.hidden),
            dispatch_bytes=_size(self.experts_of_token * self.hidden),
            divides=[self.expert_width],
            forward_collectives=alone,
            backward_collectives=alone,
            imbalance=1.1,
        )

    def _head(self) -> str:
        return _table(
            name="head",
            parameters=self.vocabulary * self.hidden,
            forward_flops=2 * _TOKENS * self.vocabulary * self.hidden,
            split_activation_bytes=_size(self.vocabulary),
            replicated_activation_bytes=_size(2 * self.hidden),
            boundary_bytes=_size(1),
            transient_bytes=_size(self.vocabulary),
            tensor_parallel={"forward_collectives": 0, "backward_collectives": 1, "message_bytes": _size(self.hidden)},
        )


MODELS = (
    Shape(
        name="mixtral-8x7b", hidden=4096, layers=32, experts=8, experts_of_token=2, expert_width=14336,
        vocabulary=32000, heads=32, kv_heads=8, head_width=128, attention=2 * 4096 * (4096 + 1024),
    ),
    Shape(
        name="qwen3-30b-a3b", hidden=2048, layers=48, experts=128, experts_of_token=8, expert_width=768,
        vocabulary=151936, heads=32, kv_heads=4, head_width=128, attention=2 * 2048 * (4096 + 512),
    ),
    Shape(
        name="deepseek-v3", hidden=7168, layers=61, dense_layers=3, dense_width=18432, experts=256, experts_of_token=8,
        expert_width=2048, shared_width=2048, vocabulary=129280, heads=128, kv_heads=128, head_width=192,
        attention=7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168,
    ),
)  # fmt: skip
"""From their configurations on Hugging Face."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one cluster."""

    model: str
    cluster: str
    batch: int | None
    """None: the best one."""
    wall_s: float
    processor_s: float
    outcome: str
    """Throughput, and the strategies of the layers with experts; or why there is no plan."""


def _size(elements: int) -> int:
    """Bytes of so many elements for each token of a sample."""
    return _ELEMENT * _TOKENS * elements


def _table(**values: object) -> str:
    return "\n[[layers]]\n" + _lines(**values)


def _lines(**values: object) -> str:
    return "".join(f"{key} = {_written(value)}\n" for key, value in values.items())


def _written(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {part}" for key, part in value.items()) + " }"
    return json.dumps(value)


def timed(shape: Shape, cluster: str, batch: int | None, times: int, folder: Path) -> Row:
    """The best of several runs."""
    path = folder / f"{shape.name}.toml"
    path.write_text(shape.text, encoding="utf-8")
    runs = []
    for _ in range(times):
        wall, processor = time.perf_counter(), time.process_time()
        try:
            plan = galvatron.plan(path, cluster, batch=batch)
            layers = [layer for stage in plan.stages for layer in stage.layers if layer.layer == "sparse"]
            outcome = f"{plan.throughput:.1f} samples/s, {', '.join(sorted({layer.strategy for layer in layers}))}"
        except GalvatronError as error:
            outcome = str(error).splitlines()[0]
        runs.append((time.perf_counter() - wall, time.process_time() - processor, outcome))
    wall, processor, outcome = min(runs, key=lambda run: run[1])
    return Row(shape.name, cluster, batch, round(wall, 2), round(processor, 2), outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="runs of which the best counts")
    times = parser.parse_args().times
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        galvatron.plan("bert-base", "titan-rtx-8", batch=8)  # imports are done
        for (cluster, fixed), shape in product(CLUSTERS.items(), MODELS):
            for batch in (None, fixed):
                row = timed(shape, cluster, batch, times, Path(folder))
                rows.append(row)
                seconds = f"{row.wall_s:>6.2f} s, of the processor {row.processor_s:>6.2f} s"
                print(f"{row.model:<14} {row.cluster:<10} {batch or 'best':>6} {seconds}", flush=True)
                print(f"{'':<26}{row.outcome}")
    results = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[1], 1)},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
