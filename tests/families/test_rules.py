"""The tensor-parallel rules, applied by hand to two copies of a model that meet where the rules say outputs are summed.

The copies run in two threads of one process; forward only. (What the runtime does with rules is tested there.)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stock_models import CONFIGS, batches, stock_model
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from galvatron.families.layer import CrossEntropy, Layer, LayeredModel
from galvatron.families.registry import layered_model
from galvatron.families.rules import Attribute, Columns, Region, Rows, Table, Vocabulary, VocabularyLoss, Whole

_RANKS = 2


class _Meeting:
    """Where the ranks exchange tensors."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(_RANKS, timeout=60)
        self._brought: list[Tensor] = [torch.empty(0)] * _RANKS

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self._brought[rank] = tensor
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        self._barrier.abort()


class _Split(nn.Module):
    """A module of one rank, followed or preceded by what the ranks do together."""

    def __init__(self, forward: Callable[..., Tensor], weight: Tensor) -> None:
        super().__init__()
        self.run, self.weight = forward, weight

    def forward(self, *args: Any) -> Tensor:
        return self.run(*args)


def _split(layer: Layer, rank: int, meeting: _Meeting) -> None:
    for rule in layer.rules:
        path, _, name = rule.path.rpartition(".")
        parent: Any = layer.get_submodule(path)
        module = getattr(parent, name)
        match rule:
            case Columns(parts=parts):
                dim = 1 if isinstance(module, Conv1D) else 0
                pieces = [whole.chunk(_RANKS, dim)[rank] for whole in module.weight.chunk(parts, dim)]
                module.weight = nn.Parameter(torch.cat(pieces, dim))
                if module.bias is not None:
                    shares = [whole.chunk(_RANKS)[rank] for whole in module.bias.chunk(parts)]
                    module.bias = nn.Parameter(torch.cat(shares))
                if isinstance(module, Conv1D):
                    module.nf = module.weight.shape[1]
            case Rows():
                weight = (module.weight.t() if isinstance(module, Conv1D) else module.weight).chunk(_RANKS, 1)[rank]
                setattr(parent, name, _Split(_rows(weight, module.bias, rank, meeting), weight))
            case Vocabulary():
                setattr(parent, name, _Split(_vocabulary(module, rank, meeting), module.weight))
            case Table(dim=dim):
                setattr(parent, name, nn.Parameter(module.chunk(_RANKS, dim)[rank]))
            case Attribute():
                setattr(parent, name, module // _RANKS)
            case VocabularyLoss():
                assert isinstance(module, CrossEntropy)
                setattr(parent, name, _Split(_loss(module, rank, meeting), torch.empty(0)))
            case Region() | Whole():
                assert isinstance(module, nn.Module)


def _rows(weight: Tensor, bias: Tensor | None, rank: int, meeting: _Meeting) -> Callable[..., Tensor]:
    def run(hidden: Tensor) -> Tensor:
        summed = torch.stack(meeting.exchange(rank, functional.linear(hidden, weight))).sum(0)
        return summed if bias is None else summed + bias

    return run


def _vocabulary(module: nn.Embedding, rank: int, meeting: _Meeting) -> Callable[..., Tensor]:
    share = module.num_embeddings // _RANKS

    def run(ids: Tensor) -> Tensor:
        mine = (ids // share == rank)[..., None]
        return torch.stack(meeting.exchange(rank, torch.where(mine, module(ids), 0))).sum(0)

    return run


def _loss(module: CrossEntropy, rank: int, meeting: _Meeting) -> Callable[..., Tensor]:
    def run(logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = module(torch.cat(meeting.exchange(rank, logits), -1), labels)
        return loss

    return run


def _run(layered: LayeredModel, batch: dict[str, Tensor]) -> Tensor:
    activations: tuple[Tensor, ...] = ()
    context = layered.context(batch, torch.float64)
    for layer in layered.layers:
        activations = layer(activations, context)
    return activations[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_compute_what_one_does(name: str, attention: str) -> None:
    model = stock_model(name, attention)
    batch = list(batches(layered_model(model)).values())[-1]
    expected = _run(layered_model(model), batch).detach()
    meeting, found = _Meeting(), [torch.empty(0)] * _RANKS

    def work(rank: int) -> None:
        try:
            layered = layered_model(copy.deepcopy(model))
            for layer in layered.layers:
                _split(layer, rank, meeting)
            with torch.no_grad():
                found[rank] = _run(layered, batch)
        except BaseException:
            meeting.leave()
            raise

    ranks = [threading.Thread(target=work, args=(rank,)) for rank in range(_RANKS)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    torch.testing.assert_close(found, [expected] * _RANKS, rtol=1e-10, atol=1e-10)
