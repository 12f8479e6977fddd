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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput, Unequal
from galvatron.core.spec import Kind
from galvatron.families.generic.adapter import Generic, LossFunction, logits_of
from galvatron.families.generic.balance import asks_for_scores, collect_scores
from galvatron.families.generic.tensor_rules import TensorRules
from galvatron.families.layer import Batch
from galvatron.families.weights import ModelWeights
from galvatron.planner.plan.plan import Plan
from galvatron.runtime import collectives
from galvatron.runtime.build import build
from galvatron.runtime.randomness import restored
from galvatron.runtime.settings import ComputeSettings
from galvatron.runtime.trial import NotChecked, Trial, own_loss, strategies_of, trial_of

__all__ = ["FP32", "FP64", "Answer", "Tolerance", "difference", "judged", "one_process", "verify"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two computations of the same may be apart by rounding."""

    loss: float
    """Of its value."""
    gradient: float
    """Of the largest element of a gradient."""
    noise: float
    """Of the largest element of all gradients."""


FP32, FP64 = Tolerance(1e-4, 2e-3, 1e-5), Tolerance(1e-5, 5e-5, 1e-6)
"""Stock models compute some things (norms, routers, the loss) in fp32 in any case."""
_SHOWN = 3


def verify(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device,
    example: Batch | None = None,
    loss: LossFunction | None = None,
    rules: TensorRules | None = None,
) -> None:
    """Raise :class:`Unequal` on all ranks if the model does not train under the plan as in one process.

    Call it on every rank of an existing world. A model that cannot be compared is named in a warning of rank 0; it is
    refused if the plan splits it by ``rules`` that are a guess.
    """
    guessed = rules is not None and rules.guessed and _splits(plan)
    try:
        found = difference(model, plan, device=device, example=example, loss=loss, rules=rules)
    except NotChecked as reason:
        if guessed:
            raise InvalidInput(
                f"{type(model).__name__}: a run of its blocks showed how TP could split it, which cannot "
                f"be compared with the whole model ({reason}); plan without TP (--space dp+pp)"
            ) from None
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
    rules: TensorRules | None = None,
) -> str | None:
    """In which way training under the plan differs from one process, the same on every rank; None: in none.

    ``model`` may be without weights if it is one of Hugging Face's; ``rules``: its own for tensor parallelism. Raises
    :class:`NotChecked` on every rank if there is nothing to compare.
    """
    with restored(device, host=True), _exact(device), _groups_given_back():
        trial = trial_of(model, plan, example, loss)
        answers, problem = None, None
        if dist.get_rank() == 0:
            try:
                count = trial.plan.micro_batches
                answers = [
                    one_process(trial.model, batch, trial.loss, device, micro_batches=count)
                    for batch in trial.batches.values()
                ]
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                problem = str(error).partition("\n")[0] or type(error).__name__
        problem = collectives.all_gather_object(problem, device)[0]
        if problem is not None:
            raise NotChecked(f"the stock model itself fails on a trial batch ({problem})")
        return _compare(trial, answers, device, rules)


def _splits(plan: Plan) -> bool:
    return any(strategy.degree(Kind.TP) > 1 for strategy in strategies_of(plan))


# The two sides


@dataclass(frozen=True)
class Answer:
    """What the stock model says of a batch."""

    loss: float
    gradients: dict[str, Tensor]
    """By every name that the model knows a parameter under."""


def one_process(
    stock: nn.Module, batch: Batch, loss: LossFunction | None, device: torch.device, *, micro_batches: int = 1
) -> Answer:
    """What the stock model itself says. Of the whole batch at once; but where its loss has a term for the balance of
    experts, which depends on what comes together, of each micro-batch."""
    model = copy.deepcopy(stock).to(device)
    own = {name: tensor.to(device) for name, tensor in batch.items()}
    if loss is None and asks_for_scores(model):
        value = _with_balance(model, own, micro_batches)
    else:
        value = own_loss(model, own, loss)
    torch.autograd.backward(value)
    mean = float(value.detach())
    if not math.isfinite(mean):
        raise ValueError(f"its loss is {mean}")
    named = model.named_parameters(remove_duplicate=False)
    gradients = {name: tensor.grad for name, tensor in named}
    found = {name: grad.detach().cpu() for name, grad in gradients.items() if grad is not None}
    return Answer(mean, found)


def _with_balance(model: nn.Module, batch: Batch, micro_batches: int) -> Tensor:
    """The loss of the whole batch without the term for the balance of experts, and the mean of what the term adds to
    that of each micro-batch."""
    collect_scores(model, flag=False)
    value = own_loss(model, batch, None)
    parts = [own.chunk(micro_batches) for own in batch.values()]
    for part in zip(*parts, strict=True):
        given = dict(zip(batch, part, strict=True))
        given["labels"] = given["labels"].clamp(min=0)  # all count: a mean over none would be no number
        losses = []
        for flag in (True, False):
            collect_scores(model, flag=flag)
            losses.append(own_loss(model, given, None))
        value = value + (losses[0] - losses[1]) / micro_batches
    return value


def _compare(trial: Trial, answers: list[Answer] | None, device: torch.device, rules: TensorRules | None) -> str | None:
    layered = trial.layered
    if rules is not None and isinstance(layered, Generic) and not rules.proven_by(layered.tensor_rules):
        raise NotChecked("a small copy of it would be split otherwise")
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
                answer = Answer(answer.loss / count, {key: own / count for key, own in answer.gradients.items()})
            wrong = judged(answer, loss, gradients)
            if wrong is not None and found is None:
                mixes = _rows_depend_on_others(trial.model, batch, device)
                found = f"{type(trial.model).__name__}: {_MIXES if mixes else _words(name, wrong)}"
        for local in parallel.locals:
            local.master.grad = None
    return collectives.all_gather_object(found, device)[0]  # type: ignore[no-any-return]


def judged(
    answer: Answer, loss: float, gradients: Iterator[tuple[str, Tensor]], tolerance: Tolerance = FP32
) -> str | None:
    """What is wrong with the loss and the gradients under the plan; takes all of them."""
    largest = max((float(own.abs().max()) for own in answer.gradients.values() if own.numel()), default=0.0)
    off: list[tuple[float, str]] = []
    count = 0
    for name, ours in gradients:
        count += 1
        theirs = answer.gradients.get(name, torch.zeros(ours.shape))
        gap = float((ours.cpu() - theirs).abs().max()) if theirs.numel() else 0.0
        height = float(theirs.abs().max()) if theirs.numel() else 0.0
        if not gap <= tolerance.gradient * height + tolerance.noise * largest:
            share = gap / height if height else math.inf
            off.append((share if math.isfinite(share) else math.inf, f"{name} by {gap:.2g} of at most {height:.2g}"))
    if not off and abs(loss - answer.loss) <= tolerance.loss * abs(answer.loss):
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


_MIXES = (
    "the stock model itself computes a row otherwise alone than beside rows with padding, so its batches cannot be "
    "divided over ranks or micro-batches. Where no row of yours is ever padded, leave this check out: "
    "parallelize(…, check=False)"
)


def _rows_depend_on_others(stock: nn.Module, batch: Batch, device: torch.device) -> bool:
    """Whether the stock model says something else of a row alone than of the same row in the batch."""
    if "attention_mask" not in batch:
        return False
    model = copy.deepcopy(stock).to(device).eval()
    taken = inspect.signature(model.forward).parameters
    given = {name: own.to(device) for name, own in batch.items() if name in taken and name != "labels"}
    try:
        with torch.no_grad():
            together, alone = (
                logits_of(model(**{name: own[:rows] for name, own in given.items()}))[0] for rows in (None, 1)
            )
    except Exception:  # of whatever kind: the other ranks wait for an answer
        return False
    return not torch.allclose(together, alone, rtol=FP32.gradient, atol=FP32.gradient * float(together.abs().max()))


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
