"""The oracle of the runtime: the stock model trained in one process by plain PyTorch."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig
from transformers.utils import logging

from galvatron.core.spec import Attention, Strategy, Training
from galvatron.families.build import build_meta
from galvatron.families.layer import IGNORED
from galvatron.families.registry import layered_model

__all__ = ["Case", "Record", "batches", "first_weights", "single_process", "stock_loss", "stock_model", "trained"]

logging.disable_progress_bar()

_CLASSES = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "swin": "SwinForImageClassification",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a plan for it and how to train."""

    config: dict[str, Any]
    stages: list[list[str]]
    batch: int = 16
    micro_batches: int = 1
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float64
    steps: int = 2
    """The second has weights, moments and gradients that the first left."""
    clip: float | None = None
    padding: bool = False
    """Samples of different lengths, with all optional inputs of the family; of token models."""
    learning_rate: float = 1e-3
    training: Training = field(default_factory=lambda: Training(dropout=False))
    seed: int = 0

    @property
    def devices(self) -> int:
        return sum(Strategy.parse(stage[0]).devices for stage in self.stages)

    @property
    def epsilon(self) -> float:
        """Of Adam. The key bias of attention has a gradient of zero: smaller, this would turn rounding into steps."""
        return 1e-6 if self.dtype == torch.float64 else 1e-4

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Besides the learning rate."""
        return {"momentum": 0.9} if self.training.optimizer == "sgd" else {"eps": self.epsilon}

    @property
    def fp32_inside(self) -> bool:
        """Whether the stock model computes some things in fp32 whatever its type, which rounding moves by 1e-8."""
        return False

    @property
    def length(self) -> int | None:
        """Tokens a sample; images have none."""
        return None if "image_size" in self.config else 8

    def complete(self, batch: dict[str, Tensor], generator: torch.Generator) -> None:
        """Add to a batch what is special about the case's."""
        if self.padding:
            _pad(self.config["model_type"], batch, generator)

    @property
    def key(self) -> str:
        """All that a single process depends on."""
        kept = {own.name: getattr(self, own.name) for own in fields(self) if own.name not in _OF_THE_PLAN}
        return json.dumps(kept, default=str, sort_keys=True)


_OF_THE_PLAN = {"stages", "micro_batches", "schedule"}


@dataclass(frozen=True, slots=True)
class Record:
    """What training gave, whole and in the stock model's names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    parameters: dict[str, Tensor]
    """After the last step."""


def batches(case: Case, steps: int | None = None) -> list[dict[str, Tensor]]:
    """Random batches, the same in every process; drawn once for all plans of the same model."""
    key = f"{steps} {case.key}"
    if key not in _drawn:
        _drawn[key] = _draw(case, steps or case.steps)
    return [dict(batch) for batch in _drawn[key]]


_drawn: dict[str, list[dict[str, Tensor]]] = {}


def _draw(case: Case, steps: int) -> list[dict[str, Tensor]]:
    model = layered_model(build_meta(case.config, case.training))
    generator = torch.Generator().manual_seed(case.seed + 1)
    made = []
    for _ in range(steps):
        batch = model.example(case.batch, case.length, generator)
        case.complete(batch, generator)
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                batch[name] = tensor.to(case.dtype if case.dtype == torch.float64 else torch.float32)
        made.append(batch)
    return made


def _pad(family: str, batch: dict[str, Tensor], generator: torch.Generator) -> None:
    """Samples of different lengths, and what else a batch of the family may have; targets end where samples do."""
    rows, length = batch["input_ids"].shape

    def padding() -> Tensor:
        kept = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
        return (torch.arange(length)[None] < kept).long()

    batch["attention_mask"] = mask = padding()
    if family == "t5":
        batch["decoder_attention_mask"] = mask = padding()
    elif family == "bert":
        batch["token_type_ids"] = torch.randint(2, (rows, length), generator=generator)
    if family in ("bert", "gpt2", "llama"):
        batch["position_ids"] = torch.arange(length) + torch.randint(length, (rows, 1), generator=generator)
    batch["labels"] = torch.where(mask.bool(), batch["labels"], IGNORED)


def stock_model(case: Case) -> nn.Module:
    """A stock model with every parameter random, so that none of them is hidden by being zero or one."""
    config = AutoConfig.for_model(**case.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        attention = "sdpa" if case.training.attention is Attention.FUSED else "eager"
        name = _CLASSES.get(config.model_type) or case.config["architectures"][0]
        model: nn.Module = getattr(transformers, name)._from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def first_weights(case: Case) -> Path:
    """A folder with the weights that training starts from."""
    folder = _scratch() / str(abs(hash((json.dumps(case.config), case.seed))))
    if not folder.exists():
        stock_model(case).save_pretrained(folder)  # type: ignore[operator]
    return folder


@cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="weights-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def stock_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The stock model's own loss; of causal models in full precision, which the stock loss would round to fp32."""
    output = model(**batch)
    loss: Tensor = output.loss
    if loss.dtype == output.logits.dtype:
        return loss
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    torch.testing.assert_close(loss, functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).to(loss.dtype))
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


_records: dict[str, Record] = {}


def single_process(case: Case) -> Record:
    """Train the stock model with its own forward and loss; done once for all plans of the same model."""
    if case.key not in _records:
        _records[case.key] = _trained(case)
    return _records[case.key]


def _trained(case: Case) -> Record:
    return trained(case, stock_model(case))


def trained(
    case: Case, model: nn.Module, loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor] = stock_loss
) -> Record:
    """Train a stock model on the case's batches."""
    model = model.to(case.dtype)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[case.training.optimizer]
    optimizer = kind(model.parameters(), lr=case.learning_rate, **case.optimizer_options)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches(case)):
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        if step == 0:
            gradients = {
                name: torch.zeros_like(own) if own.grad is None else own.grad.clone()
                for name, own in model.named_parameters()
            }
        if case.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = {name: own.detach().clone() for name, own in model.named_parameters()}
    return Record(losses, norms, gradients, parameters)
