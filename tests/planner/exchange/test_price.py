"""Layouts of other systems: what is read of them, what it costs, and what is said of the rest."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from galvatron import cli
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Pass, Strategy
from galvatron.core.spec.limits import Limits
from galvatron.planner.cost import DISTRIBUTED_OPTIMIZER, GALVATRON, Conventions, CostModel, LayerCosts, Tables
from galvatron.planner.exchange.from_megatron import megatron_setup, read_megatron
from galvatron.planner.exchange.interleaved import interleaved
from galvatron.planner.exchange.pricing import price_layout, source_named
from galvatron.planner.exchange.reading import Reading
from galvatron.planner.exchange.uniform import Recompute, Sharding
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.planner.plan.setup import Setup, request_for

_MODEL = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def _request(flags: str, devices: int = 8) -> Request:
    return request_for(_MODEL, f"a100:{devices}", megatron_setup(flags, devices))


def _read(flags: str, devices: int = 8) -> Reading:
    return read_megatron(flags, _request(flags, devices).model, devices)


FLAGS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 --bf16"
)


def test_a_layout_costs_what_the_same_plan_costs_by_hand() -> None:
    flags = f"{FLAGS} --sequence-parallel"
    request = replace(_request(flags), limits=Limits(pipeline_degree=2))
    price = price_layout(request, source_named("megatron"), flags)
    first = ["dp2-tp2", *["dp2-tp2+sp"] * 4]
    by_hand = priced(request, [first, [*["dp2-tp2+sp"] * 5]], micro_batches=4)
    assert price.plan.iteration_s == by_hand.iteration_s
    assert price.plan.memory_bytes == by_hand.memory_bytes
    assert price.fits
    assert price.best is not None
    assert price.within is not None
    assert price.best.throughput >= by_hand.throughput
    assert price.within.plan.throughput >= by_hand.throughput


def test_flags_that_say_the_layout() -> None:
    layout = _read(f"{FLAGS} --use-distributed-optimizer --recompute-granularity full --recompute-method block "
                   "--recompute-num-layers 3 --pipeline-model-parallel-layout 'Ettt|t*5,L'").layout  # fmt: skip
    assert (layout.tensor, layout.pipeline, layout.data, layout.blocks) == (2, 2, 2, (3, 5))
    assert (layout.sharding, layout.recompute, layout.recomputed) == (Sharding.OPTIMIZER, Recompute.FULL, 3)
    assert _read("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params").layout.shards == 8
    assert _read(f"{FLAGS} --decoder-first-pipeline-num-layers 3").layout.blocks == (3, 5)
    embedded = f"{FLAGS} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert _read(embedded).layout.blocks == (4, 4)
    virtual = _read(f"{FLAGS} --num-layers-per-virtual-pipeline-stage 2")
    assert (virtual.schedule.chunks, virtual.schedule.bubble) == (2, 0.5)
    assert _read(f"{FLAGS} --tensor-model-parallel-size=4").layout.tensor == 4  # of two the last counts


def test_what_is_near_is_said_and_what_is_unknown_named() -> None:
    reading = _read(f"{FLAGS} --recompute-activations --fp16 --use-distributed-optimizer --tp-comm-overlap --lr 1e-4 "
                    "--some-new-flag 3 --num-layers-per-virtual-pipeline-stage 1 --swiglu")  # fmt: skip
    assert reading.unpriced == ("--tp-comm-overlap",)
    assert reading.unknown == ("--some-new-flag",)
    said = " ".join(reading.remarks)
    for words in ("selective recompute of attention is priced as none", "fp16", "ZeRO-1", "4 chunks a stage",
                  "--overlap-grad-reduce"):  # fmt: skip
        assert words in said
    eager = request_for(_MODEL, "a100:8", {**megatron_setup(FLAGS, 8), "attention": "eager"}).model
    (maps,) = read_megatron(f"{FLAGS} --recompute-activations --overlap-grad-reduce", eager, 8).remarks
    assert maps.endswith("the maps are priced as kept")
    parts = _read(f"{FLAGS} --recompute-granularity selective --recompute-modules layernorm moe_act")
    assert parts.layout.recompute is Recompute.SELECTIVE
    assert "layernorm, moe_act is priced as recompute of all but matrix products" in parts.remarks[0]
    assert not any("fp32" in remark for remark in parts.remarks)
    plain = _read("--tensor-model-parallel-size 2")
    assert any("Megatron computes in fp32" in remark for remark in plain.remarks)


WRONG = [
    ("--tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size"),
    ("--tensor-model-parallel-size 3", "TP 3 × PP 1 does not divide the cluster's 8 devices"),
    ("--tensor-model-parallel-size two", "two given; expected a whole number"),
    ("--micro-batch-size 3 --global-batch-size 16", "no multiple of --micro-batch-size"),
    ("--context-parallel-size 2", "--context-parallel-size cannot be priced"),
    ("--use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping cannot be priced"),
    ("--num-layers 12", "--num-layers 12 given, but llama has 8"),
    ("--hidden-size 512", "--hidden-size 512 given, but llama has 256"),
    ("--expert-model-parallel-size 2", "llama has no experts"),
    ("--pipeline-model-parallel-size 8 --global-batch-size 4", "4 micro-batches on 8 stages"),
    (f"{FLAGS} --pipeline-model-parallel-layout Ettt|tttL", "expected E, 8 times t, and L in a multiple of 2 parts"),
    (f"{FLAGS} --num-layers-per-virtual-pipeline-stage 3", "does not divide the model's 8 blocks"),
    ("--data-parallel-sharding-strategy all --use-megatron-fsdp", "expected one of no_shard, optim"),
    ("--recompute-granularity some", "expected full or selective"),
    ("--optimizer muon", "--optimizer muon cannot be priced"),
    ("4 --micro-batch-size 1", "'4' given before any flag"),
    ("--tensor-model-parallel-size ²", "² given; expected a whole number"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*999999999999|L", "expected E, 8 times t"),
    (f"{FLAGS} --pipeline-model-parallel-layout t*4|t*4", "expected E, 8 times t, and L"),
    (f"{FLAGS} --pipeline-model-parallel-layout t*4EL|t*4", "expected E, 8 times t, and L"),
    ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|t*8||L", "the stages get 0, 8, 0, 0 blocks"),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 40", "8 blocks do not divide into 2 stages"),
    ("--lr 'x", "the flags cannot be read"),
]


@pytest.mark.parametrize(("flags", "error"), WRONG)
def test_what_cannot_be_meant_is_refused(flags: str, error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        _read(flags)


TITAN = "--training.local_batch_size 4 --parallelism.pipeline_parallel_degree 2"
WRONG_ELSEWHERE = [
    ("torchtitan", "--parallelism.tensor_parallel_degree 2", "training.local_batch_size is not said"),
    ("torchtitan", f"{TITAN} --parallelism.data_parallel_shard_degree 3", "are not the cluster's 8 devices"),
    ("torchtitan", f"{TITAN} --parallelism.pipeline_parallel_schedule ZBVZeroBubble", "ZBVZeroBubble cannot be priced"),
    ("torchtitan", f"{TITAN} activation-checkpoint:memory-budget", "'memory-budget' cannot be priced"),
    ("torchtitan", "[training", "neither options nor TOML"),
    ("torchtitan", f"{TITAN} --parallelism.tensor_parallel_degre 2", "did you mean --parallelism.tensor"),
    ("torchtitan", f"{TITAN} --training.enable_cpu_offload", "enable_cpu_offload cannot be priced"),
    ("torchtitan", f"{TITAN} --parallelism.pipeline_parallel_schedule_csv a.csv", "schedule_csv cannot be priced"),
    ("torchtitan", f"{TITAN} --parallelism.module_fqns_per_model_part", "module_fqns_per_model_part is True; expected"),
    ("torchtitan", f"{TITAN} --parallelism.pipeline_parallel_first_stage_less_layers 20", "stages get -5, 13 blocks"),
    ("torchtitan", f"{TITAN} --parallelism.pipeline_parallel_microbatch_size 3", "4 is no multiple of .* 3; torch"),
    ("torchtitan", "--training.local_batch_size ²", "local_batch_size is '²'; expected a whole number"),
    ("deepspeed", "{", "is no JSON"),
    ("deepspeed", "{}", "neither train_batch_size nor train_micro_batch_size_per_gpu"),
    ("deepspeed", '{"train_batch_size": "auto"}', "expected a whole number .not auto"),
    ("deepspeed", '{"train_batch_size": 12}', "DeepSpeed would refuse it too"),
    ("deepspeed", '{"train_batch_size": 16, "zero_optimisation": {"stage": 3}}', "did you mean zero_optimization"),
    ("deepspeed", '{"train_batch_size": 16, "fp16": {"enabled": "auto"}}', "fp16.enabled is 'auto'; expected true or"),
    ("deepspeed", '{"train_batch_size": 16, "zero_optimization": {"stage": 4}}', "stage 4 given; expected 0 to 3"),
    (
        "deepspeed",
        '{"train_batch_size": 16, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
        "offload_param cannot be priced",
    ),
]


@pytest.mark.parametrize(("system", "text", "error"), WRONG_ELSEWHERE)
def test_what_cannot_be_meant_elsewhere_is_refused(system: str, text: str, error: str) -> None:
    model = request_for(_MODEL, "a100:8", Setup(batch=16)).model
    with pytest.raises(InvalidInput, match=error):
        source_named(system).read(text, model, 8)


def test_layouts_of_torchtitan_and_deepspeed() -> None:
    model = request_for(_MODEL, "a100:8", Setup(batch=16)).model
    titan = source_named("torchtitan").read(
        f"{TITAN} --compile.enable --new.flag 1 activation-checkpoint:selective", model, 8
    )
    assert (titan.layout.blocks, titan.layout.micro_batches, titan.layout.shards) == ((4, 4), 4, 4)
    assert (titan.layout.sharding, titan.layout.recompute) == (Sharding.OPTIMIZER, Recompute.SELECTIVE)
    assert (titan.unpriced, titan.unknown) == (("compile.enable",), ("new.flag",))
    assert "keeps every second" in " ".join(titan.remarks)
    older = "[training]\nlocal_batch_size = 2\n[parallelism]\ntensor_parallel_degree = 2\n"
    older += '[activation_checkpoint]\nmode = "full"'
    toml = source_named("torchtitan").read(older, model, 8).layout
    assert (toml.tensor, toml.shards, toml.sharding, toml.recompute) == (2, 4, Sharding.PARAMETERS, Recompute.FULL)
    steps = source_named("torchtitan").read(f"{TITAN} --training.global_batch_size 32", model, 8)
    assert "drains after each of 2 accumulation steps" in " ".join(steps.remarks)
    speed = source_named("deepspeed").read(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "x": 1}', model, 8
    )
    assert (speed.layout.micro_batches, speed.layout.sharding, speed.unknown) == (2, Sharding.NONE, ("x",))
    older = '{"train_batch_size": 32, "bfloat16": {"enabled": true}}'
    assert source_named("deepspeed").setup(older, 8)["precision"] == "bf16"


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (8, 16)])
def test_interleaved_order_is_what_its_formulas_say(chunks: int, stages: int, micro_batches: int) -> None:
    """Every chunk of every micro-batch goes forward and then backward once, and as many are in flight as is priced."""
    schedule = interleaved(chunks)
    for stage in range(stages):
        order = schedule.actions(stage, stages, micro_batches)
        seen, alive, peak = Counter(), 0, 0  # type: ignore[var-annotated]
        for action in order:
            key = (action.micro_batch, action.chunk)
            assert seen[key] == (action.kind is Pass.BACKWARD)
            seen[key] += 1
            alive += 1 if action.kind is Pass.FORWARD else -1
            peak = max(peak, alive)
        assert set(seen.values()) == {2}
        assert len(seen) == micro_batches * chunks
        assert schedule.in_flight(stage, stages, micro_batches) == -(-peak // chunks)
        ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1  # Megatron's, and the pass that backward follows
        assert peak == min(ahead, micro_batches * chunks)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (8, 16, 3)])
def test_an_interleaved_pipeline_takes_what_is_priced(stages: int, micro_batches: int, chunks: int) -> None:
    """Every stage runs its passes in order as soon as what they need is there; forward takes 1, backward 2. The whole
    takes all passes of a stage and a bubble of 1/v of 1F1B's."""
    schedule = interleaved(chunks)
    left = [list(schedule.actions(stage, stages, micro_batches)) for stage in range(stages)]
    clock, done = [0] * stages, {}  # type: ignore[var-annotated]
    while any(left):
        moved = False
        for stage in range(stages):
            if not left[stage]:
                continue
            action = left[stage][0]
            forward = action.kind is Pass.FORWARD
            place = action.chunk * stages + stage + (-1 if forward else 1)
            if 0 <= place < stages * chunks:
                ready = done.get((action.kind, action.micro_batch, place))
            else:  # the first forward needs nothing, the first backward its forward
                ready = 0 if forward else done.get((Pass.FORWARD, action.micro_batch, stages * chunks - 1))
            if ready is None:
                continue
            clock[stage] = max(clock[stage], ready) + (1 if forward else 2)
            done[action.kind, action.micro_batch, action.chunk * stages + stage] = clock[stage]
            left[stage].pop(0)
            moved = True
        assert moved, "the stages wait for each other"
    stage_time = 3 * chunks
    assert max(clock) == micro_batches * stage_time + schedule.bubble * (stages - 1) * stage_time


def test_a_distributed_optimizer_by_hand() -> None:
    """In bf16 with AdamW over d ranks: 2 bytes of parameter, 4 of gradient and 12/d of optimizer states; gradients go
    out once an iteration, whatever the number of micro-batches."""
    request = request_for(_MODEL, "a100:4", Setup(batch=16, precision="bf16"))
    model = replace(request.model, layers=(request.model.layers[1],))
    strategy = (Strategy.parse("dp4+zero2"),)
    parameters = model.layers[0].parameters

    def tables(conventions: Conventions, micro_batches: int) -> tuple[Tables, LayerCosts]:
        cost = CostModel(model=model, cluster=request.cluster, conventions=conventions).stage(strategy, 1)
        many = np.array([micro_batches])
        return cost.tables(np.array([4]), many), cost.layer_costs(np.array([4]))

    (one, parts), (two, ours) = tables(DISTRIBUTED_OPTIMIZER, 2), tables(GALVATRON, 2)
    assert int(one.state_bytes.reshape(-1)[0]) == pytest.approx(parameters * (2 + 4 + 12 / 4), abs=1)
    assert int(two.state_bytes.reshape(-1)[0]) == pytest.approx(parameters * (2 + 16 / 4), abs=1)
    assert float(parts.sdp_s.reshape(-1)[0]) == 0  # nothing in each micro-batch
    assert float(ours.sdp_s.reshape(-1)[0]) >= 0
    assert float(parts.sync_s.reshape(-1)[0]) >= float(ours.sync_s.reshape(-1)[0])
    assert int(one.transient_bytes.reshape(-1)[0]) <= int(two.transient_bytes.reshape(-1)[0])


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["galvatron", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MODEL))
    model, plan, out = str(tmp_path), str(tmp_path / "plan.json"), tmp_path / "mine.args"
    assert _run(monkeypatch, "plan", model, "-c", "a100:2", "--batch", "16", "-o", plan) == 0
    capsys.readouterr()
    assert _run(monkeypatch, "export-plan", plan, "--to", "megatron", "-o", str(out)) == 0
    assert "written to" in capsys.readouterr().out
    assert _run(monkeypatch, "price", model, "-c", "a100:2", "--from", "megatron", str(out), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"]
    assert said["best"]["throughput"] >= said["same_system"]["throughput"] * (1 - 1e-9) > 0
    assert _run(monkeypatch, "price", model, "-c", "a100:1", "--from", "megatron", "--micro-batch-size 1 --new 2") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:7])) < 80  # the table is as wide as a terminal
    assert "It fits" in shown
    assert "Not known to us, and not priced: --new." in shown
    assert _run(monkeypatch, "price", model, "-c", "a100:4", "--from", "megatron", str(tmp_path / "no")) == 2
    assert _run(monkeypatch, "export-plan", plan, "--to", "colossalai") == 2
    assert _run(monkeypatch, "export-plan", plan, "--to", "accelerate", "-o", str(tmp_path / "x.json")) == 2
    assert "ends in .yaml" in capsys.readouterr().err
