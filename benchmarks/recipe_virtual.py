"""Today's recipe on eight virtual GPUs: FSDP2 on the stock model, compiled, with and without recompute, batch by batch.

    python benchmarks/recipe_virtual.py --memory 16GB --reserved 1400MB --out results/recipe_virtual.jsonl

The programs beside which ``benchmarks/recipe_train.py --cases virtual-64,virtual-best`` stands, in the same boot: the
same Llama, tokens and memory of a device. Batches grow, in one set of processes, until one does not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from galvatron.core.units import parse_bytes
from launching import ask, tell
from recipe import MODELS, stock_model

_DEVICES = 8
_TOKENS = 1024
_WARM, _TIMED = 2, 4


def _rank(spec: dict[str, Any]) -> None:
    """One rank of one program."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from galvatron.processes.world import cap_memory, join, own_device

    join(in_turn=True)
    device, rank = own_device(), dist.get_rank()
    cap_memory(device, spec["tensor_bytes"])
    config = MODELS[spec["model"]]
    with torch.device("meta"):
        model = stock_model(config, torch.device("meta"), torch.float32)
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False  # each batch is compiled for itself
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.model.layers
    for index, block in enumerate(layers):
        made = checkpoint_wrapper(block) if spec["recompute"] else block
        layers[index] = made
        made.compile()
        fully_shard(made, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    def step(ids: Any) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for batch in spec["batches"]:
        generator = torch.Generator().manual_seed(rank)
        shape = (batch // dist.get_world_size(), spec["tokens"])
        ids = torch.randint(config["vocab_size"], shape, generator=generator).to(device)
        seconds = []
        for _ in range(_WARM + spec["timed"]):
            dist.barrier()
            begin = time.perf_counter()
            step(ids)
            wait()
            seconds.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        worst = torch.tensor([statistics.median(seconds[_WARM:]), float(peak)], dtype=torch.float64, device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        iteration_s, fullest = worst.tolist()
        rate = batch * spec["tokens"] / iteration_s
        if rank == 0:
            tell(spec, {"batch": batch, "iteration_s": iteration_s, "tokens_per_s": rate, "peak_gb": fullest / 1e9})
    dist.barrier()
    os._exit(0)  # NCCL's threads may not end


def _ours(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """``galvatron train`` of the plan that a profile of this machine gave for 64 samples, without profiling again."""
    from galvatron.core.spec import Device, Level, Precision, Training
    from galvatron.families import load_cluster
    from galvatron.measure.models import load_any_model
    from galvatron.planner.plan.by_hand import priced
    from galvatron.planner.plan.planner import Request

    whole = load_cluster("h200-8")
    device: Device = replace(
        whole.device, name="eighth", memory_bytes=parse_bytes(args.memory), compiles=True,
        memory_bytes_per_s=whole.device.memory_bytes_per_s / 8, bf16_flops_per_s=70e12, traffic=None,
        compiled_traffic=None,
    )  # fmt: skip
    level: Level = replace(whole.levels[0], bytes_per_s=2e9, latency_s=50e-6)
    cluster = replace(whole, name="virtual", device=device, levels=(level,), reserved_bytes=parse_bytes(args.reserved))
    training = Training(precision=Precision.BF16, sequence_length=args.tokens, compile=True, dropout=False)
    spec = load_any_model(MODELS[args.model], training)
    stages = [["tp2", *["dp2"] * 5], ["dp2"] * 6, ["dp2"] * 5, ["tp2"]]
    plan = priced(Request(model=spec, cluster=cluster, batch=64), stages, micro_batches=16)
    plan.save(folder / "plan.json")
    out = folder / "run"
    command = ["train", str(folder / "plan.json"), "--virtual", "8", "--steps", "8", "--out", str(out)]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "galvatron", *command], check=False, timeout=args.timeout)
    found = {"program": "ours", "status": done.returncode, "seconds": time.perf_counter() - begin}
    report = out / "report.json"
    if report.exists():
        made = json.loads(report.read_text(encoding="utf-8"))
        found |= {
            "tokens_per_s": made["samples_per_s"] * args.tokens,
            "iteration_s": made["measured_s"],
            "report": made,
        }
    return found


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        _rank(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama")
    parser.add_argument("--devices", type=int, default=_DEVICES)
    parser.add_argument("--tokens", type=int, default=_TOKENS)
    parser.add_argument("--memory", default="16GB")
    parser.add_argument(
        "--reserved", default="1400MB", help="of it, what is no tensor's: contexts, NCCL, the allocator"
    )
    parser.add_argument("--batches", default="8,16,32,64,128")
    parser.add_argument("--recompute-batches", help="with recompute; default: the same")
    parser.add_argument("--timed", type=int, default=_TIMED, help="steps that count, after two that do not")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for all batches of a program")
    parser.add_argument("--ours", action="store_true", help="first the plan that our planner found here, by hand")
    parser.add_argument("--out", default="benchmarks/results/recipe_virtual.jsonl")
    args = parser.parse_args()
    import torch

    from galvatron.processes.virtual import virtual_gpus

    tensors = parse_bytes(args.memory) - parse_bytes(args.reserved)
    if args.ours:
        with tempfile.TemporaryDirectory() as name, Path(args.out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_ours(args, Path(name))) + "\n")
    with virtual_gpus(args.devices if torch.cuda.is_available() else None):
        for recompute, batches in ((False, args.batches), (True, args.recompute_batches or args.batches)):
            spec = {
                "model": args.model, "tokens": args.tokens, "recompute": recompute, "tensor_bytes": tensors,
                "devices": args.devices, "timed": args.timed, "batches": [int(batch) for batch in batches.split(",")],
            }  # fmt: skip
            told, status = ask(Path(__file__), spec, args.timeout)
            if len(told) < len(spec["batches"]):
                told.append({"batch": spec["batches"][len(told)], "status": status})
            shown = {key: spec[key] for key in ("model", "tokens", "recompute", "tensor_bytes", "devices")}
            with Path(args.out).open("a", encoding="utf-8") as file:
                for found in told:
                    file.write(json.dumps(shown | found) + "\n")
                    print(shown | found, flush=True)


if __name__ == "__main__":
    main()
