"""Tensor parallelism on local weights (paper Section 3.1): a family's rules applied to one layer.

Stock projections are replaced by modules that hold this rank's part under the same parameter names; nothing in the
compute path is a DTensor. Weights are on the meta device at this point: only their shapes change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from galvatron.core.errors import InvalidInput
from galvatron.families.given import has_hooks, own_forward
from galvatron.families.layer import CrossEntropy, Layer
from galvatron.families.lora import Adapter, adapter_of, without_adapter
from galvatron.families.rules import (
    AddedBias,
    Attribute,
    Columns,
    Experts,
    PartialGradients,
    Region,
    Rows,
    Rule,
    SharedKey,
    Summed,
    Table,
    Vocabulary,
    VocabularyLoss,
    Whole,
)
from galvatron.runtime.data_parallel.shards import TensorSplit, part_of
from galvatron.runtime.tensor_parallel import operators
from galvatron.runtime.tensor_parallel.regions import Adapted, Entrance, Readers, SplitColumns, SplitRows
from galvatron.runtime.tensor_parallel.vocabulary import (
    Smoothing,
    SplitCrossEntropy,
    SplitEmbedding,
    split_lookup,
)

__all__ = ["SplitParameters", "TensorGroup", "cut", "split"]


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """The ranks that share one layer's weights, and how they work together."""

    group: ProcessGroup
    sequence: bool = False
    """Divide what would be replicated along the sequence."""
    on_enter: Callable[[], None] | None = None
    """Called when a split part begins, to draw other random numbers than the rest of the group."""
    on_leave: Callable[[], None] | None = None

    @property
    def degree(self) -> int:
        return self.group.size()

    @property
    def index(self) -> int:
        return self.group.rank()


@dataclass(frozen=True, kw_only=True)
class SplitParameters:
    """What became of a layer's parameters."""

    splits: dict[str, TensorSplit]
    """How each one was split; the others are whole."""
    partial: frozenset[str] = frozenset()
    """Of the whole ones, those of whose gradient each rank has a part."""


def split(
    layer: Layer, rules: Sequence[Rule], tensor: TensorGroup, shared: frozenset[str] = frozenset()
) -> SplitParameters:
    """Apply the layer's rules, or some of them. ``shared`` parameters are left whole."""
    splitter = _Splitter(layer, rules, tensor, shared)
    for rule in rules:
        match rule:
            case Columns():
                splitter.columns(rule)
            case Rows():
                splitter.rows(rule)
            case Vocabulary():
                splitter.vocabulary(rule)
            case Table():
                splitter.table(rule)
            case Attribute():
                splitter.attribute(rule)
            case VocabularyLoss():
                splitter.loss(rule)
            case Experts():
                splitter.experts(rule)
            case AddedBias():
                splitter.added_bias(rule)
            case SharedKey():
                splitter.shared_key(rule)
            case Summed():
                splitter.summed(rule)
            case Region() | Whole() | PartialGradients():
                pass
    for rule in rules:
        if isinstance(rule, Region):  # last: it must find the replaced projections inside it
            splitter.region(rule)
        elif isinstance(rule, Whole):
            splitter.whole(rule)
    splitter.readers()
    inside = tuple(f"{rule.path}." for rule in rules if isinstance(rule, PartialGradients | AddedBias))
    names = dict(layer.named_parameters())
    adapters = {id(own) for own in splitter.partial}
    return SplitParameters(
        splits={name: splitter.splits[own] for name, own in names.items() if own in splitter.splits},
        partial=frozenset(name for name, own in names.items() if f"{name}.".startswith(inside) or id(own) in adapters),
    )


class _Splitter:
    def __init__(self, layer: Layer, rules: Sequence[Rule], tensor: TensorGroup, shared: frozenset[str]) -> None:
        self.layer, self.tensor, self.shared = layer, tensor, shared
        self._rules = rules
        self.splits: dict[nn.Parameter, TensorSplit] = {}
        self._columns: dict[str, SplitColumns] = {}
        self.partial: list[Tensor] = []
        """Whole ones of adapters, of whose gradient each rank has a part."""
        self._words, self._vocabulary = range(0), 0

    def columns(self, rule: Columns) -> None:
        self._refuse_own(rule.path)
        path, adapter = self._adapted(rule.path)
        module = self.layer.get_submodule(path)
        transposed = not isinstance(module, nn.Linear)
        weight = self._cut(f"{path}.weight", 1 if transposed else 0, rule.parts)
        bias = self._cut(f"{path}.bias", 0, rule.parts)
        if adapter is not None:
            self._cut(f"{rule.path}.lora_B.default.weight", 0, rule.parts)
            self.partial.append(adapter.down.weight)  # each rank's gradient comes from its own rows of B
        assert weight is not None
        self._vocabulary = _outputs(module)
        self._words = part_of(self._vocabulary, self.tensor.index, self.tensor.degree)
        if rule.gathered:
            self._even(rule.path, _outputs(module))
        replacement = SplitColumns(weight, bias, self.tensor.group, transposed=transposed)
        replacement.gathered = rule.gathered
        self._columns[rule.path] = replacement
        self._replace(rule.path, replacement, adapter)

    def rows(self, rule: Rows) -> None:
        self._refuse_own(rule.path)
        path, adapter = self._adapted(rule.path)
        module = self.layer.get_submodule(path)
        transposed = not isinstance(module, nn.Linear)
        if rule.takes_whole:
            self._even(rule.path, self.layer.get_parameter(f"{path}.weight").shape[0 if transposed else 1])
        weight = self._cut(f"{path}.weight", 0 if transposed else 1)
        if adapter is not None:
            self._cut(f"{rule.path}.lora_A.default.weight", 1)
            self.partial.append(adapter.up.weight)  # each rank's gradient comes from its own columns of A
        assert weight is not None
        bias = module.bias
        assert bias is None or isinstance(bias, nn.Parameter)
        replacement = SplitRows(weight, bias, self.tensor.group, transposed=transposed)
        replacement.sequence, replacement.takes_whole = self.tensor.sequence, rule.takes_whole
        self._replace(rule.path, replacement, adapter)

    def _refuse_own(self, path: str) -> None:
        """Hooks and forwards of the user's: another module takes the place of this one."""
        module = self.layer.get_submodule(path)
        plain = without_adapter(module)
        own = "a hook" if has_hooks(module) or has_hooks(plain) else own_forward(plain)
        if own is not None:
            raise InvalidInput(
                f"layer {self.layer.kind!r}: {path} has {own}, which would not run where tensor parallelism splits "
                "the module; remove it, or plan without TP (--space dp+pp)"
            )

    def _adapted(self, path: str) -> tuple[str, Adapter | None]:
        """Where the projection of this path has its weight, and the adapter beside it."""
        module: Any = self.layer.get_submodule(path)
        adapter = adapter_of(module)
        if adapter is None:
            return path, None
        if any(not isinstance(dropout, nn.Identity) for dropout in module.lora_dropout.values()):
            raise InvalidInput(
                f"layer {self.layer.kind!r}: the adapter of {path} has dropout, with which tensor parallelism cannot "
                "run it; set lora_dropout to 0, or plan without TP (--space dp+pp)"
            )
        return f"{path}.base_layer", adapter

    def _replace(self, path: str, replacement: SplitColumns | SplitRows, adapter: Adapter | None) -> None:
        if adapter is None:
            self.layer.replace_module(path, replacement)
            return
        self.layer.replace_module(path, Adapted(replacement, adapter))

    def vocabulary(self, rule: Vocabulary) -> None:
        module = self.layer.get_submodule(rule.path)
        assert isinstance(module, nn.Embedding)
        weight = self._cut(f"{rule.path}.weight", 0)
        assert weight is not None
        words = part_of(module.num_embeddings, self.tensor.index, self.tensor.degree)
        if type(module) is nn.Embedding:
            self._refuse_own(rule.path)
            replacement = SplitEmbedding(weight, words, module, self.tensor.group)
            self.layer.replace_module(rule.path, replacement)
        else:  # its own forward does more than look up: it scales, for one
            split_lookup(module, words, self.tensor.group)

    def table(self, rule: Table) -> None:
        if rule.path in self.shared:
            return
        if rule.pairs:
            self._even(rule.path, rule.features(self.layer.get_parameter(rule.path).shape[rule.dim]))
        self._cut(rule.path, rule.dim, rule.parts)

    def attribute(self, rule: Attribute) -> None:
        owner, _, name = rule.path.rpartition(".")
        module = self.layer.get_submodule(owner)
        whole = getattr(module, name)
        if whole % self.tensor.degree:
            raise InvalidInput(
                f"layer {self.layer.kind!r}: {rule.path} is {whole}, which tensor parallelism of degree "
                f"{self.tensor.degree} does not divide; plan with a degree that does"
            )
        setattr(module, name, whole // self.tensor.degree)

    def loss(self, rule: VocabularyLoss) -> None:
        whole = self.layer.get_submodule(rule.path)
        assert isinstance(whole, CrossEntropy)
        smoothing = Smoothing(whole.smoothing, self._vocabulary)
        self.layer.replace_module(
            rule.path, SplitCrossEntropy(self._words, self._vocabulary, self.tensor.group, smoothing)
        )

    def experts(self, rule: Experts) -> None:
        group = self.tensor.group

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            def entered(value: Any) -> Any:
                inside = isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
                return operators.copy_to_region(value, group) if inside else value

            return tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}

        module = self.layer.get_submodule(rule.path)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        self.summed(Summed(rule.path))

    def added_bias(self, rule: AddedBias) -> None:
        owner, _, name = rule.path.rpartition(".")
        module = self.layer.get_submodule(owner)
        module.__class__ = _with_share(type(module), name, self.tensor.degree)

    def shared_key(self, rule: SharedKey) -> None:
        group = self.tensor.group

        def enter(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            rest, key = output.split([output.shape[-1] - rule.width, rule.width], dim=-1)
            return torch.cat([rest, operators.copy_to_region(key, group)], dim=-1)

        self.layer.get_submodule(rule.path).register_forward_hook(enter)

    def summed(self, rule: Summed) -> None:
        group = self.tensor.group
        self.layer.get_submodule(rule.path).register_forward_hook(
            lambda module, args, output: operators.reduce_from_region(output, group)
        )

    def readers(self) -> None:
        """Columns outside of regions enter by themselves, those of one input together."""
        regions = tuple(f"{rule.path}." for rule in self._rules if isinstance(rule, Region))
        together: dict[int | str, list[SplitColumns]] = {}
        for rule in self._rules:
            if isinstance(rule, Columns) and not (regions and f"{rule.path}.".startswith(regions)):
                key = rule.path if rule.input is None else rule.input
                together.setdefault(key, []).append(self._columns[rule.path])
        for members in together.values():
            readers = Readers(members)
            for member in members:
                member.readers = readers

    def _even(self, path: str, features: int) -> None:
        if features % self.tensor.degree:
            raise InvalidInput(
                f"layer {self.layer.kind!r}: {path} has {features} features, which tensor parallelism of degree "
                f"{self.tensor.degree} does not divide; plan with a degree that does"
            )

    def region(self, rule: Region) -> None:
        tensor = self.tensor
        inside = [
            column
            for column in self._rules
            if isinstance(column, Columns) and f"{column.path}.".startswith(f"{rule.path}.")
        ]
        readers = {
            argument: [
                self._columns[column.path] for column in inside if (column.reads or rule.arguments[0]) == argument
            ]
            for argument in rule.arguments
        }
        entrance = Entrance(
            tensor.group,
            {argument: columns for argument, columns in readers.items() if columns},
            sequence=tensor.sequence,
            on_enter=tensor.on_enter,
            on_leave=tensor.on_leave,
        )
        entrance.attach(self.layer.get_submodule(rule.path))

    def whole(self, rule: Whole) -> None:
        enter, leave = self.tensor.on_enter, self.tensor.on_leave
        if enter is None or leave is None:
            return
        module = self.layer.get_submodule(rule.path)
        module.register_forward_pre_hook(lambda *_: leave())
        module.register_forward_hook(lambda *_: enter())

    def _cut(self, name: str, dim: int, parts: int = 1) -> nn.Parameter | None:
        owner, _, attribute = name.rpartition(".")
        if getattr(self.layer.get_submodule(owner), attribute) is None:
            return None
        if self.layer.get_parameter(name) in self.splits:
            raise InvalidInput(
                f"layer {self.layer.kind!r}: {name} is the weight of another of its modules, too, which tensor "
                "parallelism cannot split twice; plan without TP (--space dp+pp)"
            )
        made = TensorSplit(dim=dim, index=self.tensor.index, degree=self.tensor.degree, parts=parts)
        local = cut(self.layer, name, made)
        self.splits[local] = made
        return local


def _with_share(kind: type[nn.Module], name: str, degree: int) -> type[nn.Module]:
    """A kind of module whose forward reads this rank's share of a parameter; all others (FSDP2) the parameter."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._adds = True
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            self._adds = False

    def read(self: Any) -> Tensor:
        own: Tensor = self._parameters[name]
        return own / degree if self._adds else own

    return type(kind.__name__, (kind,), {"_adds": False, "forward": forward, name: property(read)})


def cut(layer: Layer, name: str, split: TensorSplit) -> nn.Parameter:
    """Replace a parameter by this rank's part of it, without values yet."""
    parameter = layer.get_parameter(name)
    shape = list(parameter.shape)
    shape[split.dim] = len(split.positions(shape[split.dim]))
    empty: Tensor = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    local = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for module in layer.modules():  # a layer may know one parameter under two names
        for alias in [key for key, value in module._parameters.items() if value is parameter]:
            setattr(module, alias, local)
    return local


def _outputs(projection: nn.Module) -> int:
    """Output features of a whole ``nn.Linear`` or ``Conv1D``."""
    width = projection.out_features if isinstance(projection, nn.Linear) else projection.nf
    assert isinstance(width, int)
    return width
