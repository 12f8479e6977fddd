"""Attention on one GPU, kernel by kernel: what PyTorch takes by itself, flash, cuDNN and the memory-efficient one.

    python benchmarks/attention_kernels.py [--cases long,bert-huge] --out results/attention_kernels.jsonl

``long``: one causal sample, 32 heads of queries and 8 of keys and values. ``bert-huge``: 32 and 128 samples of 512
tokens, 16 heads of 80 channels, as they are and filled up with zeros to 96 and 128. All in bf16. Results are lines of
JSON: milliseconds of forward and of backward, and their TFLOP/s by the channels that count (of causal scores half).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = {
    "default": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    samples: int = 1
    heads: int = 32
    shared: int = 8
    """Heads of keys and values."""
    width: int
    filled: int
    """Channels of a head with the zeros that it is filled up with."""
    tokens: int
    causal: bool = True


_CASES = {
    "long": [_Case(width=width, filled=width, tokens=tokens) for width in (64, 128) for tokens in (8192, 32768)],
    "bert-huge": [
        _Case(samples=samples, heads=16, shared=16, width=80, filled=filled, tokens=512, causal=False)
        for samples in (32, 128)
        for filled in (80, 96, 128)
    ],
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


def _timed(case: _Case, kernel: str) -> dict[str, Any]:
    def drawn(heads: int) -> Tensor:
        shape = case.samples, case.tokens, heads, case.width  # as projections make them
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    query, key, value = drawn(case.heads), drawn(case.shared), drawn(case.shared)
    gradient = torch.randn_like(query)

    def filled(tensor: Tensor) -> Tensor:
        return functional.pad(tensor, (0, case.filled - case.width)).transpose(1, 2)

    def forward() -> Tensor:
        attended: Tensor = functional.scaled_dot_product_attention(
            filled(query),
            filled(key),
            filled(value),
            is_causal=case.causal,
            scale=case.width**-0.5,
            enable_gqa=case.shared != case.heads,
        )
        return attended.transpose(1, 2)[..., : case.width]

    with sdpa_kernel(_KERNELS[kernel]):
        alone = _milliseconds(forward)
        both = _milliseconds(lambda: torch.autograd.backward(forward(), gradient))
    operations = 4 * case.samples * case.heads * case.tokens**2 * case.width / (2 if case.causal else 1) / 1e9
    return {
        **asdict(case), "kernel": kernel,
        "forward_ms": alone, "forward_tflops": operations / alone,
        "backward_ms": both - alone, "backward_tflops": 2.5 * operations / (both - alone),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(_CASES))
    parser.add_argument("--out", default="benchmarks/results/attention_kernels.jsonl")
    args = parser.parse_args()
    unknown = [name for name in args.cases.split(",") if name not in _CASES]
    if unknown:
        parser.error(f"cases: {unknown[0]!r} given; expected some of {', '.join(_CASES)}")
    if not torch.cuda.is_available():
        parser.error("no GPU is found, and these are kernels of GPUs")
    facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for case in (case for name in args.cases.split(",") for case in _CASES[name]):
        for kernel in _KERNELS:
            try:
                found = facts | _timed(case, kernel)
            except RuntimeError as error:  # a kernel that does not take it
                found = facts | asdict(case) | {"kernel": kernel, "error": str(error).partition("\n")[0]}
            print(found, flush=True)
            with Path(args.out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
