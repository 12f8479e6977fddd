"""Causal attention on one GPU, kernel by kernel: what PyTorch takes by itself, flash and cuDNN.

    python benchmarks/attention_kernels.py --out results/attention_kernels.jsonl

32 heads of queries and 8 of keys and values, bf16. Results are JSON lines: milliseconds of forward and of backward, and
their TFLOP/s by the half of the scores that a causal mask leaves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_HEADS, _SHARED = 32, 8
_KERNELS = {
    "default": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}


def _milliseconds(work: Callable[[], object], count: int = 5) -> float:
    work()
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def _timed(width: int, tokens: int, kernel: str) -> dict[str, Any]:
    def drawn(heads: int) -> Tensor:
        return torch.randn(1, heads, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    query, key, value = drawn(_HEADS), drawn(_SHARED), drawn(_SHARED)
    gradient = torch.randn_like(query)

    def forward() -> Tensor:
        attended: Tensor = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended

    with sdpa_kernel(_KERNELS[kernel]):
        alone = _milliseconds(forward)
        both = _milliseconds(lambda: torch.autograd.backward(forward(), gradient))
    operations = 4 * _HEADS * tokens**2 * width / 2 / 1e9
    return {
        "width": width, "tokens": tokens, "kernel": kernel,
        "forward_ms": alone, "forward_tflops": operations / alone,
        "backward_ms": both - alone, "backward_tflops": 2.5 * operations / (both - alone),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="benchmarks/results/attention_kernels.jsonl")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU is found, and these are kernels of GPUs")
    facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for width in (64, 128):
        for tokens in (8192, 32768):
            for kernel in _KERNELS:
                found = facts | _timed(width, tokens, kernel)
                print(found, flush=True)
                with Path(args.out).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
