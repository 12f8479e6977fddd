"""What messages and kernels take beside each other, on N virtual GPUs or CPU processes: are links shared, and by whom?

    python benchmarks/link_sharing.py --devices 8 --out results/link_sharing.jsonl
    NCCL_COMM_SPLIT_SHARE_RESOURCES=0 python benchmarks/link_sharing.py      # virtual GPUs with a thread for each group

The cost model slows the exchanges of a divided sequence by one factor, measured with the cluster, while gradients are
summed or parameters gathered. Here each is timed alone and beside another that lasts longer, in groups of their own as
the runtime has them: ``exchange`` (Ulysses), ``pass`` (a ring), ``scatter`` and ``gather`` (ZeRO), ``attention`` and
``product`` (kernels). The neighbour lasts twice as long: a ratio of 2 is a link that both share, 3 one that carries
messages in the order in which they come. Results are JSON lines: ``alone_s``, ``beside_s`` and their ratio, of the
slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from launching import ask, tell

_REPEATS = 5
_MESSAGES = ("exchange", "pass", "scatter", "gather")
_WORKS = (*_MESSAGES, "attention", "product")
_LASTS = 2.0
"""How much longer than what is timed its neighbour lasts."""

Work = Callable[[], Any]


class _All:
    """Several messages that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _works(device: Any, scale: float) -> dict[str, Work]:
    """One of each, on streams of their own, with the sizes of a Llama of 1.2B with 65,536 tokens over 8 devices."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups = {name: dist.new_group(list(range(ranks))) for name in _MESSAGES}
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float32

    def sized(count: float, dtype: Any) -> Any:
        return torch.zeros(int(count * scale) // (2 * ranks) * (2 * ranks), dtype=dtype, device=device)

    exchanged, passed = sized(1 << 24, narrow), sized(1 << 23, narrow)
    gradients, weights = sized(60e6, torch.float32), sized(60e6, narrow)
    received, came = torch.empty_like(exchanged), torch.empty_like(passed)
    part, shard = torch.empty_like(gradients[: len(gradients) // ranks]), weights[: len(weights) // ranks].clone()
    tokens = max(256, int(16384 * scale**0.5))
    query, key = (torch.randn(1, heads, tokens, 64, dtype=narrow, device=device) for heads in (4, 4))
    left = torch.randn(tokens, 2048, dtype=narrow, device=device)
    right = torch.randn(2048, 8192, dtype=narrow, device=device)

    def pass_on() -> Any:
        peers = [(rank + step) % ranks for step in (1, -1)]
        operations = [
            dist.P2POp(dist.isend, passed, peers[0], groups["pass"]),
            dist.P2POp(dist.irecv, came, peers[1], groups["pass"]),
        ]
        return _All(dist.batch_isend_irecv(operations))

    return {
        "exchange": lambda: dist.all_to_all_single(received, exchanged, group=groups["exchange"], async_op=True),
        "pass": pass_on,
        "scatter": lambda: dist.reduce_scatter_tensor(part, gradients, group=groups["scatter"], async_op=True),
        "gather": lambda: dist.all_gather_into_tensor(weights, shard, group=groups["gather"], async_op=True),
        "attention": lambda: functional.scaled_dot_product_attention(query, key, key, is_causal=True),
        "product": lambda: left @ right,
    }


def _seconds(work: Work, count: int, device: Any, beside: Work | None = None, more: int = 0) -> float:
    """Of so many calls, while the neighbour is called again and again."""
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    dist.barrier()
    if cuda:
        torch.cuda.synchronize()
    side = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
    held = []
    with nullcontext() if side is None else torch.cuda.stream(side):
        for _ in range(more):
            assert beside is not None
            begun = beside()
            if hasattr(begun, "wait"):  # of kernels, results are not kept: they would fill the device
                held.append(begun)
    begin = time.perf_counter()
    if cuda:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
    for _ in range(count):
        done = work()
        if hasattr(done, "wait"):
            done.wait()
    if cuda:
        events[1].record()
        events[1].synchronize()
    took = events[0].elapsed_time(events[1]) / 1e3 if cuda else time.perf_counter() - begin
    for one in held:
        one.wait()
    if cuda:
        torch.cuda.synchronize()
    worst = torch.tensor([took], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst.item()) / count


def _rank(spec: dict[str, Any]) -> None:
    import torch.distributed as dist

    from galvatron.processes.world import join, own_device

    join(in_turn=True)
    device = own_device()
    every = _works(device, spec["scale"])
    works = {name: every[name] for name in spec["works"]}
    alone = {}
    for name, work in works.items():
        _seconds(work, 2, device)
        once = _seconds(work, 2, device)
        count = max(1, round(0.1 / max(once, 1e-6)))
        alone[name] = statistics.median(_seconds(work, count, device) for _ in range(_REPEATS))
    on_cpu = device.type == "cpu"
    for name, work in works.items():
        for other, beside in works.items():
            # On a CPU a kernel is no neighbour: it has ended when it returns.
            if (
                other == name
                or (name not in _MESSAGES and other not in _MESSAGES)
                or (on_cpu and other not in _MESSAGES)
            ):
                continue
            count = max(1, round(0.2 / alone[name]))
            more = max(1, round(_LASTS * count * alone[name] / alone[other]))
            took = statistics.median(_seconds(work, count, device, beside, more) for _ in range(3))
            if dist.get_rank() == 0:
                found = {"work": name, "beside": other, "alone_s": alone[name], "beside_s": took}
                tell(spec, found | {"ratio": took / alone[name]})
    dist.barrier()
    os._exit(0)  # NCCL's threads may not end


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        _rank(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--works", default=",".join(_WORKS), help="some of them (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", default="benchmarks/results/link_sharing.jsonl")
    args = parser.parse_args()
    unknown = [name for name in args.works.split(",") if name not in _WORKS]
    if unknown:
        parser.error(f"works: {unknown[0]!r} given; expected some of {', '.join(_WORKS)}")
    import torch

    from galvatron.processes.virtual import virtual_gpus

    on_gpu = torch.cuda.is_available()
    with virtual_gpus(args.devices if on_gpu else None):
        spec = {"devices": args.devices, "scale": args.scale, "works": args.works.split(",")}
        told, status = ask(Path(__file__), spec, args.timeout)
    threads = os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")
    facts = {
        "shared_threads": threads,
        "devices": args.devices,
        "scale": args.scale,
        "status": status,
        "torch": torch.__version__,
    }
    with Path(args.out).open("a", encoding="utf-8") as file:
        for found in told:
            print(
                f"{found['work']:>10} beside {found['beside']:<10} {found['ratio']:.2f}  {found['alone_s']:.4f} s alone"
            )
            file.write(json.dumps(facts | {"device": "gpu" if on_gpu else "cpu"} | found) + "\n")


if __name__ == "__main__":
    main()
