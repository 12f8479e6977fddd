"""Today's recipe on one whole GPU: our runtime beside FSDP2 programs on the stock model, in one boot.

    python benchmarks/recipe.py run [--cases llama-2k,bert] [--programs ours,compiled] --out results/recipe.jsonl
    python benchmarks/recipe.py table results/recipe.jsonl
    python benchmarks/recipe.py predicted results/recipe.jsonl    our plans as the preset prices them today, beside runs

Each program runs in a process of its own: bf16 over fp32 masters, fused AdamW, clipping to 1. The stock programs are
torchtitan's recipe: FSDP2 mixed precision on each block, blocks as they are or compiled, with Liger's kernels or
without. The stock programs of LoRA cases are peft's loop: a bf16 base under autocast, without FSDP2. Figures are
medians of steps after the first ones; each program runs ``--repeats`` times, in turns. Ours runs as stock models do,
with its loss in chunks (``ours-fused``), with all but matrix products and attention recomputed, too
(``ours-selective``), or uncompiled. ``float8`` and ``ours-float8`` compute linear layers of blocks in float8, scaled by
rows, through torchao; ``ours-narrow`` has the optimizer's states in bf16. Cases of TF32 compute in that, without mixed
precision, in all programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "llama-2k": {"model": "llama", "batch": 8, "tokens": 2048},
    "llama-8k": {"model": "llama", "batch": 2, "tokens": 8192},
    "qwen3-2k": {"model": "qwen3", "batch": 4, "tokens": 2048},
    "bert": {"model": "bert", "batch": 32, "tokens": 512},
    "llama-2k-16": {"model": "llama", "batch": 16, "tokens": 2048},
    "llama-2k-32": {"model": "llama", "batch": 32, "tokens": 2048},
    "llama-8k-8": {"model": "llama", "batch": 8, "tokens": 8192},
    "qwen3-2k-8": {"model": "qwen3", "batch": 8, "tokens": 2048},
    "qwen3-2k-16": {"model": "qwen3", "batch": 16, "tokens": 2048},
    "bert-64": {"model": "bert", "batch": 64, "tokens": 512},
    "bert-128": {"model": "bert", "batch": 128, "tokens": 512},
    "bert-tf32": {"model": "bert", "batch": 16, "tokens": 512, "precision": "tf32"},
    "llama-2k-tf32": {"model": "llama", "batch": 4, "tokens": 2048, "precision": "tf32"},
    "tiny": {"model": "tiny", "batch": 4, "tokens": 64},
    "lora-8b": {"model": "llama3-8b", "batch": 4, "tokens": 2048, "lora": 16},
    "lora-8b-8": {"model": "llama3-8b", "batch": 8, "tokens": 2048, "lora": 16},
    "tiny-lora": {"model": "tiny", "batch": 4, "tokens": 64, "lora": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    },
    "qwen3": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 1280, "num_hidden_layers": 32,
        "num_attention_heads": 16, "intermediate_size": 5120, "vocab_size": 30522, "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "llama3-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
_PROGRAMS = (
    "eager", "compiled", "liger", "float8", "ours", "ours-fused", "ours-selective", "ours-float8", "ours-narrow",
    "ours-eager",
)  # fmt: skip
_WARM, _TIMED = 6, 12
_RATE = 1e-4


def _batches(case: dict[str, Any], config: dict[str, Any], device: Any) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (case["batch"], case["tokens"])
    ids = [torch.randint(config["vocab_size"], shape, generator=generator).to(device) for _ in range(4)]
    return [{"input_ids": own, "labels": own.clone()} for own in ids]


def _with_kernels(program: str, config: dict[str, Any]) -> None:
    """Liger's, in place of the stock model's classes."""
    if program == "liger":
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{config['model_type']}")()


def _to_float8(block: Any) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name("rowwise"))


def stock_model(config: dict[str, Any], device: Any, dtype: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    made = AutoConfig.for_model(config["model_type"], use_cache=False, **fields)
    kind: Any = AutoModelForMaskedLM if config["model_type"] == "bert" else AutoModelForCausalLM
    torch.manual_seed(0)
    with device:
        return kind.from_config(made, attn_implementation="sdpa", dtype=dtype).train()


def _peft(program: str, config: dict[str, Any], case: dict[str, Any], device: Any) -> tuple[Any, Any]:
    """peft's own loop: the base in bf16, adapters in fp32, products under autocast, as the Trainer runs it."""
    import torch
    from peft import LoraConfig, get_peft_model

    _with_kernels(program, config)
    base = stock_model(config, device, torch.bfloat16)
    torch._dynamo.config.recompile_limit = 64
    adapters = LoraConfig(r=case["lora"], lora_alpha=2 * case["lora"], target_modules="all-linear", lora_dropout=0.0)
    model = get_peft_model(base, adapters)
    if program != "eager":
        for block in base.model.layers:
            block.compile()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_RATE, fused=True)

    def step(batch: dict[str, Any]) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model


def _stock(
    program: str, config: dict[str, Any], case: dict[str, Any], device: Any
) -> tuple[Callable[[dict[str, Any]], Any], Any]:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _with_kernels(program, config)
    model = stock_model(config, device, torch.float32)
    torch._dynamo.config.recompile_limit = 64  # as ours: by default blocks that differ in a constant are not compiled
    blocks = model.bert.encoder.layer if config["model_type"] == "bert" else model.model.layers
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "precision" in case:
        torch.backends.cuda.matmul.allow_tf32 = case["precision"] == "tf32"
        policy = MixedPrecisionPolicy()
    for block in blocks:
        if program == "float8":
            _to_float8(block)
        if program != "eager":
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)

    def step(batch: dict[str, Any]) -> Any:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model


def _plan(program: str, case: dict[str, Any]) -> Any:
    """Ours, priced by the preset: nothing is measured."""
    from dataclasses import replace

    from galvatron.core.spec import Precision, Training
    from galvatron.core.spec.tuning import Lora
    from galvatron.families import load_cluster
    from galvatron.measure.models import load_any_model
    from galvatron.planner.plan.by_hand import priced
    from galvatron.planner.plan.planner import Request

    training = Training(
        precision=Precision(case.get("precision", "bf16")),
        optimizer="adamw-bf16" if program == "ours-narrow" else "adamw",
        sequence_length=case["tokens"],
        compile=program != "ours-eager",
        float8=program == "ours-float8",
        dropout=False,
        lora=Lora(rank=case["lora"], alpha=2.0 * case["lora"]) if "lora" in case else None,
    )
    spec = load_any_model(MODELS[case["model"]], training)
    cluster = replace(load_cluster("h200-8"), name="h200", levels=())
    strategies = ["single"] * len(spec.layers)
    if program == "ours-selective":
        strategies[1:-1] = ["single+rs"] * (len(spec.layers) - 2)
    if program == "ours-float8":
        strategies[1:-1] = ["single+f8"] * (len(spec.layers) - 2)
    if program in ("ours-fused", "ours-selective", "ours-float8", "ours-narrow"):
        strategies[-1] = "single+fl"
    return priced(Request(model=spec, cluster=cluster, batch=case["batch"]), [strategies])


def _ours(program: str, case: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Any], Any]:
    import galvatron

    plan = _plan(program, case)
    model = galvatron.parallelize(None, plan, check=False)
    optimizer = model.optimizer(lr=_RATE)

    def step(batch: dict[str, Any]) -> Any:
        loss = model.forward_backward(batch)
        model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, plan


def _one(name: str, program: str) -> dict[str, Any]:
    """One program, in this process."""
    import torch
    import torch.distributed as dist

    case = CASES[name]
    config = MODELS[case["model"]]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=1, device_id=device if cuda else None)
    begin = time.perf_counter()
    ours = program.startswith("ours")
    if ours:
        step, made = _ours(program, case)
    elif "lora" in case:
        step, made = _peft(program, config, case, device)
    else:
        step, made = _stock(program, config, case, device)
    batches = _batches(case, config, device)
    losses, seconds = [], []
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else (lambda: None)
    first_s = None
    for number in range(_WARM + _TIMED):
        if number == _WARM and cuda:
            wait()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step(batches[number % len(batches)])
        wait()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
        first_s = first_s or time.perf_counter() - begin
    typical = statistics.median(seconds[_WARM:])
    found = {
        "case": name, "program": program, "step_s": typical, "tokens_per_s": case["batch"] * case["tokens"] / typical,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None, "until_first_step_s": first_s,
        "losses": [losses[0], losses[-1]], "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }  # fmt: skip
    if ours:
        from galvatron.runtime.compiled import compiler

        found |= {"predicted_s": made.iteration_s, "predicted_gb": made.memory_bytes / 1e9}
        found |= {"graphs": compiler().graphs, "compile_s": compiler().seconds, "not_compiled": compiler().failures}
    dist.destroy_process_group()
    return found


def _run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")[:8]
    for repeat in range(args.repeats):
        for case in args.cases.split(","):
            for program in args.programs.split(","):
                if program == "liger" and CASES[case]["model"] == "bert":
                    continue  # Liger has no kernels for it
                command = [sys.executable, __file__, "one", case, program]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                told = done.stderr.strip().splitlines()
                found = json.loads(lines[-1]) if lines else {"case": case, "program": program, "error": told[-3:]}
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found | {"repeat": repeat, "boot": boot}) + "\n")
                shown = found.get("tokens_per_s"), found.get("peak_gb"), found.get("losses"), found.get("error")
                print(case, program, *shown, flush=True)


def _runs(path: str) -> Iterator[dict[str, Any]]:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        if "error" not in found and "note" not in found:  # a note says why a run does not count
            yield found


def _predicted(path: str) -> None:
    """What the preset says of our plans today, beside the latest run of each."""
    latest = {(run["case"], run["program"]): run for run in _runs(path) if run["program"].startswith("ours")}
    print("| case | program | predicted, measured s | predicted, measured GB of tensors |\n|---|---|---|---|")
    for (case, program), run in latest.items():
        plan = _plan(program, CASES[case])
        (stage,) = plan.stages
        tensors = stage.memory.states + stage.memory.activations + stage.memory.transient
        pairs = [(plan.iteration_s, run["step_s"]), (tensors / 1e9, run["peak_gb"])]
        cells = [f"{said:.3g}, {was:.3g} ({was / said - 1:+.1%})" for said, was in pairs]
        print(f"| {case} | {program} | {cells[0]} | {cells[1]} |", flush=True)


def _table(path: str) -> None:
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for found in _runs(path):
        rows.setdefault((found.get("boot"), found["case"], found["program"]), []).append(found)
    rates = {key: statistics.median(run["tokens_per_s"] for run in runs) for key, runs in rows.items()}
    print("| boot | case | program | tokens/s | of the best stock program | peak GB |\n|---|---|---|---|---|---|")
    for (boot, case, program), runs in rows.items():
        stock = [rate for (*same, name), rate in rates.items() if same == [boot, case] and not name.startswith("ours")]
        rate = rates[boot, case, program]
        share = f"{rate / max(stock):.3f}" if stock else ""
        print(f"| {boot} | {case} | {program} | {rate:,.0f} | {share} | {runs[0]['peak_gb']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--cases", default="llama-2k,llama-8k,qwen3-2k,bert")
    run.add_argument("--programs", default=",".join(_PROGRAMS))
    run.add_argument("--repeats", type=int, default=1)
    run.add_argument("--out", default="benchmarks/results/recipe.jsonl")
    one = commands.add_parser("one")
    one.add_argument("case")
    one.add_argument("program")
    commands.add_parser("table").add_argument("path")
    commands.add_parser("predicted").add_argument("path")
    args = parser.parse_args()
    if args.command == "run":
        for option, given, known in (("cases", args.cases, CASES), ("programs", args.programs, _PROGRAMS)):
            unknown = [name for name in given.split(",") if name not in known]
            if unknown:
                parser.error(f"{option}: {unknown[0]!r} given; expected some of {', '.join(known)}")
        _run(args)
    elif args.command == "one":
        print(json.dumps(_one(args.case, args.program)))
    elif not Path(args.path).is_file():
        parser.error(f"{args.path}: no such file; expected results that 'run' wrote")
    else:
        {"table": _table, "predicted": _predicted}[args.command](args.path)


if __name__ == "__main__":
    main()
