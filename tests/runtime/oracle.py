"""The oracle of the runtime: the stock model trained in one process by plain PyTorch, and how to compare with it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig

import galvatron
from galvatron.cost import Schedule
from galvatron.models.build import build_meta
from galvatron.models.registry import cut
from galvatron.plans.by_hand import priced
from galvatron.plans.planner import Request
from galvatron.spec import Attention, Cluster, Training
from galvatron.zoo import load_cluster, load_model

_CLASSES = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "swin": "SwinForImageClassification",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
EPSILON = 1e-6
"""Of Adam: the key bias of attention has a true gradient of zero, which a smaller one would turn into noise."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a plan for it and how to train."""

    config: dict[str, Any]
    stages: list[list[str]]
    batch: int = 16
    micro_batches: int = 1
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float64
    steps: int = 3
    clip: float | None = None
    length: int | None = 8
    padding: bool = False
    learning_rate: float = 1e-3
    training: Training = field(default_factory=lambda: Training(dropout=False))
    seed: int = 0


@dataclass
class Record:
    """What training gave, whole and in the stock model's names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    parameters: dict[str, Tensor]
    """After the last step."""


def batches(case: Case) -> list[dict[str, Tensor]]:
    """Random batches, the same in every process."""
    model = cut(build_meta(case.config, case.training))
    generator = torch.Generator().manual_seed(case.seed + 1)
    made = []
    for _ in range(case.steps):
        batch = model.example(case.batch, case.length, generator)
        if case.padding and "input_ids" in batch:
            length = batch["input_ids"].shape[1]
            kept = torch.randint(length // 2, length + 1, (case.batch, 1), generator=generator)
            batch["attention_mask"] = (torch.arange(length)[None] < kept).long()
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                batch[name] = tensor.to(case.dtype if case.dtype == torch.float64 else torch.float32)
        made.append(batch)
    return made


def stock_model(case: Case) -> nn.Module:
    """A stock model with every parameter random, so that none of them is hidden by being zero or one."""
    config = AutoConfig.for_model(**case.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        attention = "sdpa" if case.training.attention is Attention.FUSED else "eager"
        model: nn.Module = getattr(transformers, _CLASSES[config.model_type])._from_config(
            config, attn_implementation=attention
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def stock_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The stock model's own loss; of causal models in full precision, which the stock loss would round to fp32."""
    output = model(**batch)
    loss: Tensor = output.loss
    if loss.dtype == output.logits.dtype:
        return loss
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    torch.testing.assert_close(loss, functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).to(loss.dtype))
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def single_process(case: Case, folder: Path) -> Record:
    """Train the stock model with its own forward and loss; its first weights are left in the folder."""
    model = stock_model(case)
    model.save_pretrained(folder)
    model = model.to(case.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, eps=EPSILON)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches(case)):
        loss = stock_loss(model, batch)
        loss.backward()
        if step == 0:
            gradients = {
                name: torch.zeros_like(own) if own.grad is None else own.grad.clone()
                for name, own in model.named_parameters()
            }
        if case.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    parameters = {name: own.detach().clone() for name, own in model.named_parameters()}
    return Record(losses, norms, gradients, parameters)


def cluster_of(devices: int) -> Cluster:
    """A flat cluster with more memory than any test needs."""
    base = load_cluster("titan-rtx-8")
    return replace(base, name="test", levels=(replace(base.levels[0], units=devices),) if devices > 1 else ())


def plan_for(case: Case) -> galvatron.Plan:
    """The case's plan, as a file would give it."""
    devices = sum(galvatron.Strategy.parse(stage[0]).devices for stage in case.stages)
    model = spec_of(case)
    request = Request(model=model, cluster=cluster_of(devices), batch=case.batch, schedule=Schedule(case.schedule))
    return priced(request, case.stages, micro_batches=case.micro_batches)


def spec_of(case: Case) -> galvatron.ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        image = "image_size" in case.config
        training = replace(case.training, sequence_length=None if image else case.length)
        return load_model(Path(folder), training)


def parallel(case: Case, plan: galvatron.Plan, folder: Path) -> Record:
    """Train under the plan from the folder's weights; runs on each rank."""
    model = galvatron.parallelize(None, plan, weights=folder, dtype=case.dtype, device="cpu")
    optimizer = model.optimizer(torch.optim.AdamW, lr=case.learning_rate, eps=EPSILON)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches(case)):
        losses.append(float(model.forward_backward(batch)))
        if step == 0:
            gradients = dict(model.whole_gradients())
        if case.clip is not None:
            norms.append(float(model.clip_gradients(case.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return Record(losses, norms, gradients, dict(model.whole_parameters()))


def compare(case: Case, plan: galvatron.Plan, folder: Path, expected: Record) -> str | None:
    """On each rank: train and say what differs from the single process, if anything does."""
    got = parallel(case, plan, folder)
    exact = case.dtype == torch.float64
    gradient = {"rtol": 1e-7, "atol": 1e-10} if exact else {"rtol": 2e-3, "atol": 2e-5}
    parameter = {"rtol": 1e-7, "atol": 1e-9} if exact else {"rtol": 1e-3, "atol": 1e-4}
    try:
        torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(expected.losses), rtol=1e-5, atol=1e-6)
        if case.clip is not None:
            torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(expected.norms), rtol=1e-5, atol=1e-6)
        for ours, theirs, tolerance in (
            (got.gradients, expected.gradients, gradient),
            (got.parameters, expected.parameters, parameter),
        ):
            missing = theirs.keys() - ours.keys()
            assert not missing, f"missing {sorted(missing)}"
            for name, tensor in theirs.items():
                torch.testing.assert_close(
                    ours[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance
                )
    except AssertionError as error:
        return f"{case.stages}: {error}"
    return None
