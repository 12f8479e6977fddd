"""What a plan is tried out with before it trains: a tiny copy of the model under the same stages, and its batches."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Kind, Precision, Strategy, Training, degree_of, factor_by_factor
from galvatron.core.spec.tuning import Lora
from galvatron.families.build import build_meta, without_weights
from galvatron.families.generic.adapter import LossFunction, logits_of, shortened
from galvatron.families.generic.image_examples import image_and_text, takes_images
from galvatron.families.generic.images import PIXELS, image_token
from galvatron.families.layer import IGNORED, Batch, LayeredModel
from galvatron.families.lora import add_adapters, lora_of
from galvatron.families.registry import layered_model
from galvatron.families.tiny import TINY_TOKENS, tiny_config
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.checks import check_model, kinds_of
from galvatron.runtime.layout.tokens import chunks_of

__all__ = [
    "NotChecked",
    "Trial",
    "own_loss",
    "random_model",
    "small_images",
    "strategies_of",
    "tiny_copy",
    "trial_batches",
    "trial_of",
]

_MOST_PARAMETERS = 50_000_000
"""Of a model that is compared: more would take more than seconds, and memory that the run needs."""
_LENGTH = 16
"""Tokens of a sample, rounded up to what TP and context parallelism divide."""
_SEED = 20_231_116
_IGNORED_SHARE = 0.2


class NotChecked(Exception):
    """Why a model cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model with weights, what it is given, and the plan it runs under."""

    model: nn.Module
    layered: LayeredModel
    """Its layers, without weights."""
    plan: Plan
    batches: Mapping[str, Batch]
    """By what is special about them."""
    targets: Mapping[str, int]
    loss: LossFunction | None


def trial_of(model: nn.Module, plan: Plan, example: Batch | None, loss: LossFunction | None) -> Trial:
    """The tiny copy, or the model itself if it is small; raises :class:`NotChecked` where neither will do."""
    reasons = []
    degree = math.lcm(*(strategy.degree(Kind.TP) * strategy.degree(Kind.ULYSSES) for strategy in strategies_of(plan)))
    experts = math.lcm(*(degree_of(strategy.expert_factors(Kind.EP)) for strategy in strategies_of(plan)))
    for tiny in (True, False):
        try:
            training = plan.model.training
            trial_model = tiny_copy(model, degree, training, experts=experts) if tiny else _itself(model, training)
            small = _small_example(trial_model, plan, example) if tiny else example
            return _prepared(trial_model, plan, small, loss)
        except NotChecked as reason:
            reasons.append(str(reason))
        except (InvalidInput, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            what = "a tiny copy" if tiny else "a copy"
            reasons.append(f"{what} of it cannot run under the plan ({str(error).partition(chr(10))[0]})")
    raise NotChecked("; ".join(reasons))


def tiny_copy(model: Any, degree: int, training: Training, *, experts: int = 1) -> nn.Module:
    """A tiny stock model of the same architecture with weights that hide nothing, which ``degree`` ranks of TP
    and so many of EP divide; raises :class:`NotChecked` if there is none."""
    if not type(model).__module__.startswith("transformers."):
        raise NotChecked("it is no Hugging Face model, of which a tiny copy could be built")
    tiny = random_model(type(model), tiny_config(model.config, degree=degree, experts=experts), training)
    lora = lora_of(model)
    if lora is not None:
        _adapt(tiny, lora)
    frozen = {name for name, own in model.named_parameters() if not own.requires_grad}
    for name, own in tiny.named_parameters():
        own.requires_grad_(name not in frozen)
    return tiny


def _adapt(model: nn.Module, lora: Lora) -> None:
    """Give it adapters with values that hide nothing."""
    add_adapters(model, lora)
    generator = torch.Generator().manual_seed(_SEED)
    for module in model.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            if own.is_meta:
                values = torch.randn(own.shape, generator=generator) * 0.1
                setattr(module, name, nn.Parameter(values, requires_grad=own.requires_grad))


def _itself(model: Any, training: Training) -> nn.Module:
    count = sum(own.numel() for own in model.parameters())
    if count > _MOST_PARAMETERS:
        raise NotChecked(f"it has {count:,} parameters itself, more than {_MOST_PARAMETERS:,}")
    if not any(own.is_meta for own in model.parameters()):
        return _made_equal(copy.deepcopy(model).to("cpu", torch.float32))
    if not type(model).__module__.startswith("transformers."):
        raise NotChecked("it has no weights")
    return random_model(type(model), model.config, training)


def random_model(kind: type[nn.Module], config: Any, training: Training) -> nn.Module:
    """A stock model of this class with random weights, which computes the same each time; raises :class:`NotChecked` if
    it is large."""
    config = copy.deepcopy(config)
    config.architectures = [kind.__name__]
    empty: Any = build_meta(config, replace(training, dropout=False), as_named=True)
    count = sum(own.numel() for own in empty.parameters())
    if count > _MOST_PARAMETERS:
        raise NotChecked(f"its smallest copy has {count:,} parameters, more than {_MOST_PARAMETERS:,}")
    torch.manual_seed(_SEED)
    attention = empty.config._attn_implementation
    return _made_equal(type(empty)._from_config(empty.config, attn_implementation=attention, dtype=torch.float32))


@torch.no_grad()
def _made_equal(model: nn.Module) -> nn.Module:
    """The model without random numbers in forward, with weights that hide nothing: a bias of zero that is added twice,
    or a gate that starts closed, would."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(_SEED)
    for own in model.parameters():
        spread = 0.1 if own.ndim < 2 else 0.3 / math.sqrt(own.shape[-1])
        own.add_(torch.randn(own.shape, generator=generator) * spread)
    return model.train()


def _prepared(model: nn.Module, plan: Plan, example: Batch | None, loss: LossFunction | None) -> Trial:
    layered = layered_model(without_weights(model), example, loss, generic=plan.model.family == "generic")
    rows, count = _rows(plan), min(plan.micro_batches, max(2, plan.pipeline_degree))
    batches = trial_batches(layered, model, (rows * count, _length(plan)), example, loss)
    plan = replace(plan, batch=rows * count, micro_batches=count)
    training = replace(plan.model.training.untuned(), precision=Precision.FP32, dropout=False)
    if "input_ids" in batches["plain"]:
        training = replace(training, sequence_length=batches["plain"]["input_ids"].shape[1])
    plan = replace(plan, model=replace(plan.model, training=training, config=None))
    plan = replace(plan, model=replace(plan.model, kinds=kinds_of(plan, layered)))
    check_model(plan, layered)
    targets = {name: layered.targets(batch) for name, batch in batches.items()}
    return Trial(model=model, layered=layered, plan=plan, batches=batches, targets=targets, loss=loss)


def strategies_of(plan: Plan) -> list[Strategy]:
    """That of each layer."""
    return [strategy for stage in plan.stages for strategy in stage.strategies]


def _length(plan: Plan) -> int:
    tensor = (strategy.degree(Kind.TP) for strategy in strategies_of(plan))
    return math.lcm(_LENGTH, *tensor, *(chunks_of(strategy.layout) for strategy in strategies_of(plan)))


def _rows(plan: Plan) -> int:
    """The smallest micro-batch that is divided, and changes its layout, as the plan's own."""

    def alike(rows: int) -> bool:
        if any(rows % strategy.data_degree for strategy in strategies_of(plan)):
            return False
        changes = [pair for stage in plan.stages for pair in pairwise(stage.strategies)]
        return all(
            factor_by_factor(first.batch_factors, second.batch_factors, rows)
            == factor_by_factor(first.batch_factors, second.batch_factors, plan.micro_batch)
            for first, second in changes
        )

    return next(rows for rows in range(1, plan.micro_batch + 1) if plan.micro_batch % rows == 0 and alike(rows))


def own_loss(model: nn.Module, batch: Batch, loss: LossFunction | None) -> Tensor:
    """The mean over the targets: the model's own where it computes one."""
    taken = inspect.signature(model.forward).parameters
    inputs = {name: own for name, own in batch.items() if name in taken and name != "labels"}
    if loss is not None:
        return loss(model(**inputs), batch)
    if "labels" in taken:
        output = model(**inputs, labels=batch["labels"])
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(found, Tensor):
            return found
    logits = logits_of(model(**inputs))
    return functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED)


# Batches


def _small_example(tiny: nn.Module, plan: Plan, example: Batch | None) -> Batch | None:
    """An example for a tiny copy: short, of tokens that it has, and of small images."""
    if example is None:
        return None
    if PIXELS in example and "input_ids" in example:
        return small_images(tiny, _length(plan))
    return _with_few_tokens(shortened(example, _length(plan)))


def small_images(tiny: Any, length: int) -> Batch:
    """A batch for a tiny copy: images of four tokens where it takes any size, in samples of a multiple of ``length``
    tokens, of which half come behind them."""
    if not takes_images(tiny):
        raise NotChecked("how a tiny copy takes images is not known")
    vision = getattr(tiny.config, "vision_config", None)
    patch, merge = getattr(vision, "patch_size", None), getattr(vision, "spatial_merge_size", None)
    size = 2 * patch * merge if isinstance(patch, int) and isinstance(merge, int) else None
    generator = torch.Generator().manual_seed(_SEED)
    tokens = image_and_text(tiny, 1, None, generator, size)["input_ids"].shape[1]
    return image_and_text(tiny, 3, -(-2 * tokens // length) * length, generator, size)


def _with_few_tokens(batch: Batch) -> dict[str, Tensor]:
    found = dict(batch)
    if "input_ids" in batch:
        for name in {"input_ids", "decoder_input_ids", "labels"} & batch.keys():
            if not batch[name].is_floating_point():
                found[name] = torch.where(batch[name] < 0, batch[name], batch[name] % TINY_TOKENS)
    return found


def trial_batches(
    layered: LayeredModel,
    model: Any,
    size: tuple[int, int],
    example: Batch | None = None,
    loss: LossFunction | None = None,
) -> Mapping[str, Batch]:
    """One with labels that do not count, and one with padding where the model knows it; ``size``: rows and tokens."""
    rows, length = size
    stock = type(model).__module__.startswith("transformers.")
    tokens = example is None and getattr(model, "main_input_name", None) == "input_ids"
    generator = torch.Generator().manual_seed(_SEED)

    def draw() -> dict[str, Tensor]:
        drawn = layered.example(rows, length if tokens else None, generator)
        drawn = _with_few_tokens(drawn) if stock and PIXELS not in drawn else dict(drawn)
        batch = {name: own.float() if own.is_floating_point() else own for name, own in drawn.items()}
        labels = batch["labels"]
        if loss is None and not labels.is_floating_point() and (labels.ndim > 1 or (stock and rows > 1)):
            ignored = torch.rand(labels.shape, generator=generator) < _IGNORED_SHARE
            ignored[0] = ignored[0] if labels.ndim > 1 else False  # something must count
            batch["labels"] = torch.where(ignored, IGNORED, labels)
        return batch

    batches = {"plain": draw()}
    if stock and "input_ids" in batches["plain"] and "attention_mask" in inspect.signature(model.forward).parameters:
        padded = draw()
        shape = padded["input_ids"].shape
        # Some have none: a rank's rows may all be such, beside those of others.
        kept = shape[1] - torch.tensor([(row + (rows == 1)) % 3 * shape[1] // 5 for row in range(rows)])
        mask = (torch.arange(shape[1])[None] < kept[:, None]).long()
        token = image_token(model.config) if PIXELS in padded else None
        if token is not None:
            mask[padded["input_ids"] == token] = 1
        padded["attention_mask"] = mask
        if padded["labels"].shape == shape:
            padded["labels"] = torch.where(mask.bool(), padded["labels"], IGNORED)
        batches["padded"] = padded
    return batches
