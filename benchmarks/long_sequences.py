"""The longest sequence on N virtual GPUs: ours with sequences divided, beside stock programs, length by length.

    python benchmarks/long_sequences.py --memory 16GB --lengths 8192,16384,32768,65536 --out results/long.jsonl
    python benchmarks/long_sequences.py --programs ours --strategies ring8+zero3+rc,ulysses8+zero3+rc

Programs: ``ours`` trains one sample under each of the strategies; ``fsdp2`` is stock FSDP2 with recompute, a sample on
each device, because it cannot divide one; ``torch-cp`` is the same with PyTorch's own ``context_parallel`` over all
devices, one sample. All have bf16 over fp32 masters, fused AdamW, clipping to 1, and the loss in chunks, without which
the logits of a long sequence would be all that counts. Of each program and strategy lengths grow, in one set of
processes, until one fails. Results are JSON lines: ``tokens_per_s`` of all devices, ``peak_gb`` of the fullest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from galvatron.core.units import parse_bytes
from launching import ask, tell
from recipe import MODELS, stock_model

_CHUNK = 2048
"""Tokens of a chunk of the stock programs' loss."""
_RATE = 1e-4


def _plan(spec: dict[str, Any]) -> Any:
    """One sample, all layers under one strategy; the head computes its loss in chunks."""
    from galvatron.core.spec import Precision, Strategy, Training
    from galvatron.families import load_cluster
    from galvatron.measure.models import load_any_model
    from galvatron.planner.plan.by_hand import priced
    from galvatron.planner.plan.planner import Request

    whole = load_cluster("h200-8")
    count = spec["devices"]
    device = replace(
        whole.device, name="part", memory_bytes=spec["memory_bytes"], compiles=True,
        memory_bytes_per_s=whole.device.memory_bytes_per_s / count,
    )  # fmt: skip
    level = replace(whole.levels[0], units=count, bytes_per_s=2e9, latency_s=50e-6)
    cluster = replace(whole, name="virtual", device=device, levels=(level,), reserved_bytes=spec["reserved_bytes"])
    precision = Precision.BF16 if spec["narrow"] else Precision.FP32
    training = Training(precision=precision, sequence_length=spec["tokens"], compile=spec["compile"], dropout=False)
    model = load_any_model(MODELS[spec["model"]], training)
    block = Strategy.parse(spec["strategy"])
    around = replace(
        block, sequence_parallel=False, recompute=False, selective_recompute=False, recompute_but_attention=False,
        offload=False,
    )  # fmt: skip
    strategies = [str(own) for own in (around, *[block] * (len(model.layers) - 2), replace(around, fused_loss=True))]
    return priced(Request(model=model, cluster=cluster, batch=1), [strategies])


def _ours(spec: dict[str, Any], device: Any) -> tuple[Callable[[], float], dict[str, Any]]:
    import torch

    import galvatron

    plan = _plan(spec)
    model = galvatron.parallelize(None, plan, check=False, device=device)
    optimizer = model.optimizer(lr=_RATE)
    ids = _ids(spec, 0)

    def step() -> float:
        loss = model.forward_backward({"input_ids": ids, "labels": ids})
        model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    del torch
    return step, {"predicted_s": plan.iteration_s, "predicted_gb": plan.memory_bytes / 1e9}


def _ids(spec: dict[str, Any], seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    words = MODELS[spec["model"]]["vocab_size"]
    return torch.randint(words, (1, spec["tokens"]), generator=generator)


def _with_loss(model: Any) -> Any:
    """The stock model with its loss in recomputed chunks, as one module that FSDP2 can wrap."""
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    def chunk(hidden: Any, weight: Any, targets: Any) -> Any:
        logits = functional.linear(hidden, weight).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")

    class Trained(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stock = model

        def forward(self, ids: Any, positions: Any, targets: Any) -> Any:
            hidden = self.stock.model(input_ids=ids, position_ids=positions).last_hidden_state
            weight = self.stock.lm_head.weight
            parts = zip(hidden.split(_CHUNK, 1), targets.split(_CHUNK, 1), strict=True)
            losses = [checkpoint(chunk, own, weight, wanted, use_reentrant=False) for own, wanted in parts]
            return torch.stack(losses).sum()

    return Trained()


def _stock(spec: dict[str, Any], device: Any) -> tuple[Callable[[], float], dict[str, Any]]:
    """FSDP2 with recompute; with PyTorch's context parallelism a sample is divided over all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import AttentionInterface

    divides, count, rank = spec["program"] == "torch-cp", dist.get_world_size(), dist.get_rank()

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **asked: Any) -> tuple[Any, None]:
        """Without the mask that transformers makes of positions which are not consecutive; heads as the kernel under
        ``context_parallel`` takes them."""
        shared = query.shape[1] // key.shape[1]
        key, value = (own.repeat_interleave(shared, 1) for own in (key, value))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=asked["scaling"])
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register("causal_without_mask", attention)
    with torch.device("meta"):
        stock = stock_model(MODELS[spec["model"]], torch.device("meta"), torch.float32)
    stock.set_attn_implementation("causal_without_mask")
    narrow = torch.bfloat16 if spec["narrow"] else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (count,), mesh_dim_names=("ranks",))
    layers = stock.model.layers
    for index, block in enumerate(layers):
        layers[index] = checkpoint_wrapper(block)
        if spec["compile"] and not divides:
            layers[index].compile()
        fully_shard(layers[index], mesh=mesh, mp_policy=policy)
    model = _with_loss(stock)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(0)
    stock.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)
    whole = _ids(spec, 0 if divides else rank).to(device)
    samples = 1 if divides else count

    def batch() -> tuple[Any, Any, Any]:
        positions = torch.arange(spec["tokens"], device=device)[None]
        targets = functional.pad(whole, (0, 1), value=-100)[:, 1:]
        return whole.clone(), positions.clone(), targets.clone()

    def passes(ids: Any, positions: Any, targets: Any) -> Any:
        # FSDP2 divides gradients by the number of ranks; the loss is a sum over all targets.
        loss = model(ids, positions, targets) * count / (samples * (spec["tokens"] - 1))
        torch.autograd.backward(loss)
        return loss.detach() / count

    def step() -> float:
        own = batch()
        if divides:
            from torch.distributed.tensor.experimental import context_parallel

            with (
                sdpa_kernel(SDPBackend.FLASH_ATTENTION),
                context_parallel(mesh, buffers=list(own), buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(own)),
            ):
                loss = passes(*own)
        else:
            loss = passes(*own)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        return float(loss)

    return step, {}


def _rank(spec: dict[str, Any]) -> None:
    """One rank of one program: length after length."""
    import torch
    import torch.distributed as dist

    from galvatron.processes.world import cap_memory, join, own_device

    join(in_turn=True)
    device = own_device()
    cap_memory(device, spec["memory_bytes"] - spec["reserved_bytes"])
    spec["narrow"] = device.type == "cuda"
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    for tokens in spec["lengths"]:
        found = _timed({**spec, "tokens": tokens}, device)
        if dist.get_rank() == 0:
            tell(spec, found)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    os._exit(0)  # NCCL's threads may not end


def _timed(spec: dict[str, Any], device: Any) -> dict[str, Any]:
    """One length, from a new model on."""
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    step, found = (_ours if spec["program"] == "ours" else _stock)(spec, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for _ in range(spec["warm"] + spec["timed"]):
        dist.barrier()
        begin = time.perf_counter()
        losses.append(step())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    worst = torch.tensor([statistics.median(seconds[spec["warm"] :]), float(peak)], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    iteration_s, fullest = worst.tolist()
    samples = spec["devices"] if spec["program"] == "fsdp2" else 1
    return found | {
        "tokens": spec["tokens"], "iteration_s": iteration_s, "tokens_per_s": samples * spec["tokens"] / iteration_s,
        "peak_gb": fullest / 1e9, "losses": [losses[0], losses[-1]], "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        _rank(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama", choices=list(MODELS))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--memory", default="16GB")
    parser.add_argument(
        "--reserved", default="1400MB", help="of it, what is no tensor's: contexts, NCCL, the allocator"
    )
    parser.add_argument("--lengths", default="8192,16384,32768,65536,131072,262144")
    parser.add_argument("--programs", default="ours,fsdp2,torch-cp")
    parser.add_argument(
        "--strategies", help="of ours; default: ring, Ulysses and a mixture, all with ZeRO-3, recompute"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile blocks, but those under torch's context_parallel"
    )
    parser.add_argument("--warm", type=int, default=1, help="steps that do not count, before those that do")
    parser.add_argument("--timed", type=int, default=3, help="steps that count")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one program under one strategy")
    parser.add_argument("--out", default="benchmarks/results/long_sequences.jsonl")
    args = parser.parse_args()
    import torch

    from galvatron.processes.virtual import virtual_gpus

    count = args.devices
    mixture = [f"ring{count // 2}-ulysses2+zero3+rc"] if count % 2 == 0 and count > 2 else []
    strategies = [f"ring{count}+zero3+rc", f"ulysses{count}+zero3+rc", *mixture]
    strategies = args.strategies.split(",") if args.strategies else strategies
    runs = [
        (program, strategy)
        for program in args.programs.split(",")
        for strategy in (strategies if program == "ours" else [""])
    ]
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with virtual_gpus(count if torch.cuda.is_available() else None):
        for program, strategy in runs:
            spec = {
                "program": program, "strategy": strategy, "model": args.model, "devices": count,
                "memory_bytes": parse_bytes(args.memory), "reserved_bytes": parse_bytes(args.reserved),
                "compile": args.compile, "warm": args.warm, "timed": args.timed,
                "lengths": [*map(int, args.lengths.split(","))],
            }  # fmt: skip
            shown = {
                key: spec[key] for key in ("program", "strategy", "model", "devices", "memory_bytes", "compile", "warm")
            }
            told, status = ask(Path(__file__), spec, args.timeout)
            if len(told) < len(spec["lengths"]):
                told.append({"tokens": spec["lengths"][len(told)], "status": status})
            with out.open("a", encoding="utf-8") as file:
                for found in told:
                    file.write(json.dumps(shown | found) + "\n")
                    print(shown | found, flush=True)


if __name__ == "__main__":
    main()
