"""``galvatron train``: from a model's name, or a plan, to a trained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galvatron.cli import options as opt
from galvatron.cli.config import Config, config_text, said_here
from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.options import Setup

if TYPE_CHECKING:
    from galvatron.planner.plan.plan import Plan
    from galvatron.train.settings import Settings

__all__ = ["EXAMPLES", "command"]


EXAMPLES = (
    "Examples:",
    "galvatron train ./my-llama --data chat.jsonl --steps 1000 --output runs/chat",
    "galvatron train --resume --output runs/chat",
    "galvatron train --config runs/chat/run.toml --output runs/again",
)
_PANELS = {
    **opt.SETUP_PANELS,
    "Data": ("data", "tokenizer", "text_field", "pack", "eval_data", "epochs", "workers"),
    "Start from": ("weights", "from_scratch", "adapters", "resume", "config"),
    "Learning": (*("steps", "learning_rate", "warmup", "decay", "weight_decay", "clip", "label_smoothing", "seed"),),
    "Saving and logging": (
        "output",
        "save_every",
        "keep",
        "evaluate_every",
        "evaluate_batches",
        "tensorboard",
        "wandb",
        "trace",
    ),
    "Faults": ("compare_every", "max_restarts", "replan", "timeout"),
}
_ALIASES = {
    "output": ("--output-dir",),
    "devices": ("--nproc-per-node",),
    "steps": ("--max-steps",),
    "warmup": ("--warmup-steps",),
    "decay": ("--lr-scheduler-type",),
    "clip": ("--max-grad-norm",),
    "evaluate_every": ("--eval-steps",),
    "save_every": ("--save-steps",),
    "keep": ("--save-total-limit",),
}
"""Names that the Trainer of transformers and torchrun have for the same."""


@opt.arranged(_PANELS, _ALIASES)
@opt.takes_setup("paper", "image_size", "devices", "node_link")
def command(
    context: typer.Context,
    setup: Setup,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL|PLAN", help="A model as for 'plan', or a plan file; left out to resume."),
    ] = None,
    config: Config = None,
    output: Annotated[str, typer.Option("--output", "-o", help="Folder of the run.")] = "runs/latest",
    out: Annotated[str | None, typer.Option("--out", hidden=True)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    devices: Annotated[int | None, typer.Option(help="Processes (default: all GPUs, or all CPU cores).")] = None,
    virtual: opt.Virtual = None,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="auto: measure this machine; or a preset or .toml file.")
    ] = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again instead of using cached results.")] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all (default 100).")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data, instead of --steps.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Text or images: a file or folder; 'stories'; 'synthetic' (default).")
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Evaluate on this file or folder (default: on held-out samples).")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer's folder, 'bytes', or 'train'.")] = None,
    text_field: Annotated[str | None, typer.Option(help="Field or column with the text (default: text).")] = None,
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack/--no-pack", help="Pack several documents into one row, kept apart (default: chat data only)."
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Folder of safetensors to start from (default: MODEL, if it has some).")
    ] = None,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Start from random weights.")] = False,
    adapters: Annotated[str | None, typer.Option(help="Folder of LoRA adapters, as peft's, to start from.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", help="Peak learning rate (default 3e-4).")
    ] = None,
    warmup: Annotated[int | None, typer.Option(help="Warm-up steps (default: a tenth of the steps).")] = None,
    decay: Annotated[
        str | None, typer.Option(help="Learning-rate decay: cosine (default), linear or constant.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of matrices (default 0.01).")] = None,
    label_smoothing: Annotated[
        float | None, typer.Option(help="Label smoothing: share of each target spread over all words (default 0).")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Clip gradients to this norm (default 1; 0: no clipping).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of weights, dropout and sample order (default 0).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Threads that prepare batches (default: 1 on GPUs, 0 on CPUs).")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations on held-out samples.")] = None,
    evaluate_batches: Annotated[
        int | None, typer.Option(help="Batches in an evaluation (default: all of --eval-data, or 4 held-out ones).")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints (default: at the end).")] = None,
    keep: Annotated[int | None, typer.Option(help="How many checkpoints to keep (default 3).")] = None,
    compare_every: Annotated[
        int | None, typer.Option(help="Steps between checks that replicas are equal (default 100; 0: never).")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="How often to restart from the last checkpoint after a failure.")
    ] = 0,
    replan: Annotated[
        bool, typer.Option("--replan", help="If devices are lost, make a new plan for the rest and continue.")
    ] = False,
    timeout: Annotated[
        str | None, typer.Option(help="Treat a rank as hung after this long without a heartbeat (default 5min).")
    ] = None,
    trace: Annotated[int | None, typer.Option(help="Write a PyTorch profiler trace of this step.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files too.")] = False,
    wandb: Annotated[str | None, typer.Option(help="Log to this Weights & Biases project too.")] = None,
) -> None:
    """Train MODEL on this machine: profile it, plan, start the processes, train, and compare with the prediction.

    Under torchrun (several machines) each process is one rank, and a plan must be given.
    """
    opt.need_torch("train")
    from galvatron.cli.progress import shown_progress
    from galvatron.core.units import parse_seconds
    from galvatron.train.settings import Decay
    from galvatron.train.start import Asked, Screen, train

    folder = Path(output if out is None else out)
    if not str(output) or out == "":
        raise InvalidInput("output: '' given; expected a folder's name, such as runs/first")
    said: dict[str, Any] = {
        "steps": steps,
        "epochs": epochs,
        "data": data,
        "evaluation_data": eval_data,
        "tokenizer": tokenizer,
        "text_field": text_field,
        "pack": pack,
        "weights": weights,
        "adapters": adapters,
        "learning_rate": learning_rate,
        "warmup": warmup,
        "decay": None if decay is None else _chosen(decay, [*Decay]),
        "weight_decay": weight_decay,
        "label_smoothing": label_smoothing,
        "clip": clip,
        "seed": seed,
        "workers": workers,
        "evaluate_every": evaluate_every,
        "evaluate_batches": evaluate_batches,
        "save_every": save_every,
        "keep": keep,
        "compare_every": compare_every,
        "timeout_s": None if timeout is None else parse_seconds(timeout, where="timeout"),
        "trace_step": trace,
        "tensorboard": tensorboard or None,
        "wandb": wandb,
    }
    if steps is not None and epochs is not None:
        raise InvalidInput("--steps and --epochs exclude each other; leave one of them out")
    if resume and from_scratch:
        raise InvalidInput("--resume and --from-scratch exclude each other; a resumed run has its weights")
    if not resume:
        said |= _from_folder(model, said, from_scratch=from_scratch)
    for name, value in (("devices", devices), ("max-restarts", max_restarts)):
        if value is not None and value < (1 if name == "devices" else 0):
            raise InvalidInput(f"{name}: {value} given; expected at least {1 if name == 'devices' else 0}")
    asked = Asked(
        source=model,
        out=folder,
        settings=_settings(folder, {name: value for name, value in said.items() if value is not None}, resume),
        setup=setup,
        devices=devices,
        virtual=virtual,
        cluster=cluster,
        fresh=fresh,
        resume=resume,
        max_restarts=max_restarts,
        replan=replan,
        config=config_text({**said_here(context), "output": str(folder)}),
    )
    train(asked, Screen(plan=_show, say=lambda text: opt.show(text), measuring=shown_progress))


def _from_folder(model: str | None, said: dict[str, Any], *, from_scratch: bool) -> dict[str, str]:
    """The weights and the tokenizer in a model's own folder, where nothing else is said."""
    if from_scratch and said["weights"] is not None:
        raise InvalidInput("--from-scratch and --weights exclude each other; leave one of them out")
    folder = Path(model) if model is not None else Path()
    if model is None or not folder.is_dir():
        return {}
    found: dict[str, str] = {}
    if said["weights"] is None and not from_scratch and any(folder.glob("*.safetensors")):
        found["weights"] = model
    needs_one = said["data"] not in (None, "synthetic")
    if said["tokenizer"] is None and needs_one and (folder / "tokenizer.json").is_file():
        found["tokenizer"] = model
    for name in found:
        other = "--from-scratch starts from random ones" if name == "weights" else "--tokenizer names another"
        opt.show(f"{name}: those of {model}; {other}" if name == "weights" else f"{name}: that of {model}; {other}")
    return found


def _settings(out: Path, said: dict[str, Any], resume: bool) -> Settings:
    """What was said, over what the run that is resumed was started with."""
    from galvatron.train.run_folder import RunFolder
    from galvatron.train.settings import Settings

    if said.get("clip") == 0:
        said["clip"] = None
    file = RunFolder(out).settings_file
    settings = replace(Settings.load(file), **said) if resume and file.exists() else Settings(**said)
    trace = said.get("trace_step")
    if trace is not None and trace > settings.steps and settings.epochs is None:
        raise InvalidInput(f"trace: step {trace} given, but the run has {settings.steps}")
    return settings


def _chosen(given: str, known: list[Any]) -> Any:
    for each in known:
        if each == given:
            return each
    raise InvalidInput(f"decay: {given!r} is unknown; choose one of {', '.join(known)}")


def _show(plan: Plan) -> None:
    from galvatron.planner.plan.render import plan_view

    opt.show(plan_view(plan))
