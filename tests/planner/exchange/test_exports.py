"""What an export says is what the plan says, and what cannot be said is refused by name or replaced by the best."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

import pytest
from exchange_plans import PLANS, exported, plan_of
from longer import longer

from galvatron.core.errors import Infeasible, InvalidInput
from galvatron.core.spec import Kind, Strategy
from galvatron.planner.exchange.best import best_for, conventions_of
from galvatron.planner.exchange.export import TARGETS, export_plan, target_named
from galvatron.planner.exchange.pricing import SOURCES, source_named
from galvatron.planner.exchange.target import Target, refusal
from galvatron.planner.exchange.uniform import Inexpressible, Recompute, Sharding, stages_of, uniform_of
from galvatron.planner.exchange.yaml_text import yaml_text
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.explain import request_of
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.setup import Setup, request_for


@dataclass(frozen=True, slots=True)
class Said:
    """What a text says, read from it alone."""

    tensor: int
    pipeline: int
    data: int
    micro_batches: int
    batch: int


def _said(target: str, text: str, devices: int) -> Said:
    if target in ("megatron", "torchtitan"):
        words = {line.split()[0].lstrip("-"): shlex.split(line)[1:] for line in text.splitlines()}
        if target == "megatron":
            tensor, pipeline, sample, batch = (
                int(words[name][0])
                for name in (
                    "tensor-model-parallel-size", "pipeline-model-parallel-size",
                    "micro-batch-size", "global-batch-size",
                )
            )  # fmt: skip
            data = devices // (tensor * pipeline)
            return Said(tensor, pipeline, data, batch // (sample * data), batch)
        degree = {name: int(words[f"parallelism.{name}_degree"][0]) for name in (
            "tensor_parallel", "pipeline_parallel", "data_parallel_replicate", "data_parallel_shard"
        )}  # fmt: skip
        data = degree["data_parallel_replicate"] * degree["data_parallel_shard"]
        local, batch = (int(words[f"training.{name}_batch_size"][0]) for name in ("local", "global"))
        sample = int(words.get("parallelism.pipeline_parallel_microbatch_size", [str(local)])[0])
        return Said(degree["tensor_parallel"], degree["pipeline_parallel"], data, batch // (sample * data), batch)
    if target == "deepspeed":
        content = json.loads(text)
        tensor = content.get("tensor_parallel", {}).get("autotp_size", 1)
        steps = content["gradient_accumulation_steps"]
        batch = content["train_micro_batch_size_per_gpu"] * steps * devices // tensor
        assert content.get("train_batch_size", batch) == batch
        return Said(tensor, 1, devices // tensor, steps, batch)
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    content = yaml.safe_load(text)
    if target == "automodel":
        distributed, steps = content["distributed"], content["step_scheduler"]
        tensor, pipeline = distributed.get("tp_size", 1), distributed.get("pp_size", 1)
        data = distributed.get("dp_size", devices)
        sample = distributed.get("pipeline", {}).get("pp_microbatch_size", steps["local_batch_size"])
        batch = steps["global_batch_size"]
        return Said(tensor, pipeline, data, batch // (sample * data), batch)
    sizes = content.get("parallelism_config", {})
    tensor = sizes.get("parallelism_config_tp_size", 1)
    assert content["num_processes"] == devices
    return Said(tensor, 1, devices // tensor, 0, 0)  # the rest is for the script


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
@pytest.mark.parametrize("name", [name if number % 3 == 0 else longer(name) for number, name in enumerate(PLANS)])
def test_degrees_multiply_to_the_devices(name: str, target: str) -> None:
    if name == "pipeline" and not target_named(target).pipelines:
        with pytest.raises(Infeasible, match="no plan within --pipeline 4"):
            exported(name, target)
        return
    export = exported(name, target)
    plan = export.plan
    said = _said(target, export.text, plan.cluster.devices)
    assert said.tensor * said.pipeline * said.data == plan.cluster.devices == export.layout.devices
    assert said.pipeline == plan.pipeline_degree
    assert _needed(plan) <= plan.memory_budget_bytes + 1
    if target != "accelerate":
        assert (said.micro_batches, said.batch) == (plan.micro_batches, plan.batch)
    degrees = {strategy.degree(Kind.TP) for stage in plan.stages for strategy in stage.strategies}
    assert degrees == {said.tensor}
    assert bool(export.why_not) == (plan != export.asked)


@pytest.mark.parametrize("system", [source.target.name for source in SOURCES])
@pytest.mark.parametrize("name", PLANS)
def test_what_is_exported_is_read_back(name: str, system: str) -> None:
    if name == "pipeline" and system == "deepspeed":
        return  # it has none
    export, source = exported(name, system), source_named(system)
    model, devices = export.plan.model.spec(), export.plan.cluster.devices
    reading = source.read(export.text, model, devices)
    said = export.layout if system != "deepspeed" else replace(export.layout, recompute=Recompute.NONE)
    assert reading.layout == said
    assert not reading.unknown
    setup = source.setup(export.text, devices)
    assert setup.get("batch") == export.plan.batch
    assert setup.get("precision") == export.plan.model.training.precision


def _by_hand(stages: list[list[str]], micro_batches: int = 4, **setup: object) -> Plan:
    asked: Setup = {"batch": 16, **setup}  # type: ignore[typeddict-item]
    return priced(request_for("llama-tiny", "h100:4", asked), stages, micro_batches=micro_batches)


REFUSED = [
    ([["sdp4", "sdp4", "dp4", "sdp4"]], "megatron", r"layer 2 \(decoder\) of stage 0 has strategy 'dp4'"),
    ([["dp2-tp2", "tp2-dp2", "tp2-dp2", "dp2-tp2"]], "torchtitan", "whose axes are not DP over SDP over TP"),
    ([["dp4", "dp4+rs", "dp4+rs", "dp4"]], "megatron", "Megatron-LM has no option for recompute of all but matrix"),
    ([["dp4", "dp4+rs", "dp4+rc", "dp4"]], "megatron", r"layer 2 \(decoder\) recomputes all, layer 1 all but matrix"),
    ([["dp4+rc", "dp4", "dp4", "dp4"]], "megatron", r"layer 0 \(embedding\) of stage 0 has strategy 'dp4\+rc'"),
    ([["dp4", "dp4", "dp4", "dp4+fl"]], "megatron", r"layer 3 \(head\) has strategy 'dp4\+fl': .* no loss in chunks"),
    ([["ring4"] * 4], "megatron", "no layout of other systems is known with ring"),
    ([["dp2-sdp2"] * 4], "megatron", "no option for 2 replicas of 2 shards"),
    ([["dp2+zero2"] * 2] * 2, "megatron", "Megatron-FSDP, which goes with TP and EP but not with a pipeline"),
    ([["dp2+zero2", "dp2+zero2"], ["dp2+zero2", "dp2+fl+zero2"]], "torchtitan", "whole in pipeline stages until"),
    ([["dp2"] * 2] * 2, "deepspeed", "DeepSpeed has no option for a pipeline, and there are 2 stages"),
    ([["dp2-tp2", "dp2-tp2+sp", "dp2-tp2+sp", "dp2-tp2+sp"]], "accelerate", "no option for sequence parallelism"),
    ([["dp2-tp2"] * 4], "accelerate", "does not put TP under replicas without shards"),
    ([["dp4", "dp4", "dp4", "dp4+fl"]], "torchtitan", "sums the gradients of replicas after each micro-batch"),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "target", "reason"), REFUSED)
def test_what_cannot_be_said_is_refused_with_the_layer(stages: list[list[str]], target: str, reason: str) -> None:
    plan = _by_hand(stages)
    with pytest.raises(Inexpressible, match=f"^(?=layer ).*{reason}"):
        export_plan(plan, target_named(target), strict=True)


def test_some_recomputed_blocks_are_megatrons_block_method() -> None:
    """One block of each stage, wherever in the stage it is."""
    text = export_plan(_by_hand([["dp2", "dp2+rc"], ["dp2+rc", "dp2"]]), target_named("megatron"), strict=True).text
    assert "--recompute-method uniform" in text  # all blocks are
    model = {
        "model_type": "llama", "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 128, "max_position_embeddings": 128,
    }  # fmt: skip
    request = request_for(model, "h100:4", Setup(batch=16))
    plan = priced(request, [["dp2", "dp2", "dp2+rc"], ["dp2+rc", "dp2", "dp2"]], micro_batches=4)
    text = export_plan(plan, target_named("megatron"), strict=True).text
    assert "--recompute-method block\n--recompute-num-layers 1\n" in text
    uneven = priced(request, [["dp2", "dp2+rc", "dp2+rc"], ["dp2+rc", "dp2", "dp2"]], micro_batches=4)
    with pytest.raises(Inexpressible, match="recompute alike in all blocks"):
        export_plan(uneven, target_named("megatron"), strict=True)


def test_models_that_are_no_stack_of_blocks_are_refused() -> None:
    plan = priced(request_for("t5-tiny", "h100:2", Setup(batch=8)), [["dp2"] * 7])
    for target in TARGETS:
        with pytest.raises(Inexpressible, match="is not an embedding, a stack of blocks and a head"):
            export_plan(plan, target)


def _expressible(request: Request, target: Target) -> Iterator[tuple[Plan, list[list[Strategy]]]]:
    """Every plan that the system can run, by trying all strategies, cuts and micro-batches."""
    layers, devices = len(request.model.layers), request.cluster.devices
    for degree in [each for each in (1, 2, 4) if devices % each == 0]:
        for block in request.searched_space.strategies(devices // degree):
            plain = replace(block, recompute=False, selective_recompute=False, recompute_but_attention=False)
            outside = {replace(plain, sequence_parallel=on) for on in {False, plain.sequence_parallel}}
            for first, last, cuts in product(outside, outside, combinations(range(1, layers), degree - 1)):
                every = [first, *[block] * (layers - 2), last]
                ends = [0, *cuts, layers]
                stages = [every[begin:end] for begin, end in pairwise(ends)]
                for micro_batches in (1, 2, 4, 8):
                    if degree > 1 and micro_batches < degree:
                        continue
                    try:
                        plan = priced(request, stages, micro_batches=micro_batches)
                        if refusal(target, uniform_of(plan), request.model) is None:
                            yield plan, stages
                    except InvalidInput:
                        continue


def _needed(plan: Plan) -> int:
    """The least budget in which a plan fits: what is not reserved loses a share to the allocator."""
    cluster = plan.cluster.facts
    return cluster.reserved_bytes + math.ceil(
        (plan.memory_bytes - cluster.reserved_bytes) / (1 - cluster.fragmentation)
    )


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["megatron", "accelerate"])
def test_the_best_that_a_system_can_run_is_the_best_of_all(name: str, devices: int) -> None:
    """Brute force over every strategy, cut and number of micro-batches, under a budget that is tight."""
    request = request_for("llama-tiny", f"h100:{devices}", Setup(batch=4, compile=False, fused_loss=False))
    target = target_named(name)
    if name == "megatron":  # a distributed optimizer is not among our strategies
        target = replace(target, partial=False, shardings=frozenset(Sharding) - {Sharding.OPTIMIZER})
    every = [plan for plan, _ in _expressible(request, target)]
    needs = sorted(map(_needed, every))
    for budget in (needs[0], needs[len(needs) // 8], needs[-1]):
        tight = replace(request, memory_bytes=budget)
        best = max(plan.throughput for plan in every if _needed(plan) <= budget)
        found = best_for(tight, target).plan
        assert found.throughput == pytest.approx(best, rel=1e-9)
        assert found.memory_bytes <= budget
    with pytest.raises(Infeasible, match=f"that {target.title} can run fits llama-tiny"):
        best_for(replace(request, memory_bytes=needs[0] - 1), target)


def test_sequence_parallelism_is_used_where_a_system_has_it() -> None:
    """Of eight-way TP alone, which has room for one micro-batch only so."""
    speeds = {}
    for target in ("megatron", "torchtitan", "automodel", "deepspeed", "accelerate"):
        export = exported("tensor", target)
        assert export.layout.sequence_parallel == target_named(target).sequence_parallel
        speeds[target] = export.plan.throughput
    assert speeds["megatron"] > speeds["deepspeed"]


def test_as_few_blocks_as_fit_are_recomputed() -> None:
    export = exported("pipeline", "megatron")
    layout = export.layout
    assert layout.recomputed is not None
    fewer = replace(layout, recomputed=layout.recomputed - 1)
    request = replace(request_of(plan_of("pipeline")), conventions=conventions_of(layout))
    plan = priced(request, stages_of(fewer, request.model), micro_batches=layout.micro_batches)
    assert plan.throughput > export.plan.throughput
    assert _needed(plan) > plan.memory_budget_bytes


def test_deepspeed_divides_the_states_of_sgd_only_when_told_to() -> None:
    """Its engine stops at an optimizer that it has no list entry for (``zero_allow_untested_optimizer``)."""
    model, cluster, setup = PLANS["all fits"]
    request = request_for(model, cluster, Setup(**{**setup, "optimizer": "sgd"}))
    for strategy, stage in (("dp4", 0), ("sdp4", 3)):
        plan = priced(request, [[strategy] * len(request.model.layers)], micro_batches=1)
        said = json.loads(export_plan(plan, target_named("deepspeed"), strict=True).text)
        assert said["zero_optimization"]["stage"] == stage
        assert said.get("zero_allow_untested_optimizer", False) == (stage > 0)


def test_a_model_that_torchtitan_does_not_have_is_named() -> None:
    for name, missing in (("bert-tiny", True), ("llama-tiny", False)):
        request = request_for(name, "a100:1", Setup(batch=8, precision="bf16"))
        stages = [["single" + "+fl" * (layer.fused_loss is not None) for layer in request.model.layers]]
        export = export_plan(priced(request, stages, micro_batches=1), target_named("torchtitan"))
        assert any("has no recipe" in note for note in export.notes) == missing


def test_yaml_is_read_as_it_was_meant() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    content = {"a": {"b": 1, "c": [["x.0", "y"], ["z"]], "d": {"e": False}}, "f": "full: #1", "g": 1.5}
    assert yaml.safe_load(yaml_text(content)) == content
