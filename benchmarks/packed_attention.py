"""Packed documents: attention document by document (FlexAttention) beside a mask, our runtime on one device.

    python benchmarks/packed_attention.py [--tokens 8192] [--documents 16] [--out results/packed_attention.jsonl]

One line of JSON for each way and type. In fp32 both start from the same weights: the first loss and the gradient's norm
of each step are compared, and ``equal`` says whether they agree. In bf16 both are timed. On a machine without a GPU a
tiny model runs in fp32 with the mask alone, for FlexAttention has no backward there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import galvatron
from galvatron.core.spec import Precision, Training
from galvatron.families import load_cluster
from galvatron.families.build import build_meta
from galvatron.families.documents import why_by_mask
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

_MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "vocab_size": 32000, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
}  # fmt: skip
_WARM, _TIMED, _RATE = 4, 10, 1e-4


def packed_batch(rows: int, tokens: int, documents: int, words: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows of so many documents each, of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(words, (rows, tokens), generator=generator)
    positions = torch.empty_like(ids)
    for row in positions:
        ends = torch.randperm(tokens - 1, generator=generator)[: documents - 1].sort().values + 1
        lengths = torch.diff(ends, prepend=torch.tensor([0]), append=torch.tensor([tokens]))
        row.copy_(torch.cat([torch.arange(int(length)) for length in lengths]))
    return {"input_ids": ids, "labels": torch.where(positions == 0, -100, ids), "position_ids": positions}


def run(way: str, precision: Precision, asked: argparse.Namespace) -> dict[str, Any]:
    """One way in one type."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    config = _MODELS[asked.model or ("llama" if cuda else "tiny")]
    training = Training(precision=precision, sequence_length=asked.tokens, compile=asked.compile, dropout=False)
    spec = load_any_model(config, training)
    cluster = replace(load_cluster("h200-8"), name="one", levels=())
    plan = priced(Request(model=spec, cluster=cluster, batch=asked.rows), [["single"] * len(spec.layers)])
    model = galvatron.parallelize(None, plan, device=device, documents=way == "flex", check=False)
    optimizer = model.optimizer(lr=_RATE)
    losses, norms, seconds = [], [], []
    for step in range(_WARM + _TIMED):
        batch = packed_batch(asked.rows, asked.tokens, asked.documents, config["vocab_size"], seed=step)
        batch = {name: own.to(device) for name, own in batch.items()}
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model.forward_backward(batch)
        norms.append(float(model.clip_gradients(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {
        "way": way,
        "precision": str(precision),
        "model": asked.model or ("llama" if cuda else "tiny"),
        "rows": asked.rows,
        "tokens": asked.tokens,
        "documents": asked.documents,
        "compiled": asked.compile,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "tokens_per_s": asked.rows * asked.tokens / statistics.median(seconds[_WARM:]),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "losses": losses,
        "gradient_norms": norms,
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the first steps of two runs agree as fp32 does; later ones drift apart."""
    pairs = [(one[name][step], other[name][step]) for name in ("losses", "gradient_norms") for step in range(3)]
    return all(abs(a - b) <= 1e-3 * abs(b) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=None, help="Of a row (default 8192, on a CPU 256).")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--documents", type=int, default=16, help="Of a row.")
    parser.add_argument("--model", choices=sorted(_MODELS), default=None)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--precisions", default="fp32,bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--out", type=Path, default=None, help="Append lines to this file too.")
    asked = parser.parse_args()
    cuda = torch.cuda.is_available()
    asked.tokens = asked.tokens or (8192 if cuda else 256)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    config = _MODELS[asked.model or ("llama" if cuda else "tiny")]
    training = Training(dropout=False)
    reason = why_by_mask(build_meta(config, training), training) if cuda else "FlexAttention has no backward on CPUs"
    ways = ("mask",) if reason else ("mask", "flex")
    for precision in map(Precision, asked.precisions.split(",")):
        lines = []
        for way in ways:
            lines.append(run(way, precision, asked))
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        if precision is Precision.FP32 and len(lines) > 1:
            lines[-1]["equal"] = equal(lines[1], lines[0])
        if reason:
            lines[-1]["flex"] = reason
        for line in lines:
            print(json.dumps(line), flush=True)
            if asked.out is not None:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
