"""What each grade of recompute takes on one device: time and peak memory of a Llama, beside what is predicted.

    python benchmarks/recompute_grades.py --out results/recompute_grades.jsonl         # a Llama of 1.2B, on a GPU
    python benchmarks/recompute_grades.py --profile --tokens 8192 --batch 2 --out …     # predicted from measured layers
    python benchmarks/recompute_grades.py --tiny --no-compile --tokens 64 --batch 4     # on a processor, as a test

Each grade is that of all blocks, in a process of its own, in turns: one line of JSON for each. "none" keeps all.
Without ``--profile`` layers are priced by counts, which know nothing of compiled blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

_GRADES = ("none", "rs", "ra", "rc", "host")
_WARM, _TIMED = 4, 8


def _config(args: argparse.Namespace) -> dict[str, Any]:
    sizes = (64, 2, 4, 128, 512) if args.tiny else (args.hidden, args.layers, args.heads, args.inner, args.vocabulary)
    hidden, layers, heads, inner, vocabulary = sizes
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads if args.tiny else max(heads // 4, 1),
        "intermediate_size": inner, "vocab_size": vocabulary, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def _request(args: argparse.Namespace, *, cuda: bool) -> Any:
    from galvatron.core.files.profiles import load_profile
    from galvatron.core.spec import Precision, Training
    from galvatron.families import load_cluster
    from galvatron.measure.models import load_any_model
    from galvatron.planner.plan.planner import Request

    precision = Precision.BF16 if cuda else Precision.FP32
    training = Training(precision=precision, sequence_length=args.tokens, compile=args.compile, dropout=False)
    cluster = replace(load_cluster(args.cluster if cuda else "cpu-4"), name="one", levels=(), compute_contention=1.0)
    device = replace(cluster.device, host_bytes_per_s=args.host_bandwidth * 1e9, host_memory_bytes=10**12)
    profile = load_profile(args.profiled) if args.profiled else None
    spec = load_any_model(_config(args), training)
    cluster = replace(cluster, device=device)
    return Request(model=spec, cluster=cluster, batch=args.batch, profile=profile)


def _one(args: argparse.Namespace, grade: str) -> dict[str, Any]:
    """One grade, in this process."""
    import torch
    import torch.distributed as dist

    import galvatron
    from galvatron.planner.plan.by_hand import priced
    from galvatron.runtime.compiled import compiler

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=1, device_id=device if cuda else None)
    request = _request(args, cuda=cuda)
    last = "single+fl" if args.fused_loss else "single"
    blocks = ["single" if grade == "none" else f"single+{grade}"] * (len(request.model.layers) - 2)
    plan = priced(request, [["single", *blocks, last]])
    model = galvatron.parallelize(None, plan, check=False, device=device)
    optimizer = model.optimizer(lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    shape = (args.batch, args.tokens)
    ids = torch.randint(_config(args)["vocab_size"], shape, generator=generator).to(device)
    seconds, losses = [], []
    for number in range(_WARM + _TIMED):
        if number == _WARM and cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(float(model.forward_backward({"input_ids": ids, "labels": ids})))
        model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    (stage,) = plan.stages
    found = {
        "grade": grade, "batch": args.batch, "tokens": args.tokens, "compile": args.compile, "config": _config(args),
        "step_s": statistics.median(seconds[_WARM:]), "predicted_s": plan.iteration_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "predicted_bytes": plan.memory_bytes - stage.memory.reserved, "profiled": bool(args.profiled),
        "predicted_activation_bytes": stage.memory.activations, "losses": [losses[0], losses[-1]],
        "graphs": compiler().graphs, "not_compiled": compiler().failures,
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
    }  # fmt: skip
    dist.destroy_process_group()
    return found


def _profile(args: argparse.Namespace, path: Path) -> None:
    """Measure the layers, for predictions."""
    import torch

    from galvatron.core.files.profiles import dump_profile
    from galvatron.measure.layers import Effort, profile_model

    request = _request(args, cuda=torch.cuda.is_available())
    path.write_text(
        dump_profile(profile_model(request.model, request.cluster, effort=Effort(rounds=3))), encoding="utf-8"
    )


def _run(args: argparse.Namespace, given: list[str]) -> None:
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    passed = [part for part in given if part != "--profile"]
    if args.profile:
        profiled = out.with_suffix(".profile.toml")
        subprocess.run([sys.executable, __file__, *passed, "--write-profile", str(profiled)], check=True)
        passed += ["--profiled", str(profiled)]
    for repeat in range(args.repeats):
        for grade in args.grades.split(","):
            command = [sys.executable, __file__, *passed, "--one", grade]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            told = done.stderr.strip().splitlines()
            found = json.loads(lines[-1]) if lines else {"grade": grade, "error": told[-3:]}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found | {"repeat": repeat}) + "\n")
            shown = ("step_s", "predicted_s", "peak_bytes", "predicted_bytes", "losses", "error")
            print(grade, *(f"{name} {found[name]}" for name in shown if name in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/recompute_grades.jsonl")
    parser.add_argument("--grades", default=",".join(_GRADES), help="of %(default)s")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a Llama of next to no size")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fused-loss", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cluster", default="h200-8", help="whose device it is, for predictions")
    parser.add_argument("--host-bandwidth", type=float, default=48.0, help="GB/s between device and host")
    parser.add_argument("--profile", action="store_true", help="measure the layers first, and predict from that")
    parser.add_argument("--repeats", type=int, default=1)
    for hidden in ("--one", "--profiled", "--write-profile"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(_one(args, args.one)))
    elif args.write_profile:
        _profile(args, Path(args.write_profile))
    else:
        _run(args, sys.argv[1:])


if __name__ == "__main__":
    main()
