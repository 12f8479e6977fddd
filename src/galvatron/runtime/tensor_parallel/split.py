"""Tensor parallelism on local weights (paper Section 3.1): a family's rules applied to one layer.

Stock projections are replaced by modules that hold this rank's part under the same parameter names; nothing in the
compute path is a DTensor. Weights are on the meta device at this point: only their shapes change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import Layer
from galvatron.families.rules import Attribute, Columns, Region, Rows, Table, Vocabulary, VocabularyLoss, Whole
from galvatron.runtime.data_parallel.shards import TensorSplit, part_of
from galvatron.runtime.tensor_parallel.regions import Entrance, SplitColumns, SplitRows
from galvatron.runtime.tensor_parallel.vocabulary import SplitCrossEntropy, SplitEmbedding

__all__ = ["TensorGroup", "split"]


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


def split(layer: Layer, tensor: TensorGroup, shared: frozenset[str] = frozenset()) -> dict[str, TensorSplit]:
    """Apply the layer's rules; returns how each split parameter was cut. ``shared`` parameters are left whole."""
    splitter = _Splitter(layer, tensor, shared)
    for rule in layer.rules:
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
            case Region() | Whole():
                pass
    for rule in layer.rules:
        if isinstance(rule, Region):  # last: it must find the replaced projections inside it
            splitter.region(rule)
        elif isinstance(rule, Whole):
            splitter.whole(rule)
    return {
        name: splitter.splits[parameter] for name, parameter in layer.named_parameters() if parameter in splitter.splits
    }


class _Splitter:
    def __init__(self, layer: Layer, tensor: TensorGroup, shared: frozenset[str]) -> None:
        self.layer, self.tensor, self.shared = layer, tensor, shared
        self.splits: dict[nn.Parameter, TensorSplit] = {}
        self._columns: dict[str, SplitColumns] = {}
        self._words = range(0)

    def columns(self, rule: Columns) -> None:
        module = self.layer.get_submodule(rule.path)
        transposed = not isinstance(module, nn.Linear)
        weight = self._cut(f"{rule.path}.weight", 1 if transposed else 0, rule.parts)
        bias = self._cut(f"{rule.path}.bias", 0, rule.parts)
        assert weight is not None
        self._words = part_of(_outputs(module), self.tensor.index, self.tensor.degree)
        self._columns[rule.path] = SplitColumns(weight, bias, self.tensor.group, transposed=transposed)
        self._replace(rule.path, self._columns[rule.path])

    def rows(self, rule: Rows) -> None:
        module = self.layer.get_submodule(rule.path)
        transposed = not isinstance(module, nn.Linear)
        weight = self._cut(f"{rule.path}.weight", 0 if transposed else 1)
        assert weight is not None
        bias = module.bias
        assert bias is None or isinstance(bias, nn.Parameter)
        replacement = SplitRows(weight, bias, self.tensor.group, transposed=transposed)
        replacement.sequence = self.tensor.sequence
        self._replace(rule.path, replacement)

    def vocabulary(self, rule: Vocabulary) -> None:
        module = self.layer.get_submodule(rule.path)
        assert isinstance(module, nn.Embedding)
        weight = self._cut(f"{rule.path}.weight", 0)
        assert weight is not None
        words = part_of(module.num_embeddings, self.tensor.index, self.tensor.degree)
        self._replace(rule.path, SplitEmbedding(weight, words, module.padding_idx, self.tensor.group))

    def table(self, rule: Table) -> None:
        if rule.path in self.shared:
            return
        self._cut(rule.path, rule.dim)

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
        self._replace(rule.path, SplitCrossEntropy(self._words, self.tensor.group))

    def region(self, rule: Region) -> None:
        tensor = self.tensor
        inside = [
            column
            for column in self.layer.rules
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
        parameter = getattr(self.layer.get_submodule(owner), attribute)
        if parameter is None:
            return None
        cut = TensorSplit(dim=dim, index=self.tensor.index, degree=self.tensor.degree, parts=parts)
        shape = list(parameter.shape)
        shape[dim] = len(cut.positions(shape[dim]))
        empty: Tensor = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        local = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for module in self.layer.modules():  # a layer may know one parameter under two names
            for alias in [key for key, value in module._parameters.items() if value is parameter]:
                setattr(module, alias, local)
        self.splits[local] = cut
        return local

    def _replace(self, path: str, module: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(self.layer.get_submodule(owner), name, module)


def _outputs(projection: nn.Module) -> int:
    """Output features of a whole ``nn.Linear`` or ``Conv1D``."""
    width = projection.out_features if isinstance(projection, nn.Linear) else projection.nf
    assert isinstance(width, int)
    return width
