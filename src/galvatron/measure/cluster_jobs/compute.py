"""Probes of one device: arithmetic, the optimizer's step, overheads, and computing while communicating."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron.measure.cluster_jobs.exchanges import Works, end, exchange_probes, seconds_each
from galvatron.measure.cluster_jobs.findings import MEASURED_OPTIMIZER, DeviceFacts, DeviceProbe
from galvatron.measure.cluster_jobs.messages import sizes_for
from galvatron.measure.timing import Probe, once, seconds_of_calls
from galvatron.processes.peers import Peers
from galvatron.processes.virtual import virtual_devices
from galvatron.processes.world import workspace_bytes
from galvatron.runtime.float8 import has_float8
from galvatron.runtime.optimizers import torch_class
from galvatron.runtime.products import has_tf32, products

__all__ = ["device_facts", "device_name", "device_probes"]

_TOKENS, _HIDDEN = {"cpu": 256, "cuda": 8192}, {"cpu": 256, "cuda": 2048}
_PARAMETERS = {"cpu": 1 << 20, "cuda": 1 << 26}
_ROWS, _HEADS = {"cpu": (4, 32), "cuda": (2, 512)}, 16
"""Sequences, and tokens of each, that are computed beside communication, and heads of attention."""
_TURNS = 4
"""Of computing beside communication."""
_TINY = 32


def device_facts(peers: Peers) -> DeviceFacts:
    """Call it once the process has done what every process of a training does (joined a group, used its device)."""
    kind = peers.device.type
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(peers.device)
        virtual = virtual_devices()
        tensors = peers.gather(torch.cuda.memory_reserved(peers.device))
        if virtual is None:
            memory, reserved = total, total - free - tensors[peers.rank]
        else:
            memory, reserved = total // virtual, (total - free - sum(tensors)) // peers.world
        reserved += workspace_bytes(peers.device)
    else:
        reserved = _resident_bytes()
        memory = _available_bytes() // peers.local_world + reserved  # what this process holds is no longer available
    return DeviceFacts(
        name=device_name(peers),
        memory_bytes=memory >> 20 << 20,
        reserved_bytes=min(reserved, memory // 2) >> 20 << 20,
        layer_flops=24 * _TOKENS[kind] * _HIDDEN[kind] ** 2,
        optimizer_parameters=_PARAMETERS[kind],
    )


def device_name(peers: Peers) -> str:
    """As its maker calls it."""
    if peers.device.type != "cuda":
        return f"CPU process ({_processor()})"[:100]
    virtual, name = virtual_devices(), torch.cuda.get_device_name(peers.device)
    return (name if virtual is None else f"1/{virtual} of an {name}")[:100]


def device_probes(peers: Peers) -> Iterator[tuple[DeviceProbe, Probe]]:
    """What is timed of this rank's device: products, memory, an optimizer's step."""
    kind, device = peers.device.type, peers.device
    fp32 = _block(kind, torch.float32, device, _TOKENS[kind])
    yield DeviceProbe.FP32, _computing(fp32, peers)
    if peers.world > 1:
        yield DeviceProbe.ALONE, _computing(fp32, peers) if peers.rank == 0 else Probe(_nothing)
    if kind == "cuda" and torch.cuda.is_bf16_supported():
        yield DeviceProbe.BF16, _computing(_block(kind, torch.bfloat16, device, _TOKENS[kind]), peers)
    if has_tf32(device):
        yield DeviceProbe.TF32, _computing(_with_tf32(fp32), peers)
    if has_float8(device):
        yield DeviceProbe.FLOAT8, _computing(_float8_product(device), peers)
    yield DeviceProbe.OVERHEAD, _computing(_tiny_layer(device), peers)
    yield DeviceProbe.OPTIMIZER, _computing(_optimizer_step(_PARAMETERS[kind], device), peers)
    if peers.world > 1:
        yield from _overlap_probes(peers)


def _float8_product(device: torch.device) -> Callable[[], object]:
    """As a linear layer twice as wide as the block's: 2·tokens·2h·6h operations, as many as the block has."""
    hidden, kind = _HIDDEN[device.type], torch.float8_e4m3fn
    left = torch.randn(_TOKENS[device.type], 2 * hidden, device=device).to(kind)
    right = torch.randn(6 * hidden, 2 * hidden, device=device).to(kind).t()
    scales = torch.ones(len(left), 1, device=device), torch.ones(1, 6 * hidden, device=device)
    return lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def _with_tf32(work: Callable[[], object]) -> Callable[[], object]:
    def with_tf32() -> None:
        with products(tf32=True):
            work()

    return with_tf32


def _nothing(calls: int) -> tuple[float, ...]:
    """The part of a rank that waits for another."""
    return ()


def _computing(work: Callable[[], object], peers: Peers) -> Probe:
    return Probe(lambda calls: seconds_of_calls(calls, once(work), peers.device, peers.compute_clock))


def _waiting(work: Callable[[], object], peers: Peers) -> Probe:
    """For work that waits for others in between."""
    return Probe(lambda calls: seconds_of_calls(calls, once(work), peers.device, lead_in=True), by_wall_clock=True)


def _block(kind: str, dtype: torch.dtype, device: torch.device, tokens: int) -> Callable[[], object]:
    """The products of a Transformer block, with a normalisation and an activation between them: 24·tokens·h²
    operations."""
    hidden = _HIDDEN[kind]
    options = {"dtype": dtype, "device": device}
    weights = [torch.randn(rows, columns, **options) * 0.02 for rows, columns in _shapes(hidden)]  # type: ignore[call-overload]
    given = torch.randn(tokens, hidden, **options)  # type: ignore[call-overload]

    def work() -> Tensor:
        attended = (given @ weights[0])[:, :hidden] @ weights[1]
        normed = nn.functional.layer_norm(attended + given, (hidden,))
        result: Tensor = nn.functional.gelu(normed @ weights[2]) @ weights[3]
        return result

    return work


def _shapes(hidden: int) -> tuple[tuple[int, int], ...]:
    return (hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)


def _layer_both_ways(device: torch.device) -> Callable[[], object]:
    """Forward and backward of a layer with all that it consists of: communication slows small kernels, too."""
    hidden = _HIDDEN[device.type]
    layer = nn.TransformerEncoderLayer(hidden, _HEADS, 4 * hidden, dropout=0.0, batch_first=True, device=device)
    given = torch.randn(*_ROWS[device.type], hidden, device=device, requires_grad=True)
    return lambda: torch.autograd.backward(layer(given).sum())


def _tiny_layer(device: torch.device) -> Callable[[], object]:
    layer = nn.TransformerEncoderLayer(_TINY, 2, _TINY, dropout=0.0, batch_first=True, device=device)
    given = torch.randn(1, 2, _TINY, device=device)
    return lambda: layer(given)


def _optimizer_step(parameters: int, device: torch.device) -> Callable[[], object]:
    owned = [nn.Parameter(torch.zeros(parameters // 8, device=device)) for _ in range(8)]
    for parameter in owned:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return torch_class(MEASURED_OPTIMIZER)(owned, fused=True).step


def _overlap_probes(peers: Peers) -> Iterator[tuple[DeviceProbe, Probe]]:
    """Layers, and sums over all devices that take about as long: each by itself, then at once, in turns that wait for
    both, as training does from layer to layer."""
    layer = _layer_both_ways(peers.device)
    largest = sizes_for(lambda size: dist.all_reduce(torch.zeros(size // 4, device=peers.device)), peers)[-1]
    message = torch.zeros(largest // 4, device=peers.device)
    lasting = peers.gather([seconds_each(layer, peers), seconds_each(lambda: dist.all_reduce(message), peers)])
    layer_s, sum_s = (max(each) for each in zip(*lasting, strict=True))
    layers, sums = max(1, round(sum_s / layer_s)), max(1, round(layer_s / sum_s))

    def compute() -> None:
        for _ in range(layers):
            layer()

    def begin_sums() -> Works:
        return [dist.all_reduce(message, async_op=True) for _ in range(sums)]

    def both() -> None:
        begun = begin_sums()
        compute()
        end(begun)

    yield DeviceProbe.COMPUTE, _waiting(_in_turns(compute), peers)
    yield DeviceProbe.COMMUNICATE, _waiting(_in_turns(lambda: end(begin_sums())), peers)
    yield DeviceProbe.OVERLAP, _waiting(_in_turns(both), peers)
    yield from exchange_probes(peers, message, sum_s)


def _in_turns(turn: Callable[[], None]) -> Callable[[], None]:
    def work() -> None:
        for _ in range(_TURNS):
            turn()

    return work


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _available_bytes() -> int:
    """Memory that is free or can be freed."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 28
