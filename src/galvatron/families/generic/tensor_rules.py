"""What running a block once without values shows about its tensor-parallel rules.

Projections that read the same tensor sum its gradient together. A module whose input nothing but split projections
reads is a region: its projections are computed when it is entered, and what is around it may be divided along the
sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from galvatron.families.build import without_weights
from galvatron.families.generic.alike import outline_of
from galvatron.families.generic.found_rules import found_rules, parents
from galvatron.families.generic.segments import Anatomy
from galvatron.families.generic.stubs import LOOKS, Call, on_meta, to_meta
from galvatron.families.generic.tensor_plan import NoTensorParallelism, block_rules, rules_within
from galvatron.families.rules import Columns, DividedExperts, PartialGradients, Region, Rows, Rule, Table, Whole

__all__ = ["TensorRules", "find_rules"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRules:
    """How the blocks of a model are split."""

    blocks: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    """For each kind, with paths in its layer; empty: nothing is split."""
    divisible: frozenset[str] = frozenset()
    """Kinds whose layers run on parts of the sequence, outside of what is split."""
    guessed: bool = False
    """Whether some were found by running a block, which transformers' plan says nothing or less of."""
    refused: str = ""
    """Why nothing is split though the model has a plan."""

    def proven_by(self, others: TensorRules) -> bool:
        """Whether what was tried out with other rules, those of a tiny copy, holds for these. Sizes that only seem to
        belong together may mislead a guess in one of the two."""
        return not self.guessed or self._outlines() <= others._outlines()

    def _beside(self, experts: Mapping[str, DividedExperts]) -> TensorRules:
        """The rules with those of experts that they leave whole, where their form says how to split them. Kinds whose
        experts stay whole have none: what else is split of such a layer does not matter, and the planner divides
        experts by TP with the rest of it."""

        def splits(kind: str, rules: tuple[Rule, ...]) -> bool:
            own = experts.get(kind)
            tables = {rule.path for rule in rules if isinstance(rule, Table)}
            return own is None or any(f"{own.path}.{name}" in tables for name in own.parameters)

        whole = {kind for kind, rules in self.blocks.items() if rules and not splits(kind, rules)}
        blocks = {
            kind: rules if kind not in whole else (*rules, *experts[kind].split) if experts[kind].split else ()
            for kind, rules in self.blocks.items()
        }
        if not any(blocks.values()):
            return TensorRules(refused=self.refused)
        return replace(
            self,
            blocks=blocks,
            divisible=self.divisible - whole,
            guessed=self.guessed or any(blocks[kind] for kind in whole),
        )

    def _outlines(self) -> set[frozenset[Rule]]:
        """The rules of each kind without its sizes."""
        return {frozenset(map(_without_sizes, rules)) for rules in self.blocks.values() if rules}


_FOUND: dict[Hashable, TensorRules] = {}
"""Of blocks that were watched in this process. To describe a model, its layers are made five times."""


def find_rules(
    model: nn.Module,
    anatomy: Anatomy,
    kinds: Sequence[str],
    calls: Sequence[Call],
    experts: Mapping[str, DividedExperts],
) -> TensorRules:
    """The rules of each kind of block; ``calls``: how the blocks are called; ``experts``: those of kinds that have
    some, with paths in their layers."""
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    try:
        said = {kind: block_rules(model, anatomy.name(index)) for kind, index in first.items()}
    except NoTensorParallelism as reason:
        return TensorRules(refused=str(reason))
    outlines = {
        kind: outline_of(model.get_submodule(anatomy.name(index)), calls[index]) for kind, index in first.items()
    }
    segments = [replace(anatomy.segment(index), blocks="", first=0, extra=None) for index in first.values()]
    key = tuple(
        (kind, outlines[kind], said[kind], experts.get(kind), own) for kind, own in zip(first, segments, strict=True)
    )
    if key not in _FOUND or None in outlines.values():
        runs = {kind: _Run(model, anatomy, calls[index], experts.get(kind)) for kind, index in first.items()}
        _FOUND[key] = _watched(runs, said)._beside(experts)
    return _FOUND[key]


def _watched(runs: Mapping[str, _Run], said: Mapping[str, tuple[Rule, ...]]) -> TensorRules:
    """What runs of the kinds of blocks show, beside what transformers' plan says of them."""
    found = dict(said)
    if not any(said.values()):
        found = {kind: tuple(chain(*run.found())) for kind, run in runs.items()}
    elif any(map(_gathered, said.values())):
        found = {kind: _split_further(rules, runs[kind].found()) for kind, rules in said.items()}
    if not any(found.values()):
        return TensorRules()
    guessed = found != said
    divisible = set()
    for kind, rules in found.items():
        run = runs[kind]
        found[kind] = run.with_inputs(rules)
        if run.divisible(found[kind]):
            divisible.add(kind)
    layers = {kind: rules_within("block", own) for kind, own in found.items()}
    return TensorRules(blocks=layers, divisible=frozenset(divisible), guessed=guessed)


def _gathered(rules: tuple[Rule, ...]) -> set[str]:
    """Projections whose outputs are put together at once, and those that take a part of them again."""
    return {
        rule.path
        for rule in rules
        if (isinstance(rule, Columns) and rule.gathered) or (isinstance(rule, Rows) and rule.takes_whole)
    }


def _split_further(said: tuple[Rule, ...], groups: Sequence[tuple[Rule, ...]]) -> tuple[Rule, ...]:
    """A plan's rules, but those of projections that it gathers (both halves of a gated feed-forward network in one
    weight) as a run showed them."""
    gathered = _gathered(said)
    better = [rule for group in groups if {rule.path for rule in group} <= gathered for rule in group]
    replaced = {rule.path for rule in better}
    return (*(rule for rule in said if rule.path not in replaced), *better)


def _without_sizes(rule: Rule) -> Rule:
    return replace(rule, heads=None, input=None) if isinstance(rule, Columns) else rule


class _Run:
    """A block on the meta device."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, call: Call, experts: DividedExperts | None) -> None:
        block: nn.Module = without_weights(model.get_submodule(anatomy.name(call.block)))
        if experts is not None:  # a loop over experts looks at values
            block.get_submodule(experts.path.removeprefix("block.")).forward = _weighted
        self._block = block.to("meta").float().eval()  # as calls are noted, whatever type the model has
        self._call = Call(call.block, *to_meta((call.args, call.kwargs)))
        self._segment = anatomy.segment(call.block)
        self._reads: _Reads | None = None

    def found(self) -> tuple[tuple[Rule, ...], ...]:
        """The rules that a run of the block shows, of projections that are split together."""
        return found_rules(self._block, self._call, self._segment.activations(self._call))

    def with_inputs(self, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """The rules with what the run shows; as they are where it fails: each projection then enters by itself."""
        columns, rows = ({rule.path for rule in rules if isinstance(rule, kind)} for kind in (Columns, Rows))
        reads = _Reads(self._block, frozenset(columns | rows), frozenset(columns))
        with suppress(Exception), torch.no_grad(), on_meta():  # of whatever kind: it comes from the block's own forward
            with reads.watching():
                self._block(*self._call.args, **self._call.kwargs)
            self._reads = reads
            return _with_inputs(rules, reads)
        return rules

    def divisible(self, rules: tuple[Rule, ...]) -> bool:
        """Whether the block runs on half of the tokens outside of its regions, in which is all that is split. One that
        also takes what an encoder made does not: nobody would divide that."""
        if self._segment.handed:
            return False
        hidden = self._segment.hidden(self._call)
        tokens = hidden.shape[1] if hidden.ndim > 2 else 1
        if self._reads is None or not _in_regions(rules) or tokens % 2:
            return False

        def halved(own: Any) -> Any:
            divided = isinstance(own, Tensor) and own.ndim > 1 and own.shape[1] == tokens
            return own.narrow(1, 0, tokens // 2) if divided else own

        regions = {rule.path: _within(rule.path, rules) for rule in rules if isinstance(rule, Region)}
        summed = [path for path, rows in regions.items() if rows]
        ended = tuple(f"{path}." for path in summed)
        summed += [rule.path for rule in rules if isinstance(rule, Rows) and not rule.path.startswith(ended)]
        for path in (*regions, *summed):
            made = self._reads.outputs[path]
            made = tree_map(halved, made) if path in summed else made
            self._block.get_submodule(path).forward = lambda *_, made=made, **__: made
        call = self._segment.called_with(self._call, (halved(hidden),))
        try:
            with torch.no_grad(), on_meta():
                self._block(*call.args, **call.kwargs)
        except Exception:  # of whatever kind, as above
            return False
        return True


def _weighted(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Stands for experts: made of all that they are made of, and of its shape."""
    return hidden * weights.sum(-1, keepdim=True)


def _within(region: str, rules: tuple[Rule, ...]) -> bool:
    """Whether a region ends with rows of its own; else what it returns is still split."""
    return any(isinstance(rule, Rows) and rule.path.startswith(f"{region}.") for rule in rules)


def _in_regions(rules: tuple[Rule, ...]) -> bool:
    """Whether all that is split is in regions, or sums what comes from them, so that what is outside may be divided
    along the sequence."""
    regions = tuple(f"{rule.path}." for rule in rules if isinstance(rule, Region))
    inside = Columns | Rows | PartialGradients | Table | Region | Whole
    return bool(regions) and all(
        isinstance(rule, inside)
        and (f"{rule.path}.".startswith(regions) or (isinstance(rule, Rows) and not rule.takes_whole))
        for rule in rules
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """A tensor was read."""

    tensors: frozenset[int]
    within: tuple[str, ...]
    """Paths of the modules that were running."""
    draws: bool
    """By something that draws random numbers."""
    split: bool
    """Whether what projections made that are split by columns is among it."""
    place: int
    """How many modules had been called before."""


@dataclass(slots=True)
class _Reads(TorchFunctionMode):
    """Watches one run of a block: which tensors its modules are called with, and who else reads those."""

    block: nn.Module
    projections: frozenset[str]
    """Paths of those whose reads do not count: the split ones."""
    columns: frozenset[str]
    """Of these, the ones that are split by columns."""
    _split: set[int] = field(default_factory=set)
    """Tensors that come from these."""
    _log: list[_Read] = field(default_factory=list)
    _calls: dict[str, tuple[int | None, str | None]] = field(default_factory=dict)
    """Of each module, the tensor it was called with first and that argument's name."""
    _order: list[str] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)
    """So that no two tensors have one identity."""
    _running: list[str] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    """What each module returned."""

    def __post_init__(self) -> None:
        TorchFunctionMode.__init__(self)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs meanwhile."""
        with ExitStack() as stack:
            for path, module in self.block.named_modules():
                if path:
                    hook = module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
                    stack.callback(hook.remove)
                    stack.callback(module.register_forward_hook(partial(self._leave, path)).remove)
            with self:
                yield

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append(path)
        self._order.append(path)
        given = next(((own, None) for own in args[:1]), None) or next(
            ((own, name) for name, own in kwargs.items() if isinstance(own, Tensor)), (None, None)
        )
        tensor, name = given
        if path not in self._calls:
            self._kept.append(tensor)
            self._calls[path] = (id(tensor) if isinstance(tensor, Tensor) else None, name)

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.remove(path)
        self.outputs[path] = output
        if path in self.columns:
            self._split.add(id(output))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        made = function(*args, **(kwargs or {}))
        if name not in LOOKS and not any(path in self.projections for path in self._running):
            tensors = frozenset(map(id, _tensors((args, kwargs))))
            split = not tensors.isdisjoint(self._split)
            self._kept += [args, kwargs, made]
            self._log.append(_Read(tensors, tuple(self._running), "dropout" in name, split, len(self._order)))
            self._split |= set(map(id, _tensors(made))) if split else set()
        return made

    def _partial_in(self, region: str, end: int) -> Iterator[Rule]:
        """Modules in a region with parameters of their own that run on split features (a norm of each head, an
        activation with a slope): plans do not name all of them."""
        parts = tuple(f"{path}." for path in self.projections)  # adapters, which are split with their projection
        for path in dict.fromkeys(self._order[:end]):
            apart = path not in self.projections and not path.startswith(parts)
            if path.startswith(f"{region}.") and apart and _owns(self.block.get_submodule(path)):
                yield PartialGradients(path)

    def input_of(self, path: str) -> int | None:
        """Which tensor the module of this path was called with."""
        return self._calls.get(path, (None, None))[0]

    def region_of(self, paths: Sequence[str], rows: Sequence[str]) -> tuple[Rule, ...]:
        """The region that projections of one tensor make up with the rows inside it, and what is whole in it; empty:
        somebody else reads the tensor there too."""
        if any(self._order.count(path) > 1 for path in paths):
            return ()  # with what an encoder made too, as attention to both at once does
        tensor = self.input_of(paths[0])
        around = [path.rpartition(".")[0] for path in paths]
        for path in parents(around[0]):
            called, name = self._calls.get(path, (None, None))
            if called != tensor or not all(f"{other}.".startswith(f"{path}.") for other in around):
                continue
            inside = [read for read in self._log if path in read.within]
            if any(tensor in read.tensors for read in inside):
                return ()
            ends = [self._order.index(row) for row in rows if row.startswith(f"{path}.") and row in self._order]
            end = max(ends, default=len(self._order))  # without rows of its own, what it returns is still split
            # What draws random numbers behind the last rows works on what is whole again.
            drawing = {read.within[-1] for read in inside if read.draws and read.place > end}
            if path in drawing or any(read.draws and not read.split and read.place <= end for read in inside):
                return ()
            argument = name or _first_argument(self.block.get_submodule(path))
            return (Region(path, (argument,)), *map(Whole, sorted(drawing)), *self._partial_in(path, end))
        return ()


def _tensors(values: Any) -> Iterator[Tensor]:
    return (own for own in tree_flatten(values)[0] if isinstance(own, Tensor))


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _first_argument(module: nn.Module) -> str:
    code = module.forward.__func__.__code__ if hasattr(module.forward, "__func__") else None
    return code.co_varnames[1] if code is not None else "hidden_states"


def _with_inputs(rules: tuple[Rule, ...], reads: _Reads) -> tuple[Rule, ...]:
    """The rules with what a run of the block showed: columns of one input together, regions where there are some."""
    columns = [rule for rule in rules if isinstance(rule, Columns)]
    rows = [rule.path for rule in rules if isinstance(rule, Rows) and not rule.takes_whole]
    together: dict[int, list[Columns]] = {}
    for rule in columns:
        tensor = reads.input_of(rule.path)
        if tensor is not None:
            together.setdefault(tensor, []).append(rule)
    found: dict[str, Columns] = {}
    regions: dict[str, tuple[Rule, ...]] = {}
    for number, group in enumerate(together.values()):
        found |= {rule.path: replace(rule, input=number) for rule in group}
        if not any(rule.gathered for rule in group):
            region = reads.region_of([rule.path for rule in group], rows)
            if region:
                regions[region[0].path] = region
    # A region's columns all read its input: another tensor's projection inside would wait for it in vain.
    for path in list(regions):
        inside = [rule for rule in found.values() if rule.path.startswith(f"{path}.")]
        if len({rule.input for rule in inside}) > 1 or len(inside) < sum(
            rule.path.startswith(f"{path}.") for rule in columns
        ):
            del regions[path]
    kept = [found.get(rule.path, rule) if isinstance(rule, Columns) else rule for rule in rules]
    known = {rule.path.rpartition(".")[0] for rule in kept if isinstance(rule, Table | PartialGradients)}
    more = [
        rule
        for region in regions.values()
        for rule in region
        if rule not in kept and not (isinstance(rule, PartialGradients) and rule.path in known)
    ]
    return (*kept, *more)
