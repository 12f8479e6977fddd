"""Cheap weights: every shape a model asks for, from next to no memory, in numbers that are good to compute with."""

from __future__ import annotations

import torch

from galvatron.core.spec import Training
from galvatron.families.build import build_meta
from galvatron.families.registry import layered_model
from galvatron.measure.rehearsal.weights import CheapWeights
from galvatron.runtime.data_parallel.shards import ParameterShard, TensorSplit


def _weights(hidden: int) -> tuple[CheapWeights, list[dict[str, torch.Size]]]:
    config = {"model_type": "bert", "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = layered_model(build_meta(config, Training()))
    return CheapWeights(model), [{name: own.shape for name, own in layer.named_parameters()} for layer in model.layers]


def test_shapes_are_the_layers_own() -> None:
    weights, expected = _weights(64)
    for index, shapes in enumerate(expected):
        assert {name: tensor.shape for name, tensor in weights.tensors(index).items()} == shapes


def test_memory_grows_with_the_sides_of_the_largest_matrix_only() -> None:
    weights, expected = _weights(4096)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for index in range(len(expected))
        for tensor in weights.tensors(index).values()
    }
    assert sum(storages.values()) < 2 * 4 * 3 * 30522
    assert sum(shape.numel() for shapes in expected for shape in shapes.values()) > 10**8


def test_a_ranks_part_is_an_ordinary_tensor_of_varied_numbers() -> None:
    weights, _ = _weights(64)
    whole = weights.tensors(1)["block.intermediate.dense.weight"]
    shard = ParameterShard(tuple(whole.shape), (TensorSplit(dim=0, index=1, degree=2),))
    part = shard.take(whole).to("cpu", torch.float32, copy=True)
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.numel() * 4
    assert part.isfinite().all()
    assert 0.01 < float(part.std()) < 0.03
    assert torch.linalg.matrix_rank(part) > 32
