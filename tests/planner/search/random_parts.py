"""Random models, clusters and spaces, small enough for brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from galvatron.core.spec import (
    Cluster,
    Device,
    Experts,
    Kind,
    LayerSpec,
    Level,
    ModelSpec,
    Precision,
    TensorParallel,
    Training,
)
from galvatron.planner.space import Space, Switches

Rng = np.random.Generator


def random_layer(rng: Rng, name: str, scale: int) -> LayerSpec:
    """Sizes around ``scale``: a small scale makes ties, a large one looks like a Transformer's layer."""

    def size(low: float, high: float) -> int:
        return int(scale * rng.uniform(low, high))

    parameters = size(0.0, 1.0)
    tensor_parallel = None
    if rng.random() < 0.75:
        heads = [(), (8,), (2,), (6,), (3, 4), (12,), (4, 2)][int(rng.integers(7))]
        tensor_parallel = TensorParallel(
            divides=heads,
            forward_collectives=int(rng.integers(1, 4)),
            backward_collectives=int(rng.integers(0, 4)),
            message_bytes=size(0.0, 0.5),
            sequence_divides=((), (8,), (4,), (6,), (12, 4), (16,))[int(rng.integers(6))],
        )
    return LayerSpec(
        name=name,
        parameters=parameters,
        tied_parameters=parameters // 2 if rng.random() < 0.15 and tensor_parallel else 0,
        replicated_parameters=int(parameters * rng.choice([0.0, 0.1, 0.4])),
        forward_flops=size(1, 30),
        split_activation_bytes=size(0.0, 6.0),
        replicated_activation_bytes=size(0.0, 3.0),
        boundary_bytes=size(0.0, 1.0),
        transient_bytes=size(0.0, 4.0) if rng.random() < 0.6 else 0,
        tensor_parallel=tensor_parallel,
    )


def random_model(rng: Rng, layers: int, scale: int) -> ModelSpec:
    kinds = [random_layer(rng, f"kind{i}", scale) for i in range(int(rng.integers(1, 4)))]
    order = rng.integers(0, len(kinds), layers)
    if rng.random() < 0.5:
        order = np.sort(order)
    return ModelSpec(
        name="random",
        family="custom",
        layers=tuple(kinds[i] for i in order),
        training=Training(precision=Precision.BF16 if rng.random() < 0.3 else Precision.FP32),
    )


def with_experts(rng: Rng, layer: LayerSpec) -> LayerSpec:
    """The same layer with experts besides: many parameters, and a part of each other figure."""

    def part(whole: int) -> int:
        return int(whole * rng.choice([0.3, 0.8, 1.0]))

    parameters = int(layer.parameters * rng.choice([0.5, 4.0, 16.0]))
    experts = Experts(
        count=int(rng.choice([2, 4, 6, 8, 16])),
        parameters=parameters,
        forward_flops=part(layer.forward_flops),
        activation_bytes=part(layer.split_activation_bytes),
        replicated_activation_bytes=part(layer.replicated_activation_bytes),
        dispatch_bytes=int(layer.boundary_bytes * rng.choice([0.0, 0.1, 1.0])),
        divides=((), (4,), (6, 8))[int(rng.integers(3))],
        forward_collectives=int(rng.integers(0, 3)),
        backward_collectives=int(rng.integers(0, 3)),
        imbalance=float(rng.choice([1.0, 1.0, 1.25])),
    )
    return replace(layer, parameters=layer.parameters + parameters, experts=experts)


def random_expert_model(rng: Rng, layers: int, scale: int) -> ModelSpec:
    """Layers with experts, mostly with dense ones between them; now and then two kinds that have experts."""
    plain = random_model(rng, layers, scale)
    chosen = {kind.name: rng.random() < 0.6 for kind in plain.kinds}
    chosen[plain.kinds[int(rng.integers(len(plain.kinds)))].name] = True
    kinds = {kind.name: with_experts(rng, kind) if chosen[kind.name] else kind for kind in plain.kinds}
    return replace(plain, layers=tuple(kinds[layer.name] for layer in plain.layers))


def random_cluster(rng: Rng, devices: int) -> Cluster:
    """Islands in one to three levels, slow or fast, shared or not."""
    by_size: dict[int, list[tuple[int, ...]]] = {
        2: [(2,)],
        4: [(4,), (2, 2)],
        6: [(6,), (2, 3), (3, 2)],
        8: [(8,), (4, 2), (2, 4), (2, 2, 2)],
    }
    shapes = by_size[devices]
    speed = 10.0 ** rng.uniform(9, 11)
    levels = []
    for depth, units in enumerate(shapes[int(rng.integers(len(shapes)))]):
        levels.append(
            Level(
                name=f"level{depth}",
                units=units,
                bytes_per_s=speed,
                latency_s=float(rng.choice([0.0, 3e-9, 5e-6])),
                transfer_bytes_per_s=None if rng.random() < 0.7 else speed / 2,
                shared=bool(rng.random() < 0.5),
            )
        )
        speed /= float(rng.choice([1.0, 3.0, 12.0]))
    device = Device(
        name="device",
        memory_bytes=1 << 34,
        memory_bytes_per_s=float(rng.choice([1e10, 1e12])),
        fp32_flops_per_s=10.0 ** rng.uniform(9, 12),
        bf16_flops_per_s=1e12,
        layer_overhead_s=float(rng.choice([0.0, 2e-9, 1e-5])),
    )
    slowdown = float(rng.choice([1.0, 1.3]))
    return Cluster(
        name="random",
        device=device,
        levels=tuple(levels),
        reserved_bytes=0,
        overlap_slowdown=slowdown,
        message_contention=2.0 if slowdown == 1.0 else 3.0,
    )


def random_space(rng: Rng) -> Space:
    kinds = [{Kind.DP, Kind.TP}, {Kind.SDP, Kind.TP}, {Kind.DP, Kind.SDP}, {Kind.TP}, {Kind.DP}, set(Kind)]
    flags = [bool(rng.random() < 0.35) for _ in range(4)]
    return Space(
        name="random",
        title="",
        kinds=frozenset(kinds[int(rng.integers(len(kinds)))]),
        pipeline="none" if rng.random() < 0.1 else "any",
        switches=Switches(
            recompute=flags[0],
            sequence_parallel=flags[1],
            zero2=flags[2],
            hybrid_sharding=flags[3],
            accumulation=bool(rng.random() < 0.5),
        ),
    )


def random_expert_space(rng: Rng) -> Space:
    """A space in which experts may have axes of their own."""
    space = random_space(rng)
    kinds = [{Kind.DP}, {Kind.SDP}, {Kind.DP, Kind.TP}, {Kind.SDP, Kind.TP}, {Kind.DP, Kind.SDP}]
    return replace(
        space,
        kinds=frozenset({*kinds[int(rng.integers(len(kinds)))], Kind.EP}),
        pipeline="none" if rng.random() < 0.6 else "any",
        switches=replace(space.switches, expert_parallel=True),
    )
