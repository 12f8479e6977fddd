"""What is read off the main table's runs: leads, errors, tables, plots. Runs are made up, so the answers are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

import search_time
from cells import Run
from drawing import draw_plan
from estimation import estimations
from galvatron.core.errors import InvalidInput
from galvatron.core.units import GIB
from galvatron.families import load_cluster
from report import filled, throughput_plots
from systems import Setting, choose, system_named, without_slowdown
from tables import estimation_table, main_tables, summary, verdict_table
from verdicts import broken_promises, columns
from workloads import full, tiny, tiny_cluster


def _run(system: str, seconds: tuple[float, ...] = (), **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "model": "bert-huge-32", "budget": "8GB", "system": system, "program": "galvatron", "batch": 16,
        "micro_batches": 1, "schedule": "gpipe", "said_to_fit": True, "predicted_s": 2.0,
        "predicted_without_slowdown_s": 1.0, "predicted_bytes": 110, "reserved_bytes": 0,
        "status": "ok" if seconds else "oom", "iterations_s": seconds, "peak_bytes": (90, 100),
        "plan": (changes.get("same_as", system),),
    }  # fmt: skip
    return Run(**{**fields, **changes})


def test_lead_over_the_best_baseline() -> None:
    ours, slow, fast = _run("galvatron", (2.0, 2.0, 2.2)), _run("dp", (4.0,)), _run("sdp", (2.5,))
    extended = _run("galvatron-extended", (1.0,))
    (column,) = columns([ours, slow, fast, extended])
    assert column.best_baseline == fast
    assert column.lead == pytest.approx(1.25)
    assert column.leads is True


def test_behind_within_and_beyond_the_spread() -> None:
    wavering = _run("galvatron", (2.0, 2.1, 2.2))  # 0.2 wide: 4.8% to either side
    (near,) = columns([wavering, _run("dp", (2.02,))])
    (far,) = columns([wavering, _run("dp", (1.9,))])
    assert near.lead is not None
    assert near.lead < 1
    assert (near.leads, far.leads) == (True, False)


def test_the_last_run_of_a_system_counts() -> None:
    (column,) = columns([_run("dp", batch=24), _run("dp", (2.0,), batch=16), _run("galvatron")])
    assert [(run.system, run.status) for run in column.runs] == [("dp", "ok"), ("galvatron", "oom")]
    assert (column.lead, column.leads) == (None, False)  # a plan that does not run leads nobody


def test_predicted_best_beside_measured_best() -> None:
    chosen, other = _run("galvatron", (2.2,), predicted_s=2.0), _run("dp", (2.0,), predicted_s=2.1)
    (column,) = columns([chosen, other])
    assert column.predicted_best == pytest.approx(2.0 / 2.2)


def test_broken_promises_are_ours_and_said_to_fit() -> None:
    runs = [_run("dp", program="stock"), _run("galvatron"), _run("tp", said_to_fit=False), _run("sdp", (1.0,))]
    assert [run.system for run in broken_promises(runs).standing] == ["galvatron"]


def test_a_broken_promise_is_mended_where_other_figures_gave_a_plan_that_ran() -> None:
    broken, smaller = _run("pp", facts={"cluster": "a"}), _run("pp", (2.0,), batch=8, facts={"cluster": "a"})
    anew, failed = _run("pp", (2.0,), batch=8, facts={"cluster": "b"}), _run("pp", facts={"cluster": "b"})
    for runs, standing, mended in (
        ([broken, smaller], [broken], []),  # the same figures would give the same plan again
        ([broken, anew], [], [broken]),
        ([broken, failed], [broken, failed], []),
        ([anew, broken], [broken], []),  # it went well before, not since
    ):
        found = broken_promises(runs)
        assert (found.standing, found.mended) == (standing, mended)
    told = verdict_table([broken, anew])
    assert "ran out of memory: none. With earlier figures" in told


def test_a_column_from_two_boots_says_so() -> None:
    runs = [_run("dp", (2.0,), facts={"boot": "a"}), _run("galvatron", (2.0,), facts={"boot": "b"})]
    assert "| 8GB (2 boots, rows open: 6) |" in verdict_table(runs)
    assert "boots" not in verdict_table(runs[:1])


def test_a_column_whose_baselines_have_all_run_has_no_row_open() -> None:
    runs = [_run(system, (2.0,)) for system in ("dp", "sdp", "tp", "pp", "dp+tp", "dp+pp", "3d", "galvatron")]
    assert "| 8GB |" in verdict_table(runs)
    assert "begun" not in summary(runs)
    other = [_run(system, (1.0,), budget="12GB") for system in ("dp", "galvatron")]
    told = summary([*runs, *other])
    assert "in 1 of 1 columns (model and budget; 1.00 to 1.00 times its throughput; begun: bert-huge-32 at" in told


def test_systems_that_run_one_plan_have_what_was_last_measured_of_it() -> None:
    facts, anew = {"cluster": "a"}, {"cluster": "b"}
    shared = _run("dp+pp", (2.0,), same_as="galvatron", facts=facts)
    (column,) = columns([_run("galvatron", (2.0,), facts=facts), shared, _run("galvatron", (1.9,), facts=anew)])
    other = column.of("dp+pp")
    assert other is not None
    assert other.iterations_s == (1.9,)


def test_the_last_run_that_went_well_counts() -> None:
    runs = [
        _run("dp", batch=24),
        _run("dp", (2.0,)),
        _run("dp", (3.0,)),
        _run("dp"),
        _run("tp", batch=16),
        _run("tp", batch=8),
    ]
    (column,) = columns(runs)
    assert column.runs == (runs[2], runs[5])


def test_systems_with_one_plan_have_what_was_last_measured_of_it() -> None:
    ours = _run("galvatron", (2.0,))
    twin = _run("dp+pp", (2.0,), same_as="galvatron")
    (column,) = columns([ours, twin, replace(ours, iterations_s=(2.0, 3.0))])
    assert [run.iterations_s for run in column.runs] == [(2.0, 3.0)] * 2
    (column,) = columns([ours, twin, replace(ours, iterations_s=(3.0,), micro_batches=4)])  # another plan by now
    assert [run.iterations_s for run in column.runs] == [(3.0,), (2.0,)]


def test_one_plan_of_ours_in_one_boot_is_one_measurement() -> None:
    """Systems that ran it apart have the iterations of both; a stock program, or another boot, has its own."""
    facts = {"boot": "a"}
    runs = [
        _run(system, seconds, facts=facts, plan=("embedding dp8",))
        for system, seconds in (("pp", (2.0, 2.1)), ("galvatron", (2.2, 2.3)))
    ]
    (column,) = columns(runs)
    assert [run.iterations_s for run in column.runs] == [(2.0, 2.1, 2.2, 2.3)] * 2
    assert column.lead == 1
    for apart in ({"program": "stock"}, {"facts": {"boot": "b"}}, {"plan": ("other",)}):
        (column,) = columns([replace(runs[0], **apart), runs[1]])
        assert [run.iterations_s for run in column.runs] == [(2.0, 2.1), (2.2, 2.3)]


def test_errors_of_estimation() -> None:
    runs = [
        _run("galvatron", (2.5,)),  # 2.0 and 1.0 predicted: 20% and 60% too little; 110 bytes for 100
        _run("tp", (1.6,), predicted_without_slowdown_s=1.6),  # 25% too much, and exact
        _run("dp", (4.0,), program="stock"),
        _run("pp"),  # out of memory: nothing to compare
        _run("dp+tp", (1.6,), same_as="tp"),  # counted already
    ]
    runs = [replace(run, iterations_s=(9.0,)) for run in runs] + runs  # cells that were run again
    ours, stock = estimations(runs)
    assert (ours.program, ours.runs, stock.runs) == ("galvatron", 2, 1)
    assert ours.time == pytest.approx((0.20 + 0.25) / 2)
    assert ours.bias == pytest.approx((-0.20 + 0.25) / 2)
    assert ours.time_without_slowdown == pytest.approx(0.30)
    assert ours.memory == pytest.approx(0.10)


def test_tables() -> None:
    runs = [
        _run("dp", program="stock", batch=8),
        _run("sdp", (4.0,), program="stock"),
        _run("tp", program="stock", batch=16),
        _run("galvatron", (2.0,)),
        _run("galvatron", (1.0,), budget="12GB"),
    ]
    lines = main_tables(runs).splitlines()
    assert lines[0] == "| bert-huge-32 | program | 8GB | 12GB |"
    assert "| DP | DDP | OOM | – |" in lines
    assert "| SDP | FSDP2 | 4.00 (16) | – |" in lines
    assert "| TP | DTensor | OOM at 16 | – |" in lines
    assert "| **ours** | ours | **8.00 (16)** | **16.00 (16)** |" in lines
    assert "| bert-huge-32 | 8GB (rows open: 4) | SDP 4.00 | 2.00 | yes | 1.00 |" in verdict_table(runs)
    assert "ran out of memory: none." in verdict_table(runs)
    assert "ran out of memory: bert-huge-32 8GB 3d at batch 16." in verdict_table([*runs, _run("3d")])
    complete = [*runs[1:], *(_run(system, (6.0,)) for system in ("dp", "tp", "pp", "dp+tp", "dp+pp", "3d"))]
    told = summary(complete)
    assert "in 1 of 1 columns (model and budget; 2.00 to 2.00 times its throughput)" in told
    assert "no plan of ours said to fit ran out of memory" in told
    assert estimation_table(runs).splitlines()[2].startswith("| bert-huge-32 | ours | 2 |")


def test_page_is_filled_between_its_markers() -> None:
    page = "before\n<!-- a -->\nold\nmore\n<!-- /a -->\nafter\n<!-- b -->\n<!-- /b -->\n"
    once = filled(page, {"a": r"new \1", "b": "x"})
    assert once == "before\n<!-- a -->\nnew \\1\n<!-- /a -->\nafter\n<!-- b -->\nx\n<!-- /b -->\n"
    assert filled(once, {"a": r"new \1", "b": "x"}) == once
    with pytest.raises(InvalidInput, match="no section 'c'"):
        filled(page, {"c": ""})


def test_plots_have_a_bar_for_each_run() -> None:
    runs = [_run("dp"), _run("galvatron", (2.0,)), _run("galvatron", (1.0,), budget="12GB")]
    plot = ElementTree.fromstring(throughput_plots(runs)["throughput-bert-huge-32.svg"])
    shapes = [one for one in plot.findall(".//{*}rect") if one.find("{*}title") is not None]
    first, second = (float(shape.get("height", "nan")) for shape in shapes)
    assert second == pytest.approx(2 * first, abs=0.2)
    assert [text.text for text in plot.findall(".//{*}text")].count("OOM") == 1


def test_drawing_shows_each_run_of_layers_once() -> None:
    workload = full("bert-huge-32", None)
    setting = Setting(workload=workload, cluster=load_cluster("titan-rtx-8"), budget_bytes=16 * GIB, max_batch=16)
    plan = choose(setting, system_named("dp+pp")).plan
    drawing = ElementTree.fromstring(draw_plan(plan, "a < b"))
    counts = [int(text.text[1:]) for text in drawing.findall(".//{*}text") if text.text and text.text.startswith("×")]
    assert sum(counts) == 34  # 32 encoders, embedding and head
    boxes = [one for one in drawing.findall(".//{*}rect") if one.find("{*}title") is not None]
    right = [(float(box.get("x", "nan")), float(box.get("width", "nan"))) for box in boxes]
    assert all(x + width <= following for (x, width), (following, _) in pairwise(right))


def test_search_time_measures_the_papers_points() -> None:
    assert len(search_time.points()) == 20
    row = search_time.measure("dp+pp", 16, 24, 10.8, quantum_mib=256)
    assert row.ours_samples_per_s is not None
    assert row.table_samples_per_s is not None
    assert row.table_samples_per_s <= row.ours_samples_per_s  # exact search: the table can find nothing better


def test_extended_plan_has_no_larger_batch_than_the_others() -> None:
    setting = Setting(workload=tiny("bert-huge-32"), cluster=tiny_cluster(4), budget_bytes=8_000_000, max_batch=64)
    extended = choose(setting, system_named("galvatron-extended")).plan
    others = [choose(setting, system_named(name)) for name in ("dp", "sdp", "tp", "pp", "dp+tp", "dp+pp", "galvatron")]
    assert extended.batch <= max(one.plan.batch for one in others if one.fits)


def test_what_does_not_fit_is_priced_for_the_budget_there_is() -> None:
    setting = Setting(workload=tiny("vit-huge-32"), cluster=tiny_cluster(4), budget_bytes=2_000_000, max_batch=64)
    choice = choose(setting, system_named("dp"))
    assert (choice.fits, choice.plan.batch, choice.plan.memory_budget_bytes) == (False, 8, 2_000_000)
    assert choice.plan.memory_bytes > 2_000_000
    assert choice.plan.cluster.facts == setting.cluster
    assert without_slowdown(setting, system_named("dp"), choice.plan) < choice.plan.iteration_s


def test_a_system_that_cannot_run_at_all_is_refused() -> None:
    swin = tiny("swin-huge-32")  # four heads in its first stage
    eight = load_cluster("titan-rtx-8")
    setting = Setting(workload=swin, cluster=eight, budget_bytes=2 * GIB, max_batch=8)
    with pytest.raises(InvalidInput, match="no plan for swin-huge-32 on 8 devices"):
        choose(setting, system_named("tp"))
