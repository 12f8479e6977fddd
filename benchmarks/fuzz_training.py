"""Random trainings against one process of the stock model: models × switches × batches × plans × optimizers × freezing.

    python benchmarks/fuzz_training.py --cases 1000 --seed 0 --workers 4
        [--context | --architectures] [--adapters] [--compiled] [--changes]

Each case is drawn from its seed alone and printed as one line of JSON: what was drawn, and what became of it.
``equal``: losses, norms, gradients and weights are those of the stock model trained by plain PyTorch in fp64.
``refused``: a :class:`galvatron.GalvatronError` said why. ``different`` and ``error`` are defects, and end with exit
status 1. Ranks are started once for all cases. ``--context`` divides sequences over ranks in most layers, of other
models. ``--architectures`` draws from all architectures of transformers that train (``results/intake.jsonl``), each
tiny, some with padding on the left; those that TP does not divide get none. ``--adapters`` gives the models low-rank
adapters of peft, which then trains them alone. ``--changes`` gives the model in memory hooks, classes and forwards of
its own, or weights that modules share, of which the plan knows nothing. ``--compiled`` compiles blocks, where anything
that does not compile is ``different``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._inductor import cpu_vec_isa
from torch.nn import functional

import galvatron
from fuzz_adapters import adapted, adapted_plan, draw_adapters, plain_name, stock_of
from fuzz_batches import mask_any, pad
from fuzz_changes import changed, draw_change
from fuzz_models import DECODERS, MODELS
from fuzz_records import Record, difference
from galvatron.core.errors import GalvatronError
from galvatron.core.spec import Attention, Context, Kind, LayerSpec, Strategy, Training
from galvatron.families.build import without_weights
from galvatron.families.layer import LayeredModel
from galvatron.families.registry import layered_model
from galvatron.planner.space import EXTENDED, Space
from galvatron.runtime import narrow
from galvatron.runtime.compiled import compiler
from galvatron.runtime.split_trial import split_difference
from galvatron.runtime.trial import own_loss
from galvatron.runtime.unpriced import facts_of, unpriced
from intake_models import architectures as all_architectures
from intake_models import training_of
from intake_table import EQUAL

__all__ = ["Drawn", "Outcome", "draw", "fuzz"]

ALL = all_architectures()
_LEFT_OUT = ("Mamba2ForCausalLM", "MraForMaskedLM", "XGLMForCausalLM", "PaliGemmaForConditionalGeneration")
"""Architectures whose stock models mix fp32 into fp64, or have a number that fp64 lacks; in the last, a row without
padding attends otherwise in a batch of its own than in one with padding."""
_SPACE = Space(name="full", title="", switches=EXTENDED)
_DIVIDED = Space(name="full", title="", switches=replace(EXTENDED, context_parallel=True))
_WORLDS = (1, 2, 4, 4, 4, 8)
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "eps": 1e-3}, "Adam": {"lr": 1e-2, "eps": 1e-3}, "NAdam": {"lr": 1e-2, "eps": 1e-3},
    "RAdam": {"lr": 1e-2, "eps": 1e-3}, "Adamax": {"lr": 1e-2, "eps": 1e-3}, "Adagrad": {"lr": 1e-2, "eps": 1e-3},
    "Adadelta": {"lr": 1.0, "eps": 1e-3}, "RMSprop": {"lr": 1e-3, "eps": 1e-2}, "ASGD": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}  # fmt: skip
"""Element by element, and with an epsilon that does not make steps of rounding: some gradients are zero."""
_FREEZING = ("", "", "", "embed|wte|wpe|shared", "layers.0.|layer.0.|h.0.|block.0.", "norm|ln_|layer_norm", "bias", "?")
"""Parts of names; "?": a third of the parameters at random."""

_DROPS = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
    "embd_pdrop": 0.0, "dropout_rate": 0.0, "drop_path_rate": 0.0, "attention_dropout": 0.0, "dropout": 0.0,
    "classifier_dropout": 0.0, "activation_dropout": 0.0, "hidden_dropout": 0.0, "embedding_dropout": 0.0,
    "mlp_dropout": 0.0, "classifier_dropout_prob": 0.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A case."""

    seed: int
    stock: str
    switches: tuple[tuple[str, Any], ...]
    """Fields of the configuration."""
    attention: str
    stages: tuple[tuple[str, ...], ...]
    schedule: str
    batch: int
    micro_batches: int
    length: int
    padding: bool
    positions: bool
    optimizer: str
    frozen: str
    clip: str
    """"", "own" (``clip_gradients``) or "habit" (``torch.nn.utils.clip_grad_norm_``)."""
    accumulate: int
    evaluate: bool
    steps: int = 2
    context: bool = False
    """Sequences are divided over ranks in most layers."""
    architecture: bool = False
    """It is any of transformers' architectures."""
    adapters: str = ""
    """What peft is told, as JSON; empty: there are none."""
    change: str = ""
    """What is done to the model in memory, as JSON; empty: nothing."""
    compiled: bool = False
    """Blocks are compiled, and products that are narrow for so small a model are merged."""

    @property
    def family(self) -> str:
        return _models(self.context)[self.stock][0]

    @property
    def devices(self) -> int:
        return len(self.stages) * Strategy.parse(self.stages[0][0]).devices


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of it."""

    seed: int
    kind: str
    """"equal", "refused", "different" or "error"."""
    said: str
    seconds: float
    drawn: dict[str, Any]


def _models(context: bool) -> dict[str, tuple[str, dict[str, tuple[Any, ...]]]]:
    return DECODERS if context else MODELS


@cache
def _known() -> dict[str, bool]:
    """Architectures that train, by their names, and whether TP divides them."""
    lines = (Path(__file__).parent / "results" / "intake.jsonl").read_text(encoding="utf-8").splitlines()
    found = {row["architecture"]: row["columns"] for row in map(json.loads, lines)}
    return {
        name: columns["TP"]["outcome"] == EQUAL
        for name, columns in sorted(found.items())
        if columns["DP"]["outcome"] == EQUAL and not ALL[name].images and name not in _LEFT_OUT
    }


@cache
def _offered(stock: str) -> tuple[bool, bool]:
    """Whether plans of an architecture may have TP, and sequence parallelism with it, as a trial says."""
    if not _known()[stock]:
        return False, False
    model, training = ALL[stock].model()
    return True, split_difference(model, training, sequence=True) is None


def draw(
    seed: int,
    most: int = 8,
    *,
    context: bool = False,
    architectures: bool = False,
    adapters: bool = False,
    compiled: bool = False,
    changes: bool = False,
) -> Drawn:
    """The case of a seed, for at most so many devices."""
    dice = random.Random(seed)
    models = _models(context)
    stock = dice.choice(list(_known() if architectures else models))
    options = {} if architectures else models[stock][1]
    switches = tuple((name, dice.choice(values)) for name, values in options.items())
    world = dice.choice([own for own in _WORLDS if own <= most and (own > 1 or not context)])
    degree = dice.choice([own for own in (1, 1, 2, 4) if world % own == 0 and (own < world or not context)])
    micro_batches = dice.choice([1, 2, 3]) if degree == 1 else dice.choice([degree, degree + 1])
    each = dice.choice([1, 2]) * (1 if context and dice.random() < 0.5 else world // degree)
    case = Drawn(
        seed=seed, stock=stock, switches=switches, attention=dice.choice(["sdpa", "eager"]), stages=(),
        schedule=dice.choice(["gpipe", "1f1b"]), batch=each * micro_batches, micro_batches=micro_batches,
        length=dice.choice([16, 16, 32] if context else [8, 8, 16, 16, 10]), padding=dice.random() < 0.5,
        positions=dice.random() < 0.3, optimizer=dice.choice(list(_OPTIMIZERS)), frozen=dice.choice(_FREEZING),
        clip=dice.choice(["", "own", "habit"]), accumulate=dice.choice([1, 1, 1, 2]), evaluate=dice.random() < 0.2,
        context=context, architecture=architectures, compiled=compiled,
    )  # fmt: skip
    if adapters:
        case = replace(case, frozen="", adapters=draw_adapters(random.Random(seed), _model(case)))
    if changes:
        case = replace(case, change=draw_change(random.Random(seed), _model(case)))
    layered = _layered(case)
    facts = facts_of(layered, _training(case), stock)
    kinds = {kind.name: kind for kind in facts.kinds}
    count = len(layered.layers)
    degree = min(degree, count)
    cuts = sorted(dice.sample(range(1, count), degree - 1))
    offered = _offered(stock) if architectures else (True, True)
    chosen = [
        _strategy(
            dice, layered, index, kinds[layer.kind], (world // degree, each, case.length), offered, context=context
        )
        for index, layer in enumerate(layered.layers)
    ]
    parts = zip([0, *cuts], [*cuts, count], strict=True)
    return replace(case, stages=tuple(tuple(chosen[first:last]) for first, last in parts))


def _strategy(
    dice: random.Random,
    layered: LayeredModel,
    index: int,
    kind: LayerSpec,
    sizes: tuple[int, int, int],
    offered: tuple[bool, bool],
    *,
    context: bool,
) -> str:
    """One that can run the layer: all trees of axes are equally likely, whatever flags they have."""
    devices, rows, length = sizes
    divides = context and layered.why_undivided(index) is None
    config: Any = getattr(layered.model, "config", None)
    attends = divides and index and not layered.layers[index].projection
    heads = config.num_attention_heads if attends else 0
    shared = heads and (getattr(config, "num_key_value_heads", None) or heads)
    divided = Context(length=length, heads=heads, key_value_heads=shared)
    fused = bool(heads) and config._attn_implementation == "sdpa"
    fitting: dict[str, list[Strategy]] = {}
    for strategy in (_DIVIDED if divides else _SPACE).strategies(devices):
        degree = strategy.degree(Kind.TP)
        if (
            (strategy.context_degree == 1 or divided.problem(strategy) is None)
            and (strategy.context_degree > 1 or not strategy.zero3)
            and rows % strategy.data_degree == 0
            and (degree == 1 or offered[0])
            and kind.allows_tensor_parallel(degree)
            and (not strategy.sequence_parallel or (offered[1] and kind.allows_sequence_parallel(degree)))
            and (not strategy.fused_loss or layered.layers[index].projection is not None)
            and (kind.allows_grade(strategy) or (context and fused))  # of unknown families nobody has counted them
            and not strategy.offload  # nothing of these sizes is worth it
        ):
            fitting.setdefault(str(Strategy(strategy.axes)), []).append(strategy)
    return str(dice.choice(fitting[dice.choice(list(fitting))]))


# Both sides


def _training(case: Drawn) -> Training:
    if case.architecture:
        return replace(training_of(ALL[case.stock].stock), compile=case.compiled)
    attention = Attention.FUSED if case.attention == "sdpa" else Attention.EAGER
    return Training(
        dropout=False, attention=attention, sequence_length=case.length if case.context else None, compile=case.compiled
    )


def _model(case: Drawn) -> nn.Module:
    """The stock model with every parameter random, some of them frozen."""
    model = _tiny(case) if case.architecture else _configured(case)
    dice = random.Random(case.seed)
    parts = case.frozen.split("|") if case.frozen not in ("", "?") else []
    named = list(model.named_parameters())
    for name, own in named:
        fits = any(part in name.lower() for part in parts)
        own.requires_grad_(not (fits or (case.frozen == "?" and dice.random() < 0.33)))
    if not any(own.requires_grad for _, own in named):
        named[-1][1].requires_grad_()
    if case.change:
        model = changed(model, case.change)
    return adapted(model, case.adapters, case.seed) if case.adapters else model


def _tiny(case: Drawn) -> nn.Module:
    model: Any = ALL[case.stock].model()[0].train()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if getattr(model.config, "_experts_implementation", None) is not None:  # grouped products have no fp64
        model.set_experts_implementation("eager")
    made: nn.Module = model
    return made


def _configured(case: Drawn) -> nn.Module:
    kind = case.family
    known = transformers.AutoConfig.for_model(kind).to_dict()
    drops = {name: value for name, value in _DROPS.items() if name in known}
    config = transformers.AutoConfig.for_model(kind, **drops, **dict(case.switches))
    config.architectures = [case.stock]
    config.use_cache = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        stock: Any = getattr(transformers, case.stock)
        if case.family in ("mixtral", "deepseek_v3"):  # grouped products have no fp64
            config._experts_implementation = "eager"
        model: nn.Module = stock._from_config(config, attn_implementation=case.attention).train()
        with torch.no_grad():
            for own in model.parameters():
                own.add_(torch.randn_like(own), alpha=0.1)
    return model


def _layered(case: Drawn) -> LayeredModel:
    """Found once for a case: a trial run takes long."""
    return _layered_once(replace(case, stages=(), change=""))


@lru_cache(maxsize=1)
def _layered_once(case: Drawn) -> LayeredModel:
    return layered_model(without_weights(stock_of(_model(case))))


def _batches(case: Drawn) -> list[dict[str, Tensor]]:
    layered = _layered(case)
    generator = torch.Generator().manual_seed(case.seed)
    made = []
    for _ in range(case.steps * case.accumulate):
        pictures = ALL[case.stock].stock.main_input_name != "input_ids" if case.architecture else False
        length = None if pictures or "image_size" in dict(case.switches) else case.length
        batch = layered.example(case.batch, length, generator)
        if case.architecture:
            mask_any(case, batch, generator)
        elif "input_ids" in batch:
            pad(case, batch, generator)
        made.append({name: own.double() if own.is_floating_point() else own for name, own in batch.items()})
    return made


def _stock_loss(model: nn.Module, batch: dict[str, Tensor], *, rounded: bool = False) -> Tensor:
    """The stock model's own loss; of causal models in full precision, unless ``rounded`` to fp32 as they do it."""
    if rounded:
        return own_loss(model, batch, None)
    output = model(**batch)
    loss: Tensor = output.loss
    if loss.dtype == output.logits.dtype:
        return loss
    exact = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(exact.to(loss.dtype), loss, equal_nan=True)
    return exact


def _alone(case: Drawn, given: Sequence[dict[str, Tensor]]) -> Record:
    """The stock model by plain PyTorch."""
    model = stock_of(_model(case).double())
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), **_OPTIMIZERS[case.optimizer])
    losses, norms, gradients = [], [], dict[str, Tensor]()
    for number, batch in enumerate(given):
        loss = _stock_loss(model, batch, rounded=case.architecture)
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        if (number + 1) % case.accumulate:
            continue
        gradients = gradients or {
            plain_name(name): torch.zeros_like(own) if own.grad is None else own.grad.clone()
            for name, own in model.named_parameters(remove_duplicate=False)
        }
        if case.clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    parameters = {plain_name(name): own.detach() for name, own in model.named_parameters(remove_duplicate=False)}
    return Record(losses=losses, norms=norms, gradients=gradients, parameters=parameters)


def _plan(case: Drawn) -> galvatron.Plan:
    if case.adapters:
        return adapted_plan(_model(case), case)
    plan = unpriced(facts_of(_layered(case), _training(case), case.stock), case.stages)
    return replace(plan, batch=case.batch, micro_batches=case.micro_batches, schedule=case.schedule)


def _together(case: Drawn, plan: galvatron.Plan, given: Sequence[dict[str, Tensor]]) -> Record | str:
    """On a rank: the same under the plan; what is refused comes back as a text."""
    try:
        if case.compiled:
            _merge_small_products()
        model = galvatron.parallelize(_model(case), plan, dtype=torch.float64, device="cpu", check=False)
        optimizer = model.optimizer(getattr(torch.optim, case.optimizer), **_OPTIMIZERS[case.optimizer])
        losses, norms, gradients = [], [], dict[str, Tensor]()
        for number, batch in enumerate(given):
            before = float(model.evaluate(batch)) if case.evaluate else None
            losses.append(float(model.forward_backward(batch)))
            if before is not None and abs(before - losses[-1]) > 1e-5 * abs(before):
                return f"different: evaluated {before}, trained {losses[-1]}"
            if (number + 1) % case.accumulate:
                continue
            found = {name: own.clone() for name, own in model.whole_gradients()}
            gradients = gradients or found
            if case.clip == "own":
                norms.append(float(model.clip_gradients(0.5)))
            elif case.clip:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        model.compare_replicas()
        if case.compiled and compiler().failures:
            return f"different: not compiled, because of {compiler().failures}"
    except GalvatronError as error:
        return f"refused: {error}"
    return Record(losses=losses, norms=norms, gradients=gradients, parameters=dict(model.whole_parameters()))


def _merge_small_products() -> None:
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]  # or four programs are compiled to find out
    narrow._NARROW, narrow._ALIGNED_BYTES = 8, 8
    compiler().failures.clear()


# The run

Run = Callable[..., list[Any]]
"""Calls a function with arguments on each of so many ranks: ``run(devices, function, *args)``."""


def fuzz(
    seeds: Sequence[int],
    run: Run,
    most: int = 8,
    *,
    context: bool = False,
    architectures: bool = False,
    adapters: bool = False,
    compiled: bool = False,
    changes: bool = False,
) -> Iterator[Outcome]:
    """What becomes of each seed's case."""
    for seed in seeds:
        began, drawn, kind = time.perf_counter(), {}, "error"
        try:
            kinds = {"context": context, "architectures": architectures, "adapters": adapters, "compiled": compiled}
            case = draw(seed, most, **kinds, changes=changes)
            drawn = asdict(case)
            given = _batches(case)
            found = run(case.devices, _together, case, _plan(case), given)
            said = next((own for own in found if isinstance(own, str)), None)
            if said is None:
                expected = _alone(case, given)
                differences = (difference(own, expected, 10 if architectures or compiled else 1) for own in found)
                said = next((f"different: {own}" for own in differences if own is not None), "equal: ")
            kind, _, said = said.partition(": ")
        except GalvatronError as error:
            kind, said = "refused", str(error)
        except Exception as error:  # of whatever kind: that is what is looked for
            lines = str(error).strip().splitlines()
            said = f"{type(error).__name__}: {lines[0] if lines else ''} … {lines[-1] if lines else ''}"[:600]
        yield Outcome(seed=seed, kind=kind, said=said, seconds=time.perf_counter() - began, drawn=drawn)


def main() -> int:
    """Run slices of the seeds in processes of their own, each with its own ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others count on")
    parser.add_argument("--workers", type=int, default=1, help="sets of ranks that run side by side")
    parser.add_argument("--most", type=int, default=8, help="devices of a case")
    drawn = parser.add_mutually_exclusive_group()
    drawn.add_argument("--context", action="store_true", help="divide sequences over ranks")
    drawn.add_argument("--architectures", action="store_true", help="any of transformers' architectures")
    parser.add_argument("--adapters", action="store_true", help="train low-rank adapters of peft")
    parser.add_argument("--compiled", action="store_true", help="compile blocks")
    parser.add_argument("--changes", action="store_true", help="change the model in memory")
    parser.add_argument("--slice", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.slice is None and given.workers > 1:
        own = [sys.executable, __file__, *sys.argv[1:]]
        started = [subprocess.Popen([*own, "--slice", str(number)]) for number in range(given.workers)]
        return max(process.wait() for process in started)
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "runtime"))
    import ranks as started_ranks
    from ranks import ranks

    if given.compiled:
        started_ranks._LIMIT_S = 1200  # compiling takes minutes on few cores
    last = given.seed + given.cases
    seeds = range(given.seed + (given.slice or 0), last, given.workers if given.slice is not None else 1)
    counts: Counter[str] = Counter()
    kind = {name: getattr(given, name) for name in ("context", "architectures", "adapters", "compiled", "changes")}
    for outcome in fuzz(seeds, lambda world, *args: ranks(world).run(*args), given.most, **kind):
        counts[outcome.kind] += 1
        print(json.dumps(asdict(outcome)), flush=True)
    print(json.dumps({"counts": counts}), file=sys.stderr)
    return 1 if counts["different"] or counts["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
