"""What we export is accepted by the systems themselves: their own parsers and configuration objects are built from it.

Each needs its package (``pip install megatron-core torchtitan deepspeed accelerate nemo-automodel``) and is skipped
where that is missing. The degrees, stages and micro-batches are then read from the packages' objects, not from ours.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from exchange_plans import PLANS, exported

from galvatron.core.spec import Kind
from galvatron.planner.exchange.export import Export

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages
EACH_PLAN = pytest.mark.parametrize("name", PLANS)
WITHOUT_STAGES = pytest.mark.parametrize("name", [name for name in PLANS if name != "pipeline"])


def _flags(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        first, *values = shlex.split(line)
        found[first.removeprefix("--").replace("-", "_")] = values
    return found


def _typed(values: list[str]) -> Any:
    if not values:
        return True
    return int(values[0]) if values[0].isdigit() else values[0]


@EACH_PLAN
def test_megatron_core(name: str) -> None:
    """Every flag is a field of megatron-core's configuration, or one of the trainer's; the objects are built, the
    pipeline's layout is parsed, and Megatron's own order of ranks gives the groups of the plan."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    export = exported(name, "megatron")
    flags, plan = _flags(export.text), export.plan
    config = plan.model.config or {}
    trainers = {"micro_batch_size", "global_batch_size", "seq_length", "ckpt_format", "no_gradient_accumulation_fusion"}
    fields = [
        set(each.__dataclass_fields__) for each in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    ]
    assert set(flags) <= trainers.union(*fields)
    own: dict[str, Any] = {key: _typed(value) for key, value in flags.items() if key in fields[0]}
    transformer = TransformerConfig(
        hidden_size=config.get("hidden_size", 2048),
        num_attention_heads=config.get("num_attention_heads", 16),
        num_query_groups=config.get("num_key_value_heads"),
        num_moe_experts=8 if plan.model.spec().has_experts else None,
        pipeline_dtype="bf16" if plan.pipeline_degree > 1 else None,
        variable_seq_lengths=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        **own,
    )
    DistributedDataParallelConfig(**{key: _typed(value) for key, value in flags.items() if key in fields[1]})
    OptimizerConfig(**{key: _typed(value) for key, value in flags.items() if key in fields[2]})
    tensor, pipeline = transformer.tensor_model_parallel_size, transformer.pipeline_model_parallel_size
    data = plan.cluster.devices // (tensor * pipeline)
    assert tensor * pipeline * data == plan.cluster.devices
    assert pipeline == plan.pipeline_degree
    batches = ConstantNumMicroBatchesCalculator(
        _typed(flags["global_batch_size"]), _typed(flags["micro_batch_size"]), data, False, 0
    )
    assert batches.get() == plan.micro_batches
    if transformer.pipeline_model_parallel_layout is not None:
        layout = PipelineParallelLayerLayout.from_str(_typed(flags["pipeline_model_parallel_layout"]), pipeline)
        layout.validate_layer_layout(num_layers=transformer.num_layers, mtp_num_layers=None)
        counts = [sum(len(part) for part in stage) for stage in layout.layout]
        assert counts == [len(stage.layers) for stage in plan.stages]
    else:
        assert {len(stage.layers) for stage in plan.stages[1:-1]} <= {transformer.num_layers // pipeline}
    ranks = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp")
    _same_groups(export, ranks.get_ranks("tp"), Kind.TP)
    assert [list(stage.devices) for stage in plan.stages] == sorted(map(sorted, ranks.get_ranks("tp-dp")))
    if flags.get("expert_model_parallel_size", ["1"]) != ["1"]:
        expert = transformer.expert_model_parallel_size
        inside = transformer.expert_tensor_parallel_size
        rest = plan.cluster.devices // (pipeline * expert * inside)
        experts = RankGenerator(tp=inside, ep=expert, dp=rest, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp")
        _same_groups(export, experts.get_ranks("ep"), Kind.EP)


def _same_groups(export: Export, groups: list[list[int]], kind: Kind) -> None:
    """The groups of ranks that the system makes are those of the plan's axis."""
    found = set()
    for stage in export.plan.stages:
        strategy = next((each for each in stage.strategies if each.experts), stage.strategies[-1])
        factors = strategy.expert_factors(kind) if kind is Kind.EP else strategy.factors(kind)
        for rank in range(len(stage.devices)):
            group = [
                other
                for other in range(len(stage.devices))
                if all(
                    rank // factor.stride % factor.size == other // factor.stride % factor.size
                    for factor in _all_factors(len(stage.devices), strategy, kind) - factors
                )
            ]
            found.add(tuple(stage.devices[other] for other in group))
    assert found == {tuple(group) for group in groups}


def _all_factors(size: int, strategy: Any, kind: Kind) -> frozenset[Any]:
    own = strategy.expert_factors(*Kind) if kind is Kind.EP else strategy.factors(*Kind)
    return frozenset(own)


@EACH_PLAN
def test_torchtitan(name: str) -> None:
    """torchtitan's own configuration manager reads the options over a recipe, and its mesh takes the degrees."""
    pytest.importorskip("torchtitan.trainer", reason="torchtitan is not installed")
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    export = exported(name, "torchtitan")
    plan = export.plan
    recipe = ["--module", "qwen3", "--config", "qwen3_30b_a3b"] if plan.model.spec().has_experts else [
        "--module", "llama3", "--config", "llama3_8b"
    ]  # fmt: skip
    config = ConfigManager().parse_args(recipe + shlex.split(export.text))
    parallelism, training = config.parallelism, config.training
    dims = ParallelDims.from_config(parallelism, plan.cluster.devices)
    assert dims.dp_replicate * dims.dp_shard * dims.tp * dims.pp == plan.cluster.devices
    assert dims.pp == plan.pipeline_degree
    data = dims.dp_replicate * dims.dp_shard
    if dims.pp > 1:
        modules = parallelism.module_fqns_per_model_part
        layers = [[each for each in stage if each.startswith("layers.")] for stage in modules]
        outside = [1 if number in (0, dims.pp - 1) else 0 for number in range(dims.pp)]
        assert [len(each) + own for each, own in zip(layers, outside, strict=True)] == [
            len(stage.layers) for stage in plan.stages
        ]
        micro_batches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        assert training.local_batch_size * data == training.global_batch_size == plan.batch
    else:
        micro_batches = training.global_batch_size // (training.local_batch_size * data)
    assert (micro_batches, training.global_batch_size) == (plan.micro_batches, plan.batch)
    assert (config.activation_checkpoint is None) == (str(export.layout.recompute) == "none")


@WITHOUT_STAGES
def test_deepspeed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's configuration is built from the file in a world of the plan's size, and checks its batch."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime import config as deepspeed_config

    export = exported(name, "deepspeed")
    devices = export.plan.cluster.devices
    monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda: devices)
    file = tmp_path / "deepspeed.json"
    file.write_text(export.text)
    config = deepspeed_config.DeepSpeedConfig(str(file))
    tensor = max(1, config.tensor_parallel_config.autotp_size)
    assert config.train_batch_size == export.plan.batch * tensor  # it counts the ranks of TP as well
    assert config.gradient_accumulation_steps == export.plan.micro_batches
    assert config.train_micro_batch_size_per_gpu * devices // tensor == export.plan.micro_batch
    stages = {"none": 0, "optimizer states": 1, "optimizer states and gradients": 2}
    wanted = stages.get(str(export.layout.sharding), 3) if export.layout.data > 1 else 0
    assert config.zero_optimization_stage == wanted
    assert config.bfloat16_config.enabled


@WITHOUT_STAGES
def test_accelerate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``accelerate launch`` reads the file, and its processes build their plugins from the environment it makes."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env

    export = exported(name, "accelerate")
    file = tmp_path / "accelerate.yaml"
    file.write_text("# said\n" + export.text)
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.num_processes == export.plan.cluster.devices
    steps = f"pass --gradient_accumulation_steps {export.plan.micro_batches} to accelerate launch"
    assert (steps in export.notes) == (export.plan.micro_batches > 1)
    samples = f"give the data loader {export.plan.micro_batch // export.layout.data} samples a device"
    assert any(note.startswith(samples) for note in export.notes)
    for key, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(key, value)
    if arguments.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.activation_checkpointing == (str(export.layout.recompute) == "all")
        assert bool(plugin.reshard_after_forward) == (str(export.layout.sharding).endswith("parameters"))
    if arguments.use_parallelism_config:
        config = ParallelismConfig()
        assert config.total_size == export.plan.cluster.devices
        assert (config.tp_size, config.dp_shard_size) == (export.layout.tensor, export.layout.shards)


@EACH_PLAN
def test_automodel(name: str, tmp_path: Path) -> None:
    """NeMo Automodel's own reader of the recipe's section builds its configuration objects."""
    pytest.importorskip("nemo_automodel", reason="nemo-automodel is not installed")
    yaml = pytest.importorskip("yaml")
    from nemo_automodel.components.distributed.config import DDPConfig
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    export = exported(name, "automodel")
    content = yaml.safe_load(export.text)
    parsed = parse_distributed_section(content["distributed"])
    plan, layout, steps = export.plan, export.layout, content["step_scheduler"]
    sizes = parsed["parallelism_sizes"]
    if isinstance(parsed["strategy_config"], DDPConfig):
        data, stages = plan.cluster.devices, 1
    else:
        data, stages = sizes.dp_size, sizes.pp_size
        assert data * sizes.tp_size * stages == plan.cluster.devices
        assert parsed["strategy_config"].sequence_parallel == layout.sequence_parallel
    assert stages == plan.pipeline_degree
    if stages > 1:
        pipeline = parsed["pipeline_config"]
        modules = pipeline.module_fqns_per_model_part
        outside = [1 if number in (0, stages - 1) else 0 for number in range(stages)]
        assert [
            sum(".layers." in each for each in stage) + own for stage, own in zip(modules, outside, strict=True)
        ] == [len(stage.layers) for stage in plan.stages]
        assert steps["local_batch_size"] // pipeline.pp_microbatch_size == plan.micro_batches
        assert steps["local_batch_size"] * data == plan.batch
    else:
        assert steps["global_batch_size"] // (steps["local_batch_size"] * data) == plan.micro_batches
    assert steps["global_batch_size"] == plan.batch
