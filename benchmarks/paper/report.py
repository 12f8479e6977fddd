"""Writes the tables and plots of docs/evaluation.md, and their summary in the README, from the committed raw results.

    python benchmarks/paper/report.py [--results FILE.jsonl] [--page docs/evaluation.md] [--readme README.md]

In both, what stands between ``<!-- name -->`` and ``<!-- /name -->`` is replaced; all else is written by people.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import plans_drawn
import search_time
from cells import RESULTS, Run, read_runs
from drawing import Bars, bars
from galvatron.core.errors import GalvatronError, InvalidInput
from systems import SYSTEMS
from tables import estimation_table, main_tables, plans_table, search_table, summary, verdict_table
from verdicts import columns

__all__ = ["filled", "throughput_plots"]

_ROOT = Path(__file__).parent.parent.parent


def filled(page: str, sections: Mapping[str, str]) -> str:
    """The page with what is between each section's markers replaced."""
    for name, content in sections.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
        if not pattern.search(page):
            raise InvalidInput(
                f"page: no section {name!r}; expected a line <!-- {name} --> and, below it, <!-- /{name} -->"
            )
        page = pattern.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", page)  # type: ignore[misc]
    return page


def throughput_plots(runs: list[Run]) -> dict[str, str]:
    """An SVG a model, by the name of its file."""
    series = [system.name for system in SYSTEMS]
    plots = {}
    for model in dict.fromkeys(run.model for run in runs):
        groups = [
            Bars(name=column.budget, values=tuple(_height(column.of(system)) for system in series))
            for column in columns(runs)
            if column.model == model
        ]
        plots[f"throughput-{model}.svg"] = bars(f"{model}: samples a second", groups, series, "samples/s")
    return plots


def _height(run: Run | None) -> float | str:
    if run is None:
        return "–"
    return run.samples_per_s if run.status == "ok" else run.status.upper()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=_ROOT / "docs" / "evaluation.md")
    parser.add_argument("--readme", type=Path, default=_ROOT / "README.md")
    given = parser.parse_args()
    runs = read_runs(given.results)
    plots = throughput_plots(runs)
    folder = given.page.parent / "evaluation"
    folder.mkdir(exist_ok=True)
    for name, content in plots.items():
        (folder / name).write_text(content, encoding="utf-8")
    images = "\n\n".join(f"![{name.removesuffix('.svg')}](evaluation/{name})" for name in plots)
    sections = {
        "main-tables": f"{main_tables(runs)}\n\n{images}".rstrip(),
        "verdict": verdict_table(runs),
        "estimation": estimation_table(runs),
        "search-time": search_table(json.loads(search_time.RESULTS.read_text(encoding="utf-8"))),
        "plans": plans_table(json.loads(plans_drawn.RESULTS.read_text(encoding="utf-8"))),
    }
    _fill(given.page, sections)
    _fill(given.readme, {"evaluation": summary(runs)})


def _fill(path: Path, sections: Mapping[str, str]) -> None:
    path.write_text(filled(path.read_text(encoding="utf-8"), sections), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except GalvatronError as error:
        sys.exit(f"error: {error}")
