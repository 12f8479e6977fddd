"""One layer on four devices, in round numbers, for formulas worked out by hand."""

from __future__ import annotations

from galvatron.core.spec import Cluster, Device, LayerSpec, Level, TensorParallel

MB = 10**6
DEVICE = Device(
    name="toy",
    memory_bytes=10**10,
    memory_bytes_per_s=28e9,
    fp32_flops_per_s=1e12,
    bf16_flops_per_s=4e12,
    layer_overhead_s=1e-3,
)
CLUSTER = Cluster(
    name="toy-4",
    device=DEVICE,
    levels=(Level(name="node", units=4, bytes_per_s=1e9, latency_s=1e-4, shared=False),),
    reserved_bytes=0,
    overlap_slowdown=1.5,
)
BLOCK = LayerSpec(
    name="block",
    parameters=41 * MB,
    replicated_parameters=1 * MB,
    forward_flops=10**10,
    split_activation_bytes=80 * MB,
    replicated_activation_bytes=20 * MB,
    boundary_bytes=5 * MB,
    transient_bytes=8 * MB,
    tensor_parallel=TensorParallel(divides=(8,), forward_collectives=2, backward_collectives=2, message_bytes=5 * MB),
)
F, B = 0.01, 0.02  # forward and backward seconds of one sample: 1e10 operations at 1e12 a second
LAT, H = 1e-4, 1e-3  # latency of a step, overhead of a layer


def overlap(compute: float, communicate: float) -> float:
    """Both slowed by 1.5 while both run, the rest of the longer at full speed."""
    both = min(compute, communicate)
    return 1.5 * both + max(compute, communicate) - both
