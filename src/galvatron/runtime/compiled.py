"""Compiled layers: the blocks of a model through ``torch.compile``, where this machine has what that needs.

Only a block's own computation is compiled, once for all blocks that are alike; hooks of FSDP2, recompute and what lies
between layers stay outside, and a collective inside is one node of the graph.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from galvatron.families.layer import Layer
from galvatron.runtime.selective import Grade, mark

__all__ = ["Compiler", "compiled_part", "compiler", "compiles", "why_not"]

_LOG = logging.getLogger(__name__)
_GRAPHS_OF_A_FUNCTION = 64
"""Kinds of blocks × strategies × training and evaluation × shapes: PyTorch's own limit of 8 is for one of these."""


def compiled_part(layer: Layer) -> nn.Module | None:
    """The module of a layer that is compiled: its block; None: it has none."""
    return layer._modules.get("block")


class Compiler:
    """Compiles blocks, and counts what that took."""

    def __init__(self) -> None:
        self.graphs = 0
        """Made so far: after the first iterations it stays as it is."""
        self.seconds = 0.0
        """Spent on making them."""
        self.failures: list[str] = []
        """Why some computation is not compiled and runs as it is."""
        self._backends: dict[Grade | None, Callable[..., Any]] = {None: partial(self._graph, None)}
        """PyTorch compiles a function anew for another object in this place, so each is made once."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS_OF_A_FUNCTION)

    def compile(self, layer: Layer, grade: Grade | None = None) -> bool:
        """Compile the layer's computation, when it is first run, so that it keeps for backward what the grade says;
        without one, what the compiler likes. Returns whether there is anything to compile."""
        block = compiled_part(layer)
        if block is None:
            return False
        block.compile(backend=self._backends.setdefault(grade, partial(self._graph, grade)))
        return True

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, compiled when it is first run."""
        return torch.compile(function, backend=self._backends[None])

    def _graph(self, grade: Grade | None, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Inductor, or the graph as it is where that fails."""
        from torch._dynamo.exc import RestartAnalysis
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor
        from torch._inductor.compile_fx import compile_fx

        from galvatron.runtime.narrow import merge

        begin = time.perf_counter()
        self.graphs += 1
        try:
            # Backward at once, so that what fails there fails here.
            passes = {"post_grad_custom_pre_pass": _pass(merge, "narrow-1")}
            if grade is not None:
                passes["joint_custom_post_pass"] = _pass(partial(mark, grade=grade), f"{grade}-1")
            at_once = functorch.patch(force_non_lazy_backward_lowering=True)
            with _first_alone(graph, inputs), at_once, inductor.patch(**passes):
                made: Any = compile_fx(graph, inputs)
        except RestartAnalysis:
            raise  # no failure: PyTorch makes the graph again, with a number that had changed as a constant
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            if reason not in self.failures:
                self.failures.append(reason)
                _LOG.warning(
                    "a part of a layer is not compiled and runs as it is, with more memory than was planned: %s", reason
                )
            made = graph.forward
        self.seconds += time.perf_counter() - begin
        compiled: Callable[..., Any] = made
        return compiled


@contextmanager
def _first_alone(graph: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Of the ranks of a machine that come with the same graph one compiles it; the others wait, and then find what it
    left in PyTorch's cache, all at once."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    described = [graph.code, *(f"{own.dtype} {own.shape}" if isinstance(own, Tensor) else str(own) for own in inputs)]
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    folder = Path(cache_dir())
    with ExitStack() as stack:
        file = None
        with suppress(OSError):  # a folder that cannot be written to or locked: then each compiles for itself
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / f"galvatron-{digest[:32]}.lock", "a+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or another has done it
            file.seek(0)
            if file.read():
                fcntl.flock(file, fcntl.LOCK_UN)
                file = None
        yield
        if file is not None:
            with suppress(OSError):
                file.write("done\n")
                file.flush()


def _pass(change: Callable[[fx.Graph], None], name: str) -> Any:
    """A pass over graphs; its name, with a version, is part of the key under which they are kept on disk."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            change(graph)

        def uuid(self) -> str:
            return f"galvatron-{name}"

    return Pass()


@cache
def compiler() -> Compiler:
    """The one of this process: blocks of several models may be alike."""
    return Compiler()


def compiles(wanted: bool, device: torch.device) -> bool:
    """Whether blocks are compiled: as is wanted, if this machine can; a warning says why it cannot."""
    reason = why_not(device.type) if wanted else None
    if reason is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        _LOG.warning("layers are not compiled, and take more memory than was planned (--no-compile): %s", reason)
    return wanted and reason is None


@cache
def why_not(device: str) -> str | None:
    """Why blocks cannot be compiled for a type of device on this machine; None: they can."""
    if device == "cuda":
        return None if find_spec("triton") else "Triton is not installed, which torch.compile needs for GPUs"
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "no C++ compiler is found, which torch.compile needs for CPUs; install g++ or clang"
    return None
