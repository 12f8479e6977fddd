"""torchtitan: options that override those of a recipe, ``--module … --config …`` (0.3)."""

from __future__ import annotations

import shlex

from galvatron.core.spec import ADAMW, GPIPE, ModelSpec, Precision
from galvatron.families.discovery import families
from galvatron.planner.exchange.target import Target
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform

__all__ = ["TORCHTITAN", "options_of", "stage_modules"]

_NAME = "torchtitan"


def options_of(layout: Uniform, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Each option with its values; the last is the subcommand that says what is recomputed."""
    pipelined = layout.pipeline > 1
    sharded = layout.data > 1 and layout.sharding is not Sharding.NONE
    parallelism: dict[str, int | str] = {
        "pipeline_parallel_degree": layout.pipeline,
        "data_parallel_replicate_degree": layout.replicas if layout.sharding is not Sharding.NONE else layout.data,
        "data_parallel_shard_degree": layout.shards if sharded else 1,
        "fsdp_reshard_after_forward": "always" if layout.sharding is Sharding.PARAMETERS else "never",
        "tensor_parallel_degree": layout.tensor,
        "expert_parallel_degree": layout.expert,
    }
    if pipelined:
        parallelism["pipeline_parallel_schedule"] = "GPipe" if layout.schedule == GPIPE.name else "1F1B"
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch
    options: list[tuple[str, ...]] = [(f"--parallelism.{name}", str(value)) for name, value in parallelism.items()]
    if pipelined:
        modules = [",".join(stage) for stage in stage_modules(layout.blocks, [], ["norm", "lm_head"])]
        options.append(("--parallelism.module_fqns_per_model_part", *modules))
    if layout.tensor > 1 and not layout.sequence_parallel:
        options.append(("--parallelism.no-enable_sequence_parallel",))
    local = layout.micro_batch * (layout.micro_batches if pipelined else 1)
    options += [("--training.local_batch_size", str(local)), ("--training.global_batch_size", str(layout.batch))]
    if model.training.sequence_length is not None:
        options.append(("--training.seq_len", str(model.training.sequence_length)))
    precision = "bfloat16" if model.training.precision is Precision.BF16 else "float32"
    options.append(("--training.mixed_precision_param", precision))
    if pipelined or layout.expert > 1:
        options.append(("--training.disable_cuda_graphs",))
    options.append(("--compile.enable" if model.training.compile else "--compile.no-enable",))
    return (
        *options,
        ("activation-checkpoint:full" if layout.recompute is Recompute.FULL else "activation-checkpoint:none",),
    )


def stage_modules(blocks: tuple[int, ...], before: list[str], after: list[str], prefix: str = "") -> list[list[str]]:
    """Names of the modules of each stage: the embedding and what is ``before`` the blocks, the blocks, what is
    ``after``."""
    stages, begin = [], 0
    for count in blocks:
        stages.append([f"{prefix}layers.{number}" for number in range(begin, begin + count)])
        begin += count
    stages[0] = [*(before or ["tok_embeddings"]), *stages[0]]
    stages[-1] = [*stages[-1], *after]
    return stages


def _write(layout: Uniform, model: ModelSpec) -> str:
    return "".join(f"{shlex.join(option)}\n" for option in options_of(layout, model))


def _more(layout: Uniform, model: ModelSpec) -> str | None:
    if model.training.tunes:
        return "has no option for frozen parameters or adapters"
    if model.layers[-1].fused_loss is not None and not layout.fused_loss:
        return "computes the loss in chunks in its recipes"
    if layout.pipeline > 1 and any(layer.tied_parameters for layer in model.layers):
        return "does not divide a model with tied embeddings into stages"
    return sharded_pipeline(layout) or _data(layout) or _experts(layout, model)


def sharded_pipeline(layout: Uniform) -> str | None:
    """PyTorch's pipeline stages gather FSDP's parameters once an iteration, keep them and their gradients whole, and
    reduce these after the last micro-batch (``backward_maybe_with_nosync``)."""
    if layout.pipeline > 1 and layout.data > 1 and layout.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS):
        return "keeps parameters and gradients whole in pipeline stages until the last micro-batch"
    if layout.pipeline == 1 and layout.sharding is Sharding.OPTIMIZER:
        return "has no option by which data-parallel ranks divide optimizer states alone, without a pipeline"
    return None


def _data(layout: Uniform) -> str | None:
    if layout.data > 1 and layout.sharding is Sharding.NONE and layout.pipeline == 1 and layout.micro_batches > 1:
        return "sums the gradients of replicas after each micro-batch, not once an iteration"
    return None


def _experts(layout: Uniform, model: ModelSpec) -> str | None:
    if not model.has_experts:
        return None
    if layout.expert == 1:
        return "does not split experts under TP without expert parallelism" if layout.tensor > 1 else None
    if layout.expert_tensor > 1:
        return "has no TP inside experts"
    whole = layout.expert == layout.data * layout.tensor
    return None if whole or layout.sharding is Sharding.PARAMETERS else "shards what expert parallelism leaves whole"


def _notes(layout: Uniform, model: ModelSpec) -> tuple[str, ...]:
    notes = ["put --module and --config of the model's recipe before them; they must be the last options"]
    family = families().get(model.family)
    if family is not None and _NAME not in family.recipes:
        notes.append(f"torchtitan 0.3 has no recipe for models such as {model.name}: its model would be yours to write")
    if model.training.precision is Precision.TF32:
        notes.append("TF32 is PyTorch's setting, not an option of torchtitan")
    return tuple(notes)


TORCHTITAN = Target(
    name=_NAME,
    title="torchtitan",
    suffix=".args",
    comment="",
    pipelines=True,
    shardings=frozenset(Sharding),
    hybrid=True,
    sequence_parallel=True,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    partial=False,
    fused_loss=True,
    experts=True,
    optimizers=frozenset({ADAMW.name}),
    more=_more,
    write=_write,
    notes=_notes,
)
