"""The folder of a run: what was asked, the plan, checkpoints and metrics, each in its place."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.plan import Plan
from galvatron.train.settings import Settings

__all__ = ["RunFolder"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names and formats of a run's files."""

    path: Path

    @property
    def settings_file(self) -> Path:
        return self.path / "settings.json"

    @property
    def config_file(self) -> Path:
        """The options that the run was started with."""
        return self.path / "run.toml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report_file(self) -> Path:
        return self.path / "report.json"

    @property
    def report_page_file(self) -> Path:
        """The report as a page to look at."""
        return self.path / "report.html"

    def trace_file(self, rank: int) -> Path:
        """What PyTorch's profiler saw of one step."""
        return self.path / f"trace-rank{rank}.json"

    @property
    def both_traces_file(self) -> Path:
        """The passes of that step on all ranks, beside those that the plan predicts."""
        return self.path / "trace.json"

    @property
    def cache(self) -> Path:
        """Tokens and a tokenizer made for this run."""
        return self.path / "data"

    @property
    def companions(self) -> Path:
        """Tokenizer and generation settings of what the run started from."""
        return self.path / "model-files"

    @property
    def failure_file(self) -> Path:
        """What stopped the run, where something did."""
        return self.path / "failure.json"

    def begin(self, plan: Plan, settings: Settings) -> None:
        """Write down what is about to run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.settings_file.write_text(json.dumps(settings.to_dict(), indent=1) + "\n", encoding="utf-8")
            self.forget_endings()
        except OSError as error:
            raise InvalidInput(f"output: cannot write to {str(self.path)!r}: {error.strerror or error}") from error
        plan.save(self.plan_file)

    def forget_endings(self) -> None:
        """Those of earlier starts."""
        self.failure_file.unlink(missing_ok=True)
        self.start_file.unlink(missing_ok=True)
        self.outcome_file.unlink(missing_ok=True)

    def load(self) -> tuple[Plan, Settings]:
        return Plan.load(self.plan_file), Settings.load(self.settings_file)

    @property
    def base(self) -> Path | None:
        """The folder with the weights that the run started from; None: it had none, or its settings cannot be read."""
        try:
            found = Settings.load(self.settings_file).weights
        except InvalidInput:
            return None
        return None if found is None else Path(found)

    def check_new(self) -> None:
        """A run does not overwrite another one."""
        if self.plan_file.exists():
            raise InvalidInput(
                f"output: {str(self.path)!r} already holds a run; go on with it (--resume) or give another folder "
                "(--output)"
            )

    def check_started(self) -> None:
        if not self.plan_file.exists():
            raise InvalidInput(f"resume: there is no run in {str(self.path)!r}; start one without --resume")

    @property
    def outcome_file(self) -> Path:
        """How the last start of the run ended, where it ended in order."""
        return self.path / "outcome.json"

    @property
    def launch_file(self) -> Path:
        """What torchrun calls the start of the processes that run."""
        return self.path / "launch.txt"

    @property
    def launch(self) -> str | None:
        return self.launch_file.read_text(encoding="utf-8") if self.launch_file.is_file() else None

    @property
    def start_file(self) -> Path:
        """When the processes were started, and how long what came before took."""
        return self.path / "start.json"

    def write_start(self, phases: Mapping[str, float]) -> None:
        content = {"at": time.time(), "phases": dict(phases)}
        self.start_file.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def read_start(self) -> tuple[float, dict[str, float]] | None:
        """What :meth:`write_start` wrote; None where another launcher started the processes."""
        try:
            content = json.loads(self.start_file.read_text(encoding="utf-8"))
            return float(content["at"]), {name: float(seconds) for name, seconds in content["phases"].items()}
        except (OSError, ValueError, KeyError):
            return None

    def write_outcome(self, step: int, *, stopped: bool) -> None:
        content = {"step": step, "stopped": stopped}
        self.outcome_file.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def write_failure(self, facts: dict[str, Any]) -> None:
        """The first word counts: what follows are consequences."""
        if not self.failure_file.exists():
            self.failure_file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
