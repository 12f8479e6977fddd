"""What the runtime costs: our pure plans beside PyTorch's own programs for the same thing, in one run.

    python benchmarks/overhead.py [--layers 8] [--rounds 3] [--only dp,sdp,tp,pp,one] [--output results.json]

On a machine with a GPU, 8 ranks share it (``galvatron.processes.virtual``); without one, 8 CPU processes with gloo
run a tiny model, which shows only that everything works. Pairs run in turns (ours, stock, ours, stock …), each time
built anew.
    dp   DistributedDataParallel          sdp  FSDP2, one unit a layer     tp  DTensor ``parallelize_module``
    pp   ``torch.distributed.pipelining`` GPipe    one  the bare model in bf16 on the whole GPU
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from galvatron.core.errors import GalvatronError
from galvatron.processes.virtual import virtual_gpus
from launching import launch
from sizes import Size, Step

RANKS = 8


@dataclass(kw_only=True)
class Measured:
    """One system in one round, on one rank."""

    iteration_s: float
    peak_bytes: int


def main() -> None:
    arguments = _arguments()
    if "RANK" in os.environ:
        _rank(arguments)
        return
    import torch

    gpu = torch.cuda.is_available()
    forwarded = sys.argv[1:]
    status = 0
    if gpu and "one" in arguments.only:
        status |= launch(Path(__file__), [*forwarded, "--only", "one"], 1, 300)
    pairs = [pair for pair in arguments.only if pair != "one"]
    with virtual_gpus(RANKS if gpu and pairs else None):
        for pair in pairs:
            status |= launch(Path(__file__), [*forwarded, "--only", pair], RANKS, 180 if gpu else 300)
    sys.exit(status)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="one,dp,sdp,tp,pp")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    return arguments


def _rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from galvatron.processes.world import join
    from overhead_systems import PAIRS

    gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    join()
    for name in arguments.only:
        size = Size(hidden=1280, layers=arguments.layers, heads=16, length=512, batch=8)
        if name == "one":
            size = replace(size, layers=4 * arguments.layers, batch=32)
        if not gpu:
            size = Size(hidden=64, layers=8, heads=8, length=32, batch=8, vocabulary=1000)
        results: dict[str, list[Measured]] = {}
        for _ in range(arguments.rounds):
            for system, build in PAIRS[name].items():
                results.setdefault(system, []).append(_measure(build, size, arguments.steps, gpu=gpu))
        _report(name, size, results, arguments.output)
    dist.destroy_process_group()


def _measure(build: Callable[[Size], Step], size: Size, steps: int, *, gpu: bool) -> Measured:
    import torch
    import torch.distributed as dist

    step = build(size)
    step()
    step()
    times = []
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    del step
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return Measured(iteration_s=statistics.median(times), peak_bytes=peak)


def _report(name: str, size: Size, results: dict[str, list[Measured]], output: Path | None) -> None:
    """Rank 0 prints the slowest rank's time and the fullest rank's memory, and appends them to the output."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {system: [asdict(one) for one in many] for system, many in results.items()})
    if dist.get_rank() != 0:
        return
    lines: dict[str, Any] = {"pair": name, "size": asdict(size), "ranks": len(everyone)}
    for system in results:
        rounds = [max(rank[system][i]["iteration_s"] for rank in everyone) for i in range(len(results[system]))]
        peak = max(one["peak_bytes"] for rank in everyone for one in rank[system])
        seconds = statistics.median(rounds)
        rate = size.batch / seconds
        lines[system] = {"iteration_s": seconds, "rounds_s": rounds, "samples_per_s": rate, "peak_bytes": peak}
        print(
            f"{name:4} {system:12} {rate:8.2f} samples/s  iteration {seconds:.4f} s "
            f"(rounds {', '.join(f'{one:.4f}' for one in rounds)})  peak {peak / 2**30:.3f} GiB",
            flush=True,
        )
    ours, *others = results
    for other in others:
        ratio = lines[other]["iteration_s"] / lines[ours]["iteration_s"]
        print(f"{name:4} throughput of ours over {other}: {ratio:.3f}", flush=True)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except GalvatronError as error:
        sys.exit(f"error: {error}")
