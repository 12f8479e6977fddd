"""Tensor-parallel rules of blocks that transformers has no plan of, found by watching a block run without values.

A projection whose inputs come from other projections alone can be split by rows, and those by columns: query, key and
value before the output of an attention, the first layer of a feed-forward network before its second. Whether a block
still runs with half of them shows which of its numbers (of heads, of features) must be halved too. That is a proposal:
the trial of ``galvatron.runtime.split_trial`` compares a model split so with the whole one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from galvatron.families.generic.stubs import LOOKS, Call, on_meta
from galvatron.families.lora import without_adapter
from galvatron.families.rules import Attribute, Columns, PartialGradients, Rows, Rule, Table

__all__ = ["found_rules", "parents"]

_STREAM = ""
"""The source of what the block is given: its hidden state, and what an encoder made."""
_RANKS = 2


@dataclass(frozen=True, slots=True)
class _Pair:
    """Projections that are split together: the columns are read by the rows alone."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    parameters: tuple[str, ...]
    """Of other modules that work between them."""


def found_rules(block: nn.Module, call: Call, streams: Sequence[Tensor]) -> tuple[tuple[Rule, ...], ...]:
    """How a block on the meta device could be split, with paths relative to it: the rules of all projections that are
    split together. ``streams``: which of the tensors that it is called with it works on."""
    flow = _Flow(block)
    try:
        hidden = flow.run(call, streams)
    except Exception:  # of whatever kind: it comes from the block's own forward, which cannot run without values
        return ()
    found = (_rules_of(block, call, streams, flow, pair, hidden.shape) for pair in flow.pairs(hidden))
    return tuple(rules for rules in found if rules is not None)


def _rules_of(
    block: nn.Module, call: Call, streams: Sequence[Tensor], flow: _Flow, pair: _Pair, shape: torch.Size
) -> tuple[Rule, ...] | None:
    """The rules of a pair with which the block runs on one of two ranks; None: there are none."""
    heads = {flow.heads[path] for path in pair.columns if path in flow.heads}
    columns = [Columns(path, parts=flow.parts.get(path, 1), heads=flow.heads.get(path)) for path in pair.columns]
    rules: list[Rule] = [*columns, *map(Rows, pair.rows)]
    for name in pair.parameters:
        sizes = block.get_parameter(name).shape
        normed = _is_norm(block.get_submodule(name.rpartition(".")[0]))
        split = [dim for dim, size in enumerate(sizes) if size in heads and not normed]
        if len(split) == 1:
            rules.append(Table(name, split[0]))
        elif any(size in {flow.width(path) for path in pair.columns} for size in sizes):
            return None
        else:
            rules.append(PartialGradients(name))
    for attributes in _attributes(block, flow, pair, heads):
        if _runs_halved(block, call, streams, (*rules, *attributes), shape):
            return (*rules, *attributes)
    return None


def _attributes(block: nn.Module, flow: _Flow, pair: _Pair, heads: set[int]) -> Iterator[tuple[Attribute, ...]]:
    """Numbers of modules around the projections that may have to be halved with them: none, those of heads, and also
    those of features."""
    yield ()
    around = dict.fromkeys([*(parent for path in (*pair.columns, *pair.rows) for parent in parents(path)), ""])
    widths = {flow.width(path) // flow.parts.get(path, 1) for path in pair.columns}
    counts, features = [], []
    for path in around:
        for name, own in vars(block.get_submodule(path)).items():
            if type(own) is not int or path in (*pair.columns, *pair.rows):
                continue
            counted = "head" in name and not re.search("dim|size|width|channel", name)
            if counted and own in heads:
                counts.append(Attribute(f"{path}.{name}".lstrip(".")))
            elif own in widths and not counted:
                features.append(Attribute(f"{path}.{name}".lstrip(".")))
    if counts:
        yield tuple(counts)
    if features:
        yield (*counts, *features)


def parents(path: str) -> Iterator[str]:
    """A module's path and those of all modules around it, from within."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _hidden(made: Any) -> Tensor:
    """Of what a block returns, the hidden state: what follows it (probabilities of attention) goes nowhere."""
    first = next((own for own in tree_leaves(made) if isinstance(own, Tensor)), None)
    if first is None:
        raise ValueError("the block returns no tensor")
    return first


def _runs_halved(
    block: nn.Module, call: Call, streams: Sequence[Tensor], rules: Sequence[Rule], shape: torch.Size
) -> bool:
    """Whether the block with half of each projection returns a hidden state of this shape from half of the heads."""
    try:
        half = copy.deepcopy(block)
        for rule in rules:
            match rule:
                case Columns() | Rows():
                    _halve(half.get_submodule(rule.path), isinstance(rule, Columns))
                case Table():
                    _halve_parameter(half, rule.path, rule.dim)
                case Attribute():
                    path, _, name = rule.path.rpartition(".")
                    setattr(half.get_submodule(path), name, _halved(getattr(half.get_submodule(path), name)))
        flow = _Flow(half)
        if flow.run(call, streams).shape != shape:
            return False
    except Exception:  # of whatever kind, as above
        return False
    columns = [rule for rule in rules if isinstance(rule, Columns)]
    return all(rule.heads is None or flow.heads.get(rule.path) == rule.heads // _RANKS for rule in columns)


def _halve(module: nn.Module, outputs: bool) -> None:
    """Leave half of a projection. It runs without its adapter: the sum of both has the projection's shape."""
    plain = without_adapter(module)
    _halve_parameter(plain, "weight", int(outputs == isinstance(plain, Conv1D)))
    if outputs and plain.bias is not None:
        _halve_parameter(plain, "bias", 0)
    if isinstance(plain, Conv1D) and outputs:
        plain.nf = _halved(plain.nf)
    elif isinstance(plain, nn.Linear) and outputs:
        plain.out_features = _halved(plain.out_features)
    elif isinstance(plain, nn.Linear):
        plain.in_features = _halved(plain.in_features)
    if plain is not module:
        module.forward = plain.forward


def _halve_parameter(module: nn.Module, path: str, dim: int) -> None:
    owner, _, name = path.rpartition(".")
    place = module.get_submodule(owner)
    own = getattr(place, name)
    shape = [_halved(size) if at == dim else size for at, size in enumerate(own.shape)]
    setattr(place, name, nn.Parameter(own.new_empty(shape), requires_grad=False))


def _halved(size: int) -> int:
    if size % _RANKS:
        raise ValueError
    return size // _RANKS


def _is_projection(module: nn.Module) -> bool:
    """Whether it computes what a split projection would: others of these classes may do more in their forward."""
    plain = type(without_adapter(module))
    return plain in (nn.Linear, Conv1D) or plain.__name__ == "FalconLinear"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


@dataclass(slots=True)
class _Flow(TorchFunctionMode):
    """Watches one run of a block: what each tensor was made of, down to the projections before it."""

    block: nn.Module
    heads: dict[str, int] = field(default_factory=dict)
    """Of each projection whose outputs are heads, how many."""
    parts: dict[str, int] = field(default_factory=dict)
    """Of each projection whose outputs are those of several, how many."""
    _sources: dict[int, frozenset[str]] = field(default_factory=dict)
    """Of each tensor: projections, parameters of other modules (with ``@``), and the stream."""
    _fresh: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Tensors that are all or one part of a projection's outputs, with its path and their features."""
    _inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    """Sources of what each projection was called with, in the order of calls."""
    _again: set[str] = field(default_factory=set)
    """Projections that were called more than once."""
    _spoiled: set[str] = field(default_factory=set)
    """Projections whose outputs are not to be split."""
    _names: dict[int, str] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    """So that no two tensors have one identity."""
    _running: list[str] = field(default_factory=list)
    """Projections: one, and those inside it (of its adapter)."""

    def __post_init__(self) -> None:
        TorchFunctionMode.__init__(self)
        inside = tuple(f"{path}." for path, own in self.block.named_modules() if path and _is_projection(own))
        self._names = {
            id(own): name for name, own in self.block.named_parameters() if not inside or not name.startswith(inside)
        }

    def run(self, call: Call, streams: Sequence[Tensor]) -> Tensor:
        """The hidden state that the block returns."""
        self._kept += streams
        self._sources |= {id(own): frozenset({_STREAM}) for own in streams}
        with torch.no_grad(), on_meta(), self._watching():
            return _hidden(self.block(*call.args, **call.kwargs))

    def pairs(self, hidden: Tensor) -> list[_Pair]:
        """Projections that can be split together; ``hidden``: what the block returned."""
        out = self.sources(hidden)
        rows: dict[str, frozenset[str]] = {}
        for path, sources in self._inputs.items():
            found = frozenset(own for own in sources if not own.startswith("@"))
            if found and _STREAM not in found and not found & (out | self._spoiled | rows.keys()):
                rows[path] = found
        # A column that anything but rows reads is none, nor are those that come together with it.
        while True:
            readers = (
                {own for path, sources in self._inputs.items() if path not in rows for own in sources}
                | self._again
                | rows.keys()
            )
            lost = [path for path, sources in rows.items() if sources & readers or path in self._again]
            if not lost:
                break
            for path in lost:
                del rows[path]
        return [
            _Pair(
                columns=tuple(path for path in self._inputs if path in columns),
                rows=tuple(path for path in self._inputs if path in paths),
                parameters=tuple(
                    sorted({own[1:] for path in paths for own in self._inputs[path] if own.startswith("@")})
                ),
            )
            for paths, columns in _together(rows)
        ]

    def width(self, path: str) -> int:
        """Output features of a projection."""
        plain = without_adapter(self.block.get_submodule(path))
        width = plain.out_features if isinstance(plain, nn.Linear) else plain.nf
        assert isinstance(width, int)
        return width

    def sources(self, value: Any) -> frozenset[str]:
        """What a tensor was made of."""
        return self._sources.get(id(value), frozenset())

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in self.block.named_modules():
                if path and _is_projection(module):
                    stack.callback(module.register_forward_pre_hook(partial(self._enter, path)).remove)
                    stack.callback(module.register_forward_hook(partial(self._leave, path)).remove)
                elif _is_norm(module):
                    stack.callback(module.register_forward_pre_hook(self._normed).remove)
            with self:
                yield

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._running:
            sources = self.sources(args[0] if args else None)
            if not all(own.startswith("@") for own in sources):
                self._again |= {path} & self._inputs.keys()
                self._inputs[path] = self._inputs.get(path, frozenset()) | sources
        self._running.append(path)

    def _leave(self, path: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self._running.remove(path)
        if self._running:
            return
        if path in self._inputs:
            self._note(output, frozenset({path}))
            self._fresh[id(output)] = path, output.shape[-1]
        else:  # of positions, for one: what it makes is no hidden state
            own = {f"@{path}.{name}" for name, _ in module.named_parameters()}
            self._note(output, self.sources(args[0] if args else None) | own)

    def _normed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A norm over all features of a projection."""
        for own in args[:1]:
            self._spoil(own, own.shape[-1])

    def _spoil(self, tensor: Tensor, width: int) -> None:
        paths = [path for path in self.sources(tensor) if path and not path.startswith("@")]
        self._spoiled |= {path for path in paths if width == self.width(path)}

    def _note(self, tensor: Tensor, sources: frozenset[str]) -> None:
        self._kept.append(tensor)
        self._sources[id(tensor)] = sources

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if self._running or (name in LOOKS and name != "__get__"):
            return made
        given = [own for own in tree_leaves((args, kwargs)) if isinstance(own, Tensor)]
        sources = frozenset().union(
            *(self.sources(own) | ({f"@{self._names[id(own)]}"} if id(own) in self._names else set()) for own in given)
        )
        results = [own for own in tree_leaves(made) if isinstance(own, Tensor)]
        for own in results:
            self._note(own, sources | self.sources(own))
        if given and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            self._note(given[0], sources)
        if given and id(given[0]) in self._fresh and name in ("layer_norm", "rms_norm", "softmax"):
            self._spoil(given[0], given[0].shape[-1])
        elif given and id(given[0]) in self._fresh:
            self._shaped(given[0], name, results)
        return made

    def _shaped(self, tensor: Tensor, name: str, results: Sequence[Tensor]) -> None:
        """What becomes of a projection's outputs says how many heads they are, or outputs of how many."""
        path, width = self._fresh[id(tensor)]
        if name in ("chunk", "split", "tensor_split") and sum(own.shape[-1] for own in results) == width:
            if len(results) == 1:
                self._fresh[id(results[0])] = path, width
            elif len({own.shape[-1] for own in results}) > 1:
                self._spoiled.add(path)
            else:
                self.parts[path] = self.parts.get(path, 1) * len(results)
                self._fresh |= {id(own): (path, own.shape[-1]) for own in results}
        elif name in ("view", "reshape", "unflatten"):
            dims = _made_of(results[0].shape, tensor.shape)
            if len(dims) == 1:
                self._fresh[id(results[0])] = path, width
            elif len(dims) == 3 and dims[0] == 3 != dims[1]:
                self.parts[path], self.heads[path] = 3, dims[1]
            elif len(dims) > 1:
                self.heads[path] = dims[0]
        elif len(results) == 1 and results[0].shape == tensor.shape:
            self._fresh[id(results[0])] = path, width


def _made_of(shape: Sequence[int], whole: Sequence[int]) -> list[int]:
    """The sizes into which a view of this shape takes the last size of the whole apart; empty: into none."""
    before = len(whole) - 1
    if tuple(shape[:before]) == tuple(whole[:-1]):
        return list(shape[before:])
    place, product = len(shape), 1
    while place and product < whole[-1]:
        place -= 1
        product *= shape[place]
    return list(shape[place:]) if product == whole[-1] else []


def _together(rows: Mapping[str, frozenset[str]]) -> list[tuple[set[str], set[str]]]:
    """Rows and columns that belong together: rows that read the same columns, and the columns of one."""
    groups: list[tuple[set[str], set[str]]] = []
    for path, sources in rows.items():
        group: tuple[set[str], set[str]] = {path}, set(sources)
        for other in [own for own in groups if own[1] & sources]:
            groups.remove(other)
            group = group[0] | other[0], group[1] | other[1]
        groups.append(group)
    return groups
