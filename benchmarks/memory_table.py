"""Does memory hold? Each plan's predicted peak beside what a rank really allocates, byte by byte, on the CPU.

    python benchmarks/memory_table.py            prints the table, writes benchmarks/results/memory_table.json
    python benchmarks/memory_table.py NAME …     prints these cases only

Every family and every kind of strategy, alone and mixed, with and without a pipeline, on models small enough for a
second a rank. ``tests/measure/rehearsal/test_memory_holds.py`` asserts that all of them are within 5%.

The planner counts what CUDA's kernels keep. Where the CPU has no kernel of that kind (fused attention with a learned
bias: T5, Swin) the case trains with eager attention, for which both keep the same. Two things make a prediction too
high by design, and the cases are chosen so that they stay small: with several micro-batches, but under GPipe, gradients
count as always there, and the largest transient comes on top of all activations (so the layers with the largest ones
are the last, whose backward runs while the others' activations are alive).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from galvatron.core.spec import GPIPE, ONE_F_ONE_B, Attention, Cluster, Precision, Schedule, Strategy, Training
from galvatron.core.units import format_bytes
from galvatron.families import load_cluster, load_model
from galvatron.measure.rehearsal.processes import first_ranks
from galvatron.measure.rehearsal.rehearse import rehearse_rank
from galvatron.measure.rehearsal.results import Rehearsal
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request

__all__ = ["CASES", "Case", "rehearsed"]

RESULTS = Path(__file__).parent / "results" / "memory_table.json"
_LENGTH = 64
_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 128,
    },
    "narrow": {  # for bf16, which some CPUs compute very slowly
        "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 128, "max_position_embeddings": 64,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 128, "n_layer": 6, "n_head": 4, "vocab_size": 512, "n_positions": 128,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 344, "vocab_size": 512, "max_position_embeddings": 128,
    },
    "tied": {  # a Llama whose vocabulary weighs as much as its blocks
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 344, "vocab_size": 8192, "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "t5": {
        "model_type": "t5", "d_model": 128, "d_kv": 32, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4,
        "d_ff": 512, "vocab_size": 512, "n_positions": 128, "decoder_start_token_id": 0, "is_encoder_decoder": True,
        "tie_word_embeddings": True,
    },
    "vit": {
        "model_type": "vit", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "intermediate_size": 512, "image_size": 64, "patch_size": 8, "num_labels": 10,
    },
    "swin": {
        "model_type": "swin", "image_size": 56, "patch_size": 4, "embed_dim": 64, "depths": [2, 4],
        "num_heads": [2, 4], "window_size": 7, "num_labels": 10, "drop_path_rate": 0.0,
    },
}  # fmt: skip
_LAYERS = {"bert": 8, "narrow": 6, "gpt2": 8, "llama": 8, "tied": 8, "t5": 9, "vit": 8, "swin": 9}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan written by hand: the strategy of each layer of each stage."""

    family: str
    stages: tuple[tuple[str, ...], ...]
    batch: int = 16
    micro_batches: int = 2
    schedule: Schedule = ONE_F_ONE_B
    dropout: bool = False
    precision: Precision = Precision.FP32

    def plan(self) -> Plan:
        devices = sum(Strategy.parse(stage[0]).devices for stage in self.stages)
        fused = self.family not in ("t5", "swin")
        training = Training(
            precision=self.precision,
            attention=Attention.FUSED if fused else Attention.EAGER,
            dropout=self.dropout,
            sequence_length=None if self.family in ("vit", "swin") else _LENGTH,
        )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_CONFIGS[self.family]), encoding="utf-8")
            model = load_model(Path(folder), training)
        request = Request(model=model, cluster=_cluster(devices), batch=self.batch, schedule=self.schedule)
        return priced(request, self.stages, micro_batches=self.micro_batches)


def _cluster(devices: int) -> Cluster:
    """A flat one with more memory than any plan needs, all of it for tensors."""
    base = load_cluster("titan-rtx-8")
    device = replace(base.device, bf16_flops_per_s=base.device.fp32_flops_per_s)
    levels = (replace(base.levels[0], units=devices),)
    return replace(base, name="flat", device=device, levels=levels, reserved_bytes=0)


def _uniform(family: str, strategy: str, **options: Any) -> Case:
    """One strategy for all layers; embeddings have no sequence to divide and nothing to gain by recomputing."""
    layers = [strategy] * _LAYERS[family]
    for index in (0, 4) if family == "t5" else (0,):
        layers[index] = strategy.replace("+sp", "").replace("+rc", "")
    return Case(family=family, stages=(tuple(layers),), **options)


def _blocks(family: str, around: str, *blocks: str, **options: Any) -> Case:
    """The first and last layer under one strategy (a tied head should split as its embedding), blocks in turn."""
    inner = [blocks[index % len(blocks)] for index in range(_LAYERS[family] - 2)]
    return Case(family=family, stages=((around, *inner, around),), **options)


def _fused(family: str, strategy: str, **options: Any) -> Case:
    """One strategy for all layers, the last one with its loss in chunks."""
    return Case(family=family, stages=((*[strategy] * (_LAYERS[family] - 1), f"{strategy}+fl"),), **options)


def _apart(family: str, owner: str, head: str, **options: Any) -> Case:
    """The first layer under one strategy, all others under another."""
    return Case(family=family, stages=((owner, *[head] * (_LAYERS[family] - 1)),), **options)


def _stages(family: str, *strategies: str, **options: Any) -> Case:
    """Stages with about as many layers each, one strategy a stage."""
    count, parts = _LAYERS[family], len(strategies)
    cuts = [-(-count * part // parts) for part in range(parts + 1)]
    stages = [(strategy,) * (cuts[part + 1] - cuts[part]) for part, strategy in enumerate(strategies)]
    return Case(family=family, stages=tuple(stages), **{"micro_batches": 4, **options})


_GPIPE = GPIPE
CASES: Mapping[str, Case] = {
    # One strategy
    "bert dp4": _uniform("bert", "dp4", micro_batches=1),
    "bert sdp4": _uniform("bert", "sdp4"),
    "bert tp4": _uniform("bert", "tp4"),
    "bert dp4+zero2": _uniform("bert", "dp4+zero2"),
    "gpt2 sdp4": _uniform("gpt2", "sdp4"),
    "gpt2 tp4+sp": _uniform("gpt2", "tp4+sp"),
    "llama dp2-sdp2": _uniform("llama", "dp2-sdp2"),
    "llama tp4+sp": _uniform("llama", "tp4+sp"),
    "llama sdp16-tp4": _uniform("llama", "sdp16-tp4", batch=128),
    "t5 dp4": _uniform("t5", "dp4", micro_batches=1),
    "t5 sdp2-tp2": _uniform("t5", "sdp2-tp2"),
    "vit dp2-tp2": _uniform("vit", "dp2-tp2"),
    "vit dp4+zero2": _uniform("vit", "dp4+zero2"),
    "swin sdp4": _uniform("swin", "sdp4"),
    "swin dp2-tp2": _uniform("swin", "dp2-tp2"),
    # Recomputed
    "gpt2 dp4+rc": _uniform("gpt2", "dp4+rc"),
    "bert tp4+sp+rc": _uniform("bert", "tp4+sp+rc"),
    "llama sdp4+rc": _uniform("llama", "sdp4+rc"),
    "vit dp4+rc": _uniform("vit", "dp4+rc", micro_batches=1),
    # Mixed
    "bert mixed": _blocks("bert", "dp4", "dp4", "dp2-tp2", "tp2-dp2", "dp4+zero2", "sdp4", "tp4+sp+rc"),
    "gpt2 mixed": _blocks("gpt2", "sdp4", "sdp2-tp2", "tp2-sdp2", "tp4", "dp4", "sdp4", "sdp4+rc"),
    "llama mixed": _blocks("llama", "dp4", "tp4", "tp4+sp", "dp4", "dp2-tp2+sp", "dp2-sdp2", "sdp4"),
    "swin mixed": _blocks("swin", "dp4", "sdp4", "dp2-tp2"),
    # The loss without its logits, where the vocabulary weighs much and tokens are few
    "llama fused loss": _fused("tied", "single", batch=2),
    "llama fused loss tp2": _fused("tied", "tp2", batch=2),
    "llama fused loss dp2": _fused("tied", "dp2", batch=4),
    # A tied head that is split otherwise than its embedding
    "gpt2 tp4 and dp4": _apart("gpt2", "tp4", "dp4"),
    "llama tp2 and sdp4": _apart("tied", "dp2-tp2", "sdp4"),
    # Pipelines
    "bert pp2 1f1b": _stages("bert", "dp2", "dp2"),
    "gpt2 pp2 gpipe": _stages("gpt2", "tp2", "sdp2", schedule=_GPIPE),
    "llama pp4 1f1b": _stages("llama", "dp2", "tp2", "sdp2", "dp2", micro_batches=8, batch=64),
    "t5 pp2 gpipe": _stages("t5", "sdp2", "dp2", schedule=_GPIPE),
    "vit pp2 1f1b": _stages("vit", "sdp2", "tp2"),
    "swin pp2 gpipe": _stages("swin", "dp2", "dp2", schedule=_GPIPE),
    "bert pp4 gpipe": _stages(
        "bert", "single", "single", "single", "single", schedule=_GPIPE, micro_batches=2, batch=8
    ),
    "vit pp2 gpipe": _stages("vit", "sdp2", "tp2", schedule=_GPIPE, micro_batches=2),
    "gpt2 pp2 gpipe zero2": _stages("gpt2", "dp2+zero2", "dp2+zero2", schedule=_GPIPE, micro_batches=2),
    "narrow pp2 gpipe bf16": _stages(
        "narrow", "dp2", "dp2", schedule=_GPIPE, micro_batches=2, batch=8, precision=Precision.BF16
    ),
    # Other ways of training
    "gpt2 dropout": _uniform("gpt2", "dp2-tp2", dropout=True),
    "bert bf16": _uniform("narrow", "dp2-tp2", batch=4, precision=Precision.BF16),
    # Sequences divided over ranks
    "llama ring4": _uniform("llama", "ring4"),
    "llama ring2-tp2+sp": _uniform("llama", "ring2-tp2+sp"),
    "llama sdp2-ulysses2": _uniform("llama", "sdp2-ulysses2"),
    "llama divided mixed": _blocks("llama", "ring2-ulysses2+zero3", "ring4+zero3", "ulysses4+ra", "dp2-ring2+zero2+rc"),
    "llama divided graded": _blocks("llama", "ulysses4", "ulysses4+rs", "ring4+ra", "ulysses4+rs", "ulysses4"),
    # One micro-batch: gradients take the place of activations
    "bert tp4 once": _uniform("bert", "tp4", micro_batches=1),
    "gpt2 tp4 once": _uniform("gpt2", "tp4", micro_batches=1),
    "bert bf16 once": _uniform("narrow", "dp2-tp2", batch=8, micro_batches=1, precision=Precision.BF16),
    "bert bf16 dp4 once": _uniform("narrow", "dp4", batch=16, micro_batches=1, precision=Precision.BF16),
}
"""The table, by name."""


def rehearsed(case: Case) -> Iterator[Rehearsal]:
    """The first rank of each stage."""
    plan = case.plan()
    for rank in first_ranks(plan):
        measured = rehearse_rank(plan, rank, device=torch.device("cpu"), steps=0)
        yield Rehearsal.of(plan, rank, "cpu", measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases (default: all)")
    names = parser.parse_args().names or list(CASES)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'plan':20} {'rank':>4}  {'predicted':>10} {'measured':>10} {'ratio':>6}   of the prediction")
    found = []
    for name in names:
        for each in rehearsed(CASES[name]):
            use = each.planned.memory
            found.append(_row(name, each))
            print(
                f"{name:20} {each.rank:4}  {format_bytes(each.predicted_bytes):>10} "
                f"{format_bytes(each.measured.peak_bytes):>10} {each.memory_ratio:6.3f}   "
                f"states {format_bytes(use.states)} (found {format_bytes(each.measured.state_bytes)}), "
                f"activations {format_bytes(use.activations)}, transient {format_bytes(use.transient)}",
                flush=True,
            )
    if names == list(CASES):
        facts = {"torch": torch.__version__, "device": "cpu", "unit": "bytes", "ranks": found}
        RESULTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _row(name: str, found: Rehearsal) -> dict[str, Any]:
    return {
        "plan": name,
        "rank": found.rank,
        "predicted": found.predicted_bytes,
        "measured": found.measured.peak_bytes,
        "predicted_over_measured": round(found.memory_ratio, 4),
        "predicted_states": found.planned.memory.states,
        "measured_states": found.measured.state_bytes,
        "predicted_activations": found.planned.memory.activations,
        "predicted_transient": found.planned.memory.transient,
    }


if __name__ == "__main__":
    main()
