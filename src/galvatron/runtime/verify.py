"""Before a model of unknown family trains: one batch under its plan, compared with the stock model in one process.

What is compared is a tiny copy of the model (``galvatron.families.tiny``) under the same stages and strategies: its own
loss, and every gradient. Whatever the cut, the split or a reduction gets wrong shows there, in seconds, instead of in a
model that trained for weeks. A model that is not one of Hugging Face's is compared itself, if it is small.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from galvatron.core.errors import InvalidInput, Unequal
from galvatron.core.spec import Kind, Precision, Strategy, factor_by_factor
from galvatron.families.build import build_meta, without_weights
from galvatron.families.generic.adapter import LossFunction, logits_of
from galvatron.families.layer import IGNORED, Batch, LayeredModel
from galvatron.families.registry import layered_model
from galvatron.families.tiny import TINY_TOKENS, tiny_config
from galvatron.families.weights import ModelWeights
from galvatron.planner.plan.plan import Plan
from galvatron.runtime import collectives
from galvatron.runtime.build import build
from galvatron.runtime.checks import check_model, kinds_of
from galvatron.runtime.randomness import restored
from galvatron.runtime.settings import ComputeSettings

__all__ = ["NotChecked", "difference", "verify"]

_LOG = logging.getLogger(__name__)
_MOST_PARAMETERS = 50_000_000
"""Of a model that is compared: more would take more than seconds, and memory that the run needs."""
_LENGTH = 16
"""Tokens of a sample, rounded up to what TP degrees divide."""
_SEED = 20_231_116
_IGNORED_SHARE = 0.2
_LOSS_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE, _NOISE = 2e-3, 1e-5
"""Of the largest element of a gradient, and of the largest of all gradients: rounding in fp32."""
_SHOWN = 3


class NotChecked(Exception):
    """Why a model cannot be compared."""


def verify(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device,
    example: Batch | None = None,
    loss: LossFunction | None = None,
) -> None:
    """Raise :class:`Unequal` on all ranks if the model does not train under the plan as in one process.

    Call it on every rank of an existing world. A model that cannot be compared is named in a warning of rank 0.
    """
    try:
        found = difference(model, plan, device=device, example=example, loss=loss)
    except NotChecked as reason:
        if dist.get_rank() == 0:
            _LOG.warning("%s is not compared with the stock model before it trains: %s", type(model).__name__, reason)
        return
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if found is not None:
        raise Unequal(found)


def difference(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device,
    example: Batch | None = None,
    loss: LossFunction | None = None,
) -> str | None:
    """In which way training under the plan differs from one process, the same on every rank; None: in none.

    ``model`` may be without weights if it is one of Hugging Face's. Raises :class:`NotChecked` on every rank if there
    is nothing to compare.
    """
    with restored(device), _exact(device), _groups_given_back():
        trial = _trial(model, plan, example, loss)
        answers, problem = None, None
        if dist.get_rank() == 0:
            try:
                answers = [_one_process(trial, batch, device) for batch in trial.batches.values()]
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                problem = str(error).partition("\n")[0] or type(error).__name__
        problem = collectives.all_gather_object(problem, device)[0]
        if problem is not None:
            raise NotChecked(f"the stock model itself fails on a trial batch ({problem})")
        return _compare(trial, answers, device)


# What is compared


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A model with weights, what it is given, and the plan it runs under."""

    model: nn.Module
    plan: Plan
    batches: Mapping[str, Batch]
    """By what is special about them."""
    targets: Mapping[str, int]
    example: Batch | None
    loss: LossFunction | None


def _trial(model: nn.Module, plan: Plan, example: Batch | None, loss: LossFunction | None) -> _Trial:
    reasons = []
    for make in (_tiny_copy, _itself):
        try:
            trial_model = make(model, plan)
            small = _shortened(example, _length(plan)) if make is _tiny_copy else example
            return _prepared(trial_model, plan, small, loss)
        except NotChecked as reason:
            reasons.append(str(reason))
        except (InvalidInput, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            what = "a tiny copy" if make is _tiny_copy else "a copy"
            reasons.append(f"{what} of it cannot run under the plan ({str(error).partition(chr(10))[0]})")
    raise NotChecked("; ".join(reasons))


def _tiny_copy(model: Any, plan: Plan) -> nn.Module:
    if not type(model).__module__.startswith("transformers."):
        raise NotChecked("it is no Hugging Face model, of which a tiny copy could be built")
    degree = max(strategy.degree(Kind.TP) for strategy in _strategies(plan))
    return _built(model, tiny_config(model.config, degree=degree), plan)


def _itself(model: Any, plan: Plan) -> nn.Module:
    count = sum(own.numel() for own in model.parameters())
    if count > _MOST_PARAMETERS:
        raise NotChecked(f"it has {count:,} parameters itself, more than {_MOST_PARAMETERS:,}")
    if not any(own.is_meta for own in model.parameters()):
        return _made_equal(copy.deepcopy(model).to("cpu", torch.float32))
    if not type(model).__module__.startswith("transformers."):
        raise NotChecked("it has no weights")
    return _built(model, model.config, plan)


def _built(model: Any, config: Any, plan: Plan) -> nn.Module:
    """A stock model of the same class with random weights."""
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    empty: Any = build_meta(config, replace(plan.model.training, dropout=False), as_named=True)
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


def _prepared(model: nn.Module, plan: Plan, example: Batch | None, loss: LossFunction | None) -> _Trial:
    layered = layered_model(without_weights(model), example, loss)
    rows, count = _rows(plan), min(plan.micro_batches, max(2, plan.pipeline_degree))
    batches = _batches(layered, model, rows * count, _length(plan), example, loss)
    plan = replace(plan, batch=rows * count, micro_batches=count)
    training = replace(plan.model.training, precision=Precision.FP32, dropout=False)
    if "input_ids" in batches["plain"]:
        training = replace(training, sequence_length=batches["plain"]["input_ids"].shape[1])
    plan = replace(plan, model=replace(plan.model, training=training, config=None))
    plan = replace(plan, model=replace(plan.model, kinds=kinds_of(plan, layered)))
    check_model(plan, layered)
    targets = {name: layered.targets(batch) for name, batch in batches.items()}
    return _Trial(model=model, plan=plan, batches=batches, targets=targets, example=example, loss=loss)


def _strategies(plan: Plan) -> list[Strategy]:
    return [strategy for stage in plan.stages for strategy in stage.strategies]


def _length(plan: Plan) -> int:
    return math.lcm(_LENGTH, *(strategy.degree(Kind.TP) for strategy in _strategies(plan)))


def _rows(plan: Plan) -> int:
    """The smallest micro-batch that is divided, and changes its layout, as the plan's own."""

    def alike(rows: int) -> bool:
        if any(rows % strategy.data_degree for strategy in _strategies(plan)):
            return False
        changes = [pair for stage in plan.stages for pair in pairwise(stage.strategies)]
        return all(
            factor_by_factor(first.batch_factors, second.batch_factors, rows)
            == factor_by_factor(first.batch_factors, second.batch_factors, plan.micro_batch)
            for first, second in changes
        )

    return next(rows for rows in range(1, plan.micro_batch + 1) if plan.micro_batch % rows == 0 and alike(rows))


# Batches


def _shortened(example: Batch | None, length: int) -> Batch | None:
    """An example for a tiny copy: short, and of tokens that it has."""
    if example is None or "input_ids" not in example:
        return example
    shape = example["input_ids"].shape[:2]
    short = {name: own[:, :length] if own.shape[:2] == shape else own for name, own in example.items()}
    return _with_few_tokens(short)


def _with_few_tokens(batch: Batch) -> dict[str, Tensor]:
    found = dict(batch)
    if "input_ids" in batch:
        for name in {"input_ids", "decoder_input_ids", "labels"} & batch.keys():
            if not batch[name].is_floating_point():
                found[name] = torch.where(batch[name] < 0, batch[name], batch[name] % TINY_TOKENS)
    return found


def _batches(
    layered: LayeredModel, model: Any, rows: int, length: int, example: Batch | None, loss: LossFunction | None
) -> Mapping[str, Batch]:
    """One with labels that do not count, and one with padding where the model knows it."""
    stock = type(model).__module__.startswith("transformers.")
    tokens = example is None and getattr(model, "main_input_name", None) == "input_ids"
    generator = torch.Generator().manual_seed(_SEED)

    def draw() -> dict[str, Tensor]:
        drawn = layered.example(rows, length if tokens else None, generator)
        drawn = _with_few_tokens(drawn) if stock else dict(drawn)
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
        kept = shape[1] - torch.tensor([(row + 1) % 3 * shape[1] // 5 for row in range(rows)])
        mask = (torch.arange(shape[1])[None] < kept[:, None]).long()
        padded["attention_mask"] = mask
        if padded["labels"].shape == shape:
            padded["labels"] = torch.where(mask.bool(), padded["labels"], IGNORED)
        batches["padded"] = padded
    return batches


# The two sides


@dataclass(frozen=True)
class _Answer:
    loss: float
    gradients: dict[str, Tensor]
    """By every name that the model knows a parameter under."""


def _one_process(trial: _Trial, batch: Batch, device: torch.device) -> _Answer:
    """What the stock model itself says."""
    model = copy.deepcopy(trial.model).to(device)
    own = {name: tensor.to(device) for name, tensor in batch.items()}
    value = _own_loss(model, own, trial.loss)
    torch.autograd.backward(value)
    mean = float(value.detach())
    if not math.isfinite(mean):
        raise ValueError(f"its loss is {mean}")
    named = model.named_parameters(remove_duplicate=False)
    gradients = {name: tensor.grad for name, tensor in named}
    found = {name: grad.detach().cpu() for name, grad in gradients.items() if grad is not None}
    return _Answer(mean, found)


def _own_loss(model: nn.Module, batch: Batch, loss: LossFunction | None) -> Tensor:
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


def _compare(trial: _Trial, answers: list[_Answer] | None, device: torch.device) -> str | None:
    layered = layered_model(without_weights(trial.model), trial.example, trial.loss)
    settings = ComputeSettings(device=device, dtype=torch.float32, master_dtype=torch.float32, seed=0)
    parallel = build(trial.plan, layered, settings, ModelWeights(layered, trial.model))
    found = None
    for number, (name, batch) in enumerate(trial.batches.items()):
        loss = float(parallel.forward_backward(batch))
        gradients = parallel.whole_gradients()
        if answers is None:
            for _ in gradients:
                pass
        else:
            answer = answers[number]
            if trial.loss is not None:  # which gives a sum, of which the runtime makes a mean
                count = trial.targets[name]
                answer = _Answer(answer.loss / count, {key: own / count for key, own in answer.gradients.items()})
            wrong = _judged(answer, loss, gradients)
            if wrong is not None and found is None:
                found = f"{type(trial.model).__name__}: {_words(name, wrong)}"
        for local in parallel.locals:
            local.master.grad = None
    return collectives.all_gather_object(found, device)[0]  # type: ignore[no-any-return]


def _judged(answer: _Answer, loss: float, gradients: Iterator[tuple[str, Tensor]]) -> str | None:
    """What is wrong with the loss and the gradients under the plan; takes all of them."""
    largest = max((float(own.abs().max()) for own in answer.gradients.values() if own.numel()), default=0.0)
    off: list[tuple[float, str]] = []
    count = 0
    for name, ours in gradients:
        count += 1
        theirs = answer.gradients.get(name, torch.zeros(ours.shape))
        gap = float((ours.cpu() - theirs).abs().max()) if theirs.numel() else 0.0
        height = float(theirs.abs().max()) if theirs.numel() else 0.0
        if not gap <= _GRADIENT_TOLERANCE * height + _NOISE * largest:
            share = gap / height if height else math.inf
            off.append((share if math.isfinite(share) else math.inf, f"{name} by {gap:.2g} of at most {height:.2g}"))
    if not off and abs(loss - answer.loss) <= _LOSS_TOLERANCE * abs(answer.loss):
        return None
    worst = [text for _, text in sorted(off, key=lambda each: -each[0])[:_SHOWN]]
    gradients_off = f"gradients of {len(off)} of {count} parameters differ, most {', '.join(worst)}" if off else ""
    return f"its loss is {loss:.6g} instead of {answer.loss:.6g}; {gradients_off or 'its gradients are equal'}"


def _words(batch: str, wrong: str) -> str:
    return (
        f"under this plan a small copy of it does not train as the stock model does in one process. Of a {batch} batch "
        f"{wrong}. This is a fault of Galvatron, so please report it with the plan. Until it is mended train under DP "
        "(galvatron plan --space dp), or, where that differs as well, give parallelize a loss of your own"
    )


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """Gradients on, and products in fp32 whatever the user allows for training: TF32 differs by more than rounding."""
    with torch.enable_grad():
        if device.type != "cuda":
            yield
            return
        allowed = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
                yield
        finally:
            torch.set_float32_matmul_precision(allowed)


@contextmanager
def _groups_given_back() -> Iterator[None]:
    """Destroy the process groups that are made meanwhile, in the order in which all ranks made them."""
    known = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in known and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
