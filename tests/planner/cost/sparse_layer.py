"""A kind of layer with experts, as a model file describes it."""

from __future__ import annotations

__all__ = ["sparse_layer"]


def sparse_layer(name: str, *, count: int, experts: int) -> str:
    """So many layers, whose experts hold nearly all parameters."""
    return f"""
[[layers]]
name = "{name}"
count = {count}
parameters = 850_000_000
forward_flops = 300e9
split_activation_bytes = "96MiB"
replicated_activation_bytes = "48MiB"
boundary_bytes = "8MiB"
tensor_parallel = {{ heads = 16 }}

[layers.experts]
count = {experts}
parameters = 800_000_000
forward_flops = 100e9
activation_bytes = "32MiB"
replicated_activation_bytes = "16MiB"
dispatch_bytes = "16MiB"
divides = [4096]
"""
