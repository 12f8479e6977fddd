"""Models of your own: a TOML file that lists layers with their figures.

    name = "my-model"

    [[layers]]
    name = "block"
    count = 24
    parameters = 12_600_000
    forward_flops = 13.4e9
    activation_bytes = "64MiB"
    boundary_bytes = "2MiB"
    tensor_parallel = { heads = 16, sequence_length = 512 }

A layer with experts says after its own keys which part of its figures is theirs:

    [layers.experts]
    count = 8
    parameters = 8_400_000
    forward_flops = 4.4e9
    activation_bytes = "24MiB"
    dispatch_bytes = "4MiB"

Figures are for one sample in fp32; bf16 halves the sizes. Only layers with a ``sequence_length``, the tokens of their
activations, can be sequence-parallel. How attention is computed and whether there is dropout is in
the figures already. ``galvatron.families`` imports this module, and with it pydantic, only when such a file is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import naming, parse, read_text, validate
from galvatron.core.spec.figures import MOST_LAYERS
from galvatron.core.spec.model import Experts, LayerSpec, ModelSpec, Precision, TensorParallel, Training
from galvatron.core.units import parse_bytes

__all__ = ["custom_of_text", "read_custom"]

_LARGEST = 2**60
_LARGEST_SIZE = 2**50
_REPLICATED_BOUNDARIES = 4
"""Of a Transformer block's saved tensors, those the size of its boundary that tensor parallelism leaves whole: its
input, the inputs and outputs of its norms. Used where a file does not say how its activations split."""


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("a size such as 1048576 or '64MiB'")
    try:
        size = parse_bytes(value)
    except InvalidInput:
        raise ValueError("a size such as 1048576 or '64MiB', finite and not negative") from None
    if size > _LARGEST_SIZE:
        raise ValueError(f"a size of at most {_LARGEST_SIZE} bytes")
    return size


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise ValueError(f"a whole number from 0 to {_LARGEST}")
    if value != int(value):
        raise ValueError("a whole number")
    return int(value)


_Size = Annotated[int, BeforeValidator(_size)]
_Count = Annotated[int, BeforeValidator(_count)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _TensorParallelEntry(_Strict):
    heads: Annotated[int, Field(ge=1)] | None = None
    kv_heads: Annotated[int, Field(ge=1)] | None = None
    forward_collectives: Annotated[int, Field(ge=0, le=100)] = 2
    backward_collectives: Annotated[int, Field(ge=0, le=100)] = 2
    message_bytes: _Size | None = None
    sequence_length: Annotated[int, Field(ge=1)] | None = None


class _ExpertsEntry(_Strict):
    count: Annotated[int, Field(ge=1, le=1_000_000)]
    parameters: _Count
    forward_flops: _Count
    activation_bytes: _Size
    replicated_activation_bytes: _Size = 0
    dispatch_bytes: _Size
    divides: list[Annotated[int, Field(ge=1)]] = []
    forward_collectives: Annotated[int, Field(ge=0, le=100)] = 1
    backward_collectives: Annotated[int, Field(ge=0, le=100)] = 1
    imbalance: Annotated[float, Field(ge=1, le=1000)] = 1.0

    def spec(self, precision: Precision) -> Experts:
        return Experts(
            count=self.count,
            parameters=self.parameters,
            forward_flops=self.forward_flops,
            activation_bytes=_scaled(self.activation_bytes, precision),
            replicated_activation_bytes=_scaled(self.replicated_activation_bytes, precision),
            dispatch_bytes=_scaled(self.dispatch_bytes, precision),
            divides=tuple(self.divides),
            forward_collectives=self.forward_collectives,
            backward_collectives=self.backward_collectives,
            imbalance=float(self.imbalance),
        )


class _LayerEntry(_Strict):
    name: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    parameters: _Count
    tied_parameters: _Count = 0
    replicated_parameters: _Count = 0
    forward_flops: _Count
    activation_bytes: _Size | None = None
    split_activation_bytes: _Size | None = None
    replicated_activation_bytes: _Size | None = None
    boundary_bytes: _Size
    transient_bytes: _Size = 0
    tensor_parallel: _TensorParallelEntry | None = None
    experts: _ExpertsEntry | None = None

    @model_validator(mode="after")
    def _consistent(self) -> _LayerEntry:
        parts = (self.split_activation_bytes, self.replicated_activation_bytes)
        if (self.activation_bytes is None) == (parts == (None, None)):
            raise ValueError(
                "either activation_bytes, or split_activation_bytes and replicated_activation_bytes in it, not both"
            )
        for field, value in (("tied", self.tied_parameters), ("replicated", self.replicated_parameters)):
            if value > self.parameters:
                raise ValueError(
                    f"one whose {field}_parameters ({value}) are at most its parameters ({self.parameters})"
                )
        return self

    def spec(self, precision: Precision) -> LayerSpec:
        def scaled(size: int) -> int:
            return _scaled(size, precision)

        if self.activation_bytes is None:
            split, replicated = self.split_activation_bytes or 0, self.replicated_activation_bytes or 0
        else:
            replicated = min(self.activation_bytes, _REPLICATED_BOUNDARIES * self.boundary_bytes)
            split = self.activation_bytes - replicated
        parameters, parallel = self.replicated_parameters, None
        if self.tensor_parallel is None:
            inside = self.experts.activation_bytes if self.experts else 0  # TP of experts divides it
            parameters, split, replicated = self.parameters, inside, split + replicated - inside
        else:
            message, length = self.tensor_parallel.message_bytes, self.tensor_parallel.sequence_length
            parallel = TensorParallel(
                divides=tuple(count for count in (self.tensor_parallel.heads, self.tensor_parallel.kv_heads) if count),
                forward_collectives=self.tensor_parallel.forward_collectives,
                backward_collectives=self.tensor_parallel.backward_collectives,
                message_bytes=scaled(self.boundary_bytes if message is None else message),
                sequence_divides=() if length is None else (length,),
            )
        return LayerSpec(
            name=self.name,
            parameters=self.parameters,
            tied_parameters=self.tied_parameters,
            replicated_parameters=parameters,
            forward_flops=self.forward_flops,
            split_activation_bytes=scaled(split),
            replicated_activation_bytes=scaled(replicated),
            boundary_bytes=scaled(self.boundary_bytes),
            transient_bytes=scaled(self.transient_bytes),
            tensor_parallel=parallel,
            experts=None if self.experts is None else self.experts.spec(precision),
        )


def _scaled(size: int, precision: Precision) -> int:
    return -(-size * precision.bytes // Precision.FP32.bytes)


class _ModelEntry(_Strict):
    name: Annotated[str, Field(min_length=1)]
    layers: Annotated[list[_LayerEntry], Field(min_length=1)]


def read_custom(path: Path, training: Training) -> ModelSpec:
    """Read a model file."""
    return custom_of_text(read_text(path, "a model in TOML"), str(path), training)


def custom_of_text(text: str, file: str, training: Training) -> ModelSpec:
    """The model in the text of such a file, whose name is for errors."""
    entry = validate(_ModelEntry, parse(text, file, "TOML"), file)
    if training.sequence_length is not None:
        raise InvalidInput(
            f"{file}: sequence length {training.sequence_length} was given, but this model's figures are for the one "
            "sample size its author measured; leave it out"
        )
    with naming(file):
        layers = [layer.spec(training.precision) for layer in entry.layers]
    counts = [layer.count for layer in entry.layers]
    if sum(counts) > MOST_LAYERS:
        raise InvalidInput(f"{file}: its counts make {sum(counts)} layers; expected at most {MOST_LAYERS}")
    return ModelSpec(
        name=entry.name,
        family="custom",
        layers=tuple(spec for spec, count in zip(layers, counts, strict=True) for _ in range(count)),
        training=training,
    )
