"""The systems that ``overhead.py`` compares: in each pair ours first, then PyTorch's own program for the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

import galvatron
from galvatron.core.spec import GPIPE, Precision, Training
from galvatron.families import load_cluster
from galvatron.families.bert.facts import Bert
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from sizes import Size, Step

_RATE = 1e-4
_MICRO_BATCHES = 8
"""Of the pipelines."""


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _model(size: Size, *, tied: bool = True) -> Any:
    fields = size.config(tied=tied)
    del fields["model_type"], fields["architectures"]
    torch.manual_seed(0)
    with _device():
        stock: Any = BertForMaskedLM
        model = stock._from_config(BertConfig(**fields), attn_implementation="sdpa")
    return model.train()


def _batch(size: Size, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(size.vocabulary, (rows, size.length), generator=generator)
    masked = torch.rand(ids.shape, generator=generator) < 0.15
    return {"input_ids": ids, "labels": torch.where(masked, ids, -100)}


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=_RATE, fused=True)


# Ours


def _ours(stages: Callable[[Size], list[list[str]]], size: Size, *, tied: bool = True, micro_batches: int = 1) -> Step:
    return _run_plan(_plan(size, stages(size), tied=tied, micro_batches=micro_batches), size, tied=tied)


def _plan(
    size: Size, stages: list[list[str]], *, tied: bool, micro_batches: int, precision: Precision = Precision.FP32
) -> galvatron.Plan:
    architecture = Bert(
        hidden=size.hidden,
        layers=size.layers,
        heads=size.heads,
        inner=4 * size.hidden,
        vocabulary=size.vocabulary,
        positions=size.length,
        tied=tied,
    )
    cluster = load_cluster("a100-8")
    devices = galvatron.Strategy.parse(stages[0][0]).devices * len(stages)
    levels = (replace(cluster.levels[0], units=devices),) if devices > 1 else ()
    request = Request(
        model=architecture.spec("bert", Training(precision=precision, dropout=False)),
        cluster=replace(cluster, levels=levels),
        batch=size.batch,
        schedule=GPIPE,
    )
    return priced(request, stages, micro_batches=micro_batches)


def _run_plan(plan: galvatron.Plan, size: Size, *, tied: bool) -> Step:
    model = galvatron.parallelize(_model(size, tied=tied), plan, device=_device())
    optimizer = model.optimizer(torch.optim.AdamW, lr=_RATE)
    batch = _batch(size, size.batch)

    def step() -> None:
        model.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _everywhere(strategy: str, size: Size) -> list[list[str]]:
    return [[strategy] * (size.layers + 2)]


def _even_stages(size: Size) -> list[list[str]]:
    """A stage a rank: the same number of blocks in each, embedding and head at the ends."""
    world = dist.get_world_size()
    blocks = [["single"] * (size.layers // world) for _ in range(world)]
    blocks[0].insert(0, "single")
    blocks[-1].append("single")
    return blocks


def _ours_in_bf16(size: Size) -> Step:
    plan = _plan(size, _everywhere("single", size), tied=True, micro_batches=1, precision=Precision.BF16)
    return _run_plan(plan, size, tied=True)


# PyTorch's own


def _rows_of_rank(size: Size) -> dict[str, Tensor]:
    rank, each = dist.get_rank(), size.batch // dist.get_world_size()
    whole = _batch(size, size.batch)
    return {name: tensor[rank * each : (rank + 1) * each].to(_device()) for name, tensor in whole.items()}


def _stock_step(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer, context: Any) -> Step:
    def step() -> None:
        with context():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ddp(size: Size) -> Step:
    model = DistributedDataParallel(_model(size), gradient_as_bucket_view=True)
    return _stock_step(model, _rows_of_rank(size), _adam(model.parameters()), nullcontext)


def _fsdp2(size: Size) -> Step:
    model = _model(size)
    for layer in model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    return _stock_step(model, _rows_of_rank(size), _adam(model.parameters()), nullcontext)


def _dtensor(size: Size) -> Step:
    model = _model(size, tied=False)
    mesh = init_device_mesh(_device().type, (dist.get_world_size(),))
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    block = {
        "attention.self": whole,
        "attention.self.query": ColwiseParallel(),
        "attention.self.key": ColwiseParallel(),
        "attention.self.value": ColwiseParallel(),
        "attention.output.dense": RowwiseParallel(),
        "intermediate.dense": ColwiseParallel(),
        "output.dense": RowwiseParallel(),
    }
    for layer in model.bert.encoder.layer:
        parallelize_module(layer, mesh, block)
    ends = {
        "bert.embeddings.word_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "cls.predictions.decoder": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    batch = {name: tensor.to(_device()) for name, tensor in _batch(size, size.batch).items()}
    # A fused step takes distributed and plain parameters in groups of their own.
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole_ones = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    optimizer = _adam([{"params": split}, {"params": whole_ones}])

    def step() -> None:
        logits = model(input_ids=batch["input_ids"]).logits
        with loss_parallel():
            loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Part(nn.Module):
    """One pipeline stage of a stock BERT."""

    def __init__(self, model: BertForMaskedLM, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.bert.encoder.layer) // stages
        self.embeddings = model.bert.embeddings if stage == 0 else None
        self.blocks = nn.ModuleList(model.bert.encoder.layer[stage * each : (stage + 1) * each])
        self.head = model.cls if stage == stages - 1 else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embeddings is not None:
            hidden = self.embeddings(input_ids=hidden)
        for block in self.blocks:
            output = block(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden if self.head is None else self.head(hidden)


def _pipelining(size: Size) -> Step:
    rank, world = dist.get_rank(), dist.get_world_size()
    part = _Part(_model(size, tied=False), rank, world)
    stage = PipelineStage(part, rank, world, _device())
    batch = {name: tensor.to(_device()) for name, tensor in _batch(size, size.batch).items()}
    targets = int((batch["labels"] != -100).sum())

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        summed = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return summed / targets

    schedule = ScheduleGPipe(stage, n_microbatches=_MICRO_BATCHES, loss_fn=loss, scale_grads=False)
    optimizer = _adam(part.parameters())

    def step() -> None:
        inputs = (batch["input_ids"],) if rank == 0 else ()
        schedule.step(*inputs, target=batch["labels"] if rank == world - 1 else None)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _bare_autocast(size: Size) -> Step:
    model = _model(size)
    context = partial(torch.autocast, _device().type, torch.bfloat16)
    return _stock_step(model, _rows_of_rank(size), _adam(model.parameters()), context)


def _bare_bf16(size: Size) -> Step:
    model: nn.Module = _model(size).bfloat16()
    return _stock_step(model, _rows_of_rank(size), _adam(model.parameters()), nullcontext)


PAIRS: dict[str, dict[str, Callable[[Size], Step]]] = {
    "dp": {"ours": partial(_ours, partial(_everywhere, "dp8")), "DDP": _ddp},
    "sdp": {"ours": partial(_ours, partial(_everywhere, "sdp8")), "FSDP2": _fsdp2},
    "tp": {"ours": partial(_ours, partial(_everywhere, "tp8"), tied=False), "DTensor": _dtensor},
    "pp": {"ours": partial(_ours, _even_stages, tied=False, micro_batches=_MICRO_BATCHES), "pipelining": _pipelining},
    "one": {"ours": _ours_in_bf16, "autocast": _bare_autocast, "pure bf16": _bare_bf16},
}
