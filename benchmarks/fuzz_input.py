"""Malformed commands and files: whatever is given, a command ends soon, without a traceback, with a status that is
documented.

    python benchmarks/fuzz_input.py --cases 2000 --seed 0 > cases.jsonl

Each case is drawn from its seed alone: a command with strange options, or a file (plan, cluster, profile, model,
configuration, manifest of a checkpoint) that was changed somewhere, is of another kind (a pipe, a folder, nothing), or
has a strange name. It runs in this process as ``galvatron`` does, warnings being errors, and is printed as one line of
JSON. ``done``: status 0, and a plan that was written reads back. ``refused``: a status from 2 to 4 with a message.
``traceback``, ``slow``, ``status`` and ``wrong`` are defects, and end with exit status 1.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import typer.main

from galvatron.cli import main as command
from galvatron.core.files.clusters import dump_cluster, load_cluster
from galvatron.core.files.models import dump_model
from galvatron.core.spec import Training
from galvatron.families import load_model
from galvatron.planner.plan.plan import Plan
from galvatron.train.checkpoints.manifest import MANIFEST, sealed

__all__ = ["Outcome", "Workbench", "fuzz"]

_SLOW_S = 5.0
"""Of processor time."""
_NEVER_S = 120.0
"""By the clock: a machine may be busy."""
_MEMORY_BYTES = 6 << 30
"""More than this is taken for too much."""
_STATUSES = (2, 3, 4)
_DEEP = 3000

_NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 2**31, 2**53, 2**60, 2**63, 2**64, 10**12, 10**30, 10**400, -(2**63), 0.5, -0.0, 1e-308, 1e308,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
_TEXTS = (
    "", " ", "x", "0", "-1", "8GB", "1e9", "nan", "1e400GB", "12.5GB/s", "[/b]", "plan[v2].json", "\0", "\u202e", "ß½٣",
    "a" * 5000, "../../etc/passwd", "/dev/zero", "dp2", "tp8+sp", "{}", "%s%n", "\ud800", "null", "--help", "2³",
)  # fmt: skip
_MODELS = ("bert-tiny", "bert-base", "gpt2", "t5-base", "vit-base")
_CLUSTERS = ("cpu-4", "titan-rtx-8", "a100:2", "h100:2x8", "rtx4090")
_OPTIONS = {
    "--batch": "8", "--batch-tokens": "8k", "--batch-step": "8", "--max-batch": "16", "--max-micro-batches": "4",
    "--max-micro-batch": "2", "--memory": "8GiB", "--devices": "4", "--sequence-length": "128", "--image-size": "224",
    "--space": "full", "--schedule": "1f1b", "--cuts": "exact", "--precision": "fp32", "--attention": "fused",
    "--optimizer": "sgd", "--profile": "titan-rtx-bert-huge", "--node-link": "200Gb", "--pipeline": "2", "--lora": "8",
    "--lora-alpha": "16", "--lora-targets": "all-linear", "--freeze": "embeddings", "--train-only": "head",
    "--pin": "encoder=dp4", "--forbid": "tp", "--tokens": "1e9", "--price": "2", "--top": "2", "--by": "speed",
    "--expert-imbalance": "1.2", "--output": "out.json", "--time-limit": "1",
}  # fmt: skip
_BUILDING = ("--freeze", "--train-only", "--lora")
_FLAGS = ("--json", "--paper", "--recompute", "--no-recompute", "--zero2", "--dropout", "--compile", "--fewest-devices")

_CUSTOM = {
    "name": "mine",
    "layers": [
        {
            "name": "block",
            "count": 6,
            "parameters": 2_000_000,
            "replicated_parameters": 4000,
            "forward_flops": 4.5e9,
            "activation_bytes": "64MiB",
            "boundary_bytes": "1MiB",
            "tensor_parallel": {"heads": 16, "sequence_length": 128},
        },
        {
            "name": "head",
            "parameters": 1_000_000,
            "forward_flops": 1e9,
            "split_activation_bytes": "6MiB",
            "boundary_bytes": 1024,
        },
    ],
}
_PROFILE = {
    "name": "measured",
    "layers": [{"layer": "encoder", "forward": "1ms", "backward_ratio": 2.0, "tp": 1}],
    "memory": [{"layer": "encoder", "activations": "1MiB", "transient": "1MiB"}],
}
_SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
_CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "bert", "vocab_size": 99, "max_position_embeddings": 64, **_SMALL},
    {"model_type": "llama", "vocab_size": 99, "max_position_embeddings": 64, "num_key_value_heads": 1, **_SMALL},
    {"model_type": "gpt2", "vocab_size": 99, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
    {"model_type": "t5", "vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    {"model_type": "vit", "image_size": 32, "patch_size": 16, **_SMALL},
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case."""

    seed: int
    kind: str
    """done, refused; or a defect: traceback, slow, status, wrong."""
    status: int | None
    said: str
    seconds: float
    """Of processor time."""
    args: tuple[str, ...]
    drawn: str
    """What was done to the file."""


class Workbench:
    """A folder with right files of every kind, from which wrong ones are made."""

    def __init__(self, folder: Path, *, with_torch: bool = True) -> None:
        """``with_torch``: options too that build the stock model, which takes a second."""
        self.folder = folder
        self.options = {name: own for name, own in _OPTIONS.items() if with_torch or name not in _BUILDING}
        if with_torch:
            import galvatron.families.tuning  # noqa: F401 (seconds, which no case is to blame for)
        load = Training()
        plan = folder / "plan.json"
        _run(("plan", "bert-tiny", "--cluster", "cpu-4", "--batch", "8", "--output", str(plan)))
        self.right: dict[str, tuple[str, Any]] = {
            "plan": ("json", json.loads(plan.read_text())),
            "cluster": ("toml", tomllib.loads(dump_cluster(load_cluster("a100:2x2")))),
            "profile": ("toml", _PROFILE),
            "custom": ("toml", _CUSTOM),
            "traced": ("json", json.loads(dump_model(load_model("bert-tiny", load)))),
            "manifest": ("json", _manifest(json.loads(plan.read_text()))),
        }
        for config in _CONFIGS:
            self.right[f"config of {config['model_type']}"] = ("json", config)

    def keep(self, kind: str) -> None:
        """Draw files of this kind only."""
        self.right = {kind: self.right[kind]}
        self.options = {}

    def case(self, seed: int) -> tuple[tuple[str, ...], str]:
        """The arguments of a case, and what is strange about it; its files are made."""
        rng = random.Random(seed)
        here = self.folder / "case"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        if self.options and rng.random() < 0.4:
            return _strange_options(rng, here, self.options)
        kind = rng.choice(list(self.right))
        language, content = self.right[kind]
        path, drawn = _strange_file(rng, here, kind, language, content)
        return _command(rng, kind, path), drawn


def _strange_options(rng: random.Random, here: Path, options: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    names = rng.sample(sorted(options), rng.randint(1, 3))
    wild = rng.choice(names)
    verb = rng.choice(("plan",) * 8 + ("compare", "models", "clusters", "strategies", "explain", "checkpoints"))
    args = [verb]
    if verb in ("plan", "compare"):
        args += [rng.choice(_MODELS), "--cluster", rng.choice(_CLUSTERS)]
        args += ["--batch", "8"] if verb == "plan" and not {"--batch", "--batch-tokens"} & {*names} else []
        args += ["--memory", "8GB,16GB" if rng.random() < 0.5 else _text(rng)] if verb == "compare" else []
    elif rng.random() < 0.8:
        args.append(_text(rng))
    for name in names:
        args += [name, _text(rng) if name == wild else _OPTIONS[name]]
    args += [flag for flag in _FLAGS if rng.random() < 0.08]
    if rng.random() < 0.1:
        args[rng.randrange(len(args))] = _text(rng)
    return tuple(str(here / each) if each == "out.json" else each for each in args), wild


def _text(rng: random.Random) -> str:
    drawn = rng.choice((*_NUMBERS, *_TEXTS))
    text = str(drawn) if not isinstance(drawn, int) or drawn < 10**100 else "9" * 400
    return "".join(each for each in text if each != "\0").replace("\ud800", "\udcff")  # what a shell can pass on


def _command(rng: random.Random, kind: str, path: str) -> tuple[str, ...]:
    small = ("--batch", "8", *(("--json",) if rng.random() < 0.2 else ()))
    if kind == "plan":
        return ("explain", path, *small[2:])
    if kind == "cluster":
        return rng.choice((("clusters", path), ("plan", "bert-tiny", "--cluster", path, *small)))
    if kind == "profile":
        return ("plan", "bert-tiny", "--cluster", "titan-rtx-8", "--profile", path, *small)
    if kind == "manifest":
        return ("checkpoints", str(Path(path).parent.parent), *(("--verify",) if rng.random() < 0.5 else ()))
    out = ("--output", str(Path(path).parent.parent / "out.json")) if rng.random() < 0.3 else ()
    return rng.choice((("models", path), ("plan", path, "--cluster", rng.choice(_CLUSTERS), *small, *out)))


# Files


def _strange_file(rng: random.Random, here: Path, kind: str, language: str, content: Any) -> tuple[str, str]:
    """Make one, and say its path and what is strange about it."""
    names = {"manifest": MANIFEST, "plan": "plan.json", "cluster": "c.toml", "profile": "p.toml", "custom": "m.toml"}
    folder = here / ("step-00000003" if kind == "manifest" else "files")
    folder.mkdir()
    if kind == "manifest":
        (folder / "rank-00000.bin").write_bytes(bytes(range(56)))
    path = folder / names.get(kind, "config.json")
    roll = rng.random()
    if roll < 0.08:
        return _strange_kind(rng, path)
    drawn = ""
    copy = json.loads(json.dumps(content))
    if roll < 0.85:
        drawn = "; ".join(_mutated(rng, copy) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    data = (_toml(copy) if language == "toml" else _json(copy, kind)).encode("utf-8", "replace")
    if roll >= 0.8:
        data, how = _garbled(rng, data)
        drawn = f"{drawn}; {how}"
    if rng.random() < 0.04:
        path = _strange_name(rng, path)
    try:
        path.write_bytes(data)
    except OSError:  # too long a name
        drawn += "; no such name"
    return str(path), drawn


def _strange_kind(rng: random.Random, path: Path) -> tuple[str, str]:
    kind = rng.choice(("pipe", "folder", "nothing", "itself", "device", "empty", "no right", "no folder"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "itself":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "empty":
        path.touch()
    elif kind == "no right":
        path.touch(mode=0o000)
    elif kind == "no folder":
        path = path / "more" / path.name
    return str(path), kind


def _strange_name(rng: random.Random, path: Path) -> Path:
    ending = path.suffix
    names = ("n" * 1000, "[bold]", "plan[v2]", " ", "\udcff\udcfe", "ß½\u202e", "-o", "a\nb", "auto", "x" * 200)
    return path.with_name(rng.choice(names) + ending)


def _mutated(rng: random.Random, content: Any) -> str:
    """Change one place, and say which."""
    places = [place for place in _places(content) if place[2] != ".model_type"]  # of others a process is asked
    holder, key, path = rng.choice(places)
    how = rng.choice(("value",) * 6 + ("delete", "more", "rename", "twice", "deep"))
    if how == "value":
        holder[key] = _wild(rng, holder[key])
    elif how == "delete":
        del holder[key]
    elif how == "more" and isinstance(holder, dict):
        holder[_key(rng)] = _wild(rng, None)
    elif how == "rename" and isinstance(holder, dict):
        holder[_key(rng)] = holder.pop(key)
    elif how == "twice" and isinstance(holder, list):
        holder.append(holder[key])
    else:
        how, holder[key] = "deep", _nested(rng.choice((3, 50)), holder[key])
    return f"{how} {path}"


def _key(rng: random.Random) -> str:
    return rng.choice(("x", "name", "layer", "a" * 300, "", "memory", "[/b]", "ключ", "parameters"))


def _places(content: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items):
        yield content, key, f"{path}.{key}"
        yield from _places(value, f"{path}.{key}")


def _wild(rng: random.Random, old: Any) -> Any:
    choice = rng.random()
    if choice < 0.5 or isinstance(old, int | float):
        near = (old * rng.choice((-1, 0, 2, 10**6, 10**12)),) if type(old) is int else ()
        return rng.choice((*_NUMBERS, *near))
    if choice < 0.8:
        return rng.choice(_TEXTS)
    return rng.choice(([], {}, [[]], True, False, None, [1, 2], {"a": 1}, ["x"] * 3))


def _nested(depth: int, inside: Any) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


def _garbled(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    how = rng.choice(("cut", "bytes", "deep", "deep object", "mark", "NUL", "UTF-16", "twice", "returns", "dots"))
    at = rng.randrange(len(data) + 1)
    changed = {
        "cut": lambda: data[:at],
        "bytes": lambda: data[:at] + rng.randbytes(3) + data[at:],
        "deep": lambda: b"x = " * data.startswith(b"name") + b"[" * _DEEP + b"]" * _DEEP,
        "deep object": lambda: b'{"a":' * _DEEP + b"1" + b"}" * _DEEP,
        "mark": lambda: b"\xef\xbb\xbf" + data,
        "NUL": lambda: data[:at] + b"\0" + data[at:],
        "UTF-16": lambda: data.decode("utf-8", "replace").encode("utf-16"),
        "twice": lambda: data + data,
        "returns": lambda: data.replace(b"\n", b"\r"),
        "dots": lambda: b".".join([b"a"] * _DEEP) + b" = 1\n" + data,
    }[how]()
    return changed, how


def _json(content: Any, kind: str) -> str:
    if kind == "manifest":
        try:
            return sealed(content)
        except ValueError:  # not a number
            pass
    return json.dumps(content)


def _toml(content: Any) -> str:
    if not isinstance(content, dict):
        return _literal(content)
    return "".join(f"{json.dumps(key)} = {_literal(value)}\n" for key, value in content.items() if value is not None)


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value)


def _manifest(plan: dict[str, Any]) -> dict[str, Any]:
    def block(at: int, first: int, rows: int, digest: str) -> dict[str, Any]:
        where = {"file": "rank-00000.bin", "at": at, "bytes": 12 * rows, "sha256": digest}
        return {"offsets": [first, 0], "sizes": [rows, 3], **where}

    return {
        "version": 1,
        "step": 3,
        "world": 1,
        "plan": {"model": plan["model"]},
        "seed": 0,
        "iteration": 3,
        "progress": {},
        "optimizer": {"kind": "AdamW", "groups": [{"lr": 1e-3}], "group_of": {"a.weight": 0}},
        "files": {"rank-00000.bin": 48},
        "tensors": {
            "model/a.weight": {
                "dtype": "float32",
                "shape": [4, 3],
                "chunks": [block(0, 0, 2, "0" * 64), block(24, 2, 2, "1" * 64)],
            }
        },
    }


# The run

_get_command = cache(typer.main.get_command)


def _run(args: Sequence[str]) -> tuple[int, str]:
    """As the program does it: the status, and what was said."""
    shown = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    with (
        redirect_stdout(shown[0]),
        redirect_stderr(shown[1]),
        patch.object(sys, "argv", ["galvatron", *args]),
        patch.object(typer.main, "get_command", _get_command),  # made once: it takes longer than most cases
    ):
        try:
            command()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    said = [each.buffer.getvalue().decode("utf-8", "replace") for each in shown if isinstance(each.buffer, io.BytesIO)]
    return status, said[1] or said[0]


class _TooLong(BaseException):
    """Not an Exception, which somebody might catch."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise _TooLong


def _judged(run: Callable[[], tuple[int, str]], args: Sequence[str]) -> tuple[str, int | None, str]:
    before = signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, _NEVER_S)
    try:
        status, said = run()
    except _TooLong:
        return "slow", None, f"not ended after {_NEVER_S:g} s"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "traceback", None, f"{type(error).__name__}: {str(error)[:300]} ({last.filename}:{last.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if status:
        fine = status in _STATUSES and said.strip() and "Traceback" not in said
        return ("refused" if fine else "status"), status, said.strip()[:600]
    if "Traceback" in said:
        return "wrong", status, said[:600]
    return ("done", status, "") if (wrong := _wrong_plan(args)) is None else ("wrong", status, wrong)


def _wrong_plan(args: Sequence[str]) -> str | None:
    """What is wrong with the plan that was written, if one was."""
    if args[0] != "plan" or "--output" not in args:
        return None
    plan = Plan.load(args[args.index("--output") + 1])
    proof = plan.certificate
    if not 0 < plan.iteration_s < 1e12 or proof is None or not 0 <= proof.gap < math.inf:
        return f"iteration {plan.iteration_s} s, {proof}"
    return None


def fuzz(seeds: Sequence[int], bench: Workbench) -> Iterator[Outcome]:
    """What becomes of each seed's case."""
    for seed in seeds:
        args, drawn = bench.case(seed)
        began = time.process_time()
        with warnings.catch_warnings(), chdir(bench.folder):  # what has a relative name is written there
            warnings.simplefilter("error")
            kind, status, said = _judged(lambda given=args: _run(given), args)  # type: ignore[misc]
        seconds = time.process_time() - began
        if seconds > _SLOW_S and kind in ("done", "refused"):
            kind = "slow"
        yield Outcome(seed, kind, status, said, seconds, args, drawn)


def main() -> int:
    """Run the cases of some seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others count on")
    parser.add_argument("--only", help="files of one kind: plan, cluster, profile, custom, traced, manifest")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.RLIM_INFINITY))
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Workbench(Path(folder), with_torch=not given.only)
        if given.only:
            bench.keep(given.only)
        for outcome in fuzz(range(given.seed, given.seed + given.cases), bench):
            counts[outcome.kind] += 1
            print(json.dumps(asdict(outcome)), flush=True)
    print(json.dumps({"counts": counts}), file=sys.stderr)
    return 0 if set(counts) <= {"done", "refused"} else 1


if __name__ == "__main__":
    sys.exit(main())
