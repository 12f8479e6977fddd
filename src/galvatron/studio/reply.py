"""What a page gets back: a plan in figures, pictures and downloads, or why there is none and what would help."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from galvatron.core.errors import Infeasible
from galvatron.core.files.clusters import dump_cluster
from galvatron.core.units import format_bytes
from galvatron.planner.exchange.export import TARGETS, Export, export_plan
from galvatron.planner.exchange.target import Target
from galvatron.planner.exchange.views import export_file, export_lines
from galvatron.planner.pages.plan_page import plan_cards, plan_facts, plan_page, plan_sections, plan_subtitle
from galvatron.planner.plan.advice import make_plan, remedies
from galvatron.planner.plan.answer_tables import answer_entry
from galvatron.planner.plan.answers import answer, sort_of
from galvatron.planner.plan.explain import reasons
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.timeline import timeline
from galvatron.planner.plan.trace import predicted_events, trace_text
from galvatron.studio.question import Question
from galvatron.studio.what_ifs import what_ifs

__all__ = ["DOWNLOADS", "Download", "advice", "download", "planned", "price", "reply"]


@dataclass(frozen=True, slots=True)
class Download:
    """A file that is made of a plan."""

    file: str
    about: str
    make: Callable[[Plan], str | Export]


def _export(target: Target) -> Download:
    about = f"flags or configuration of {target.title}; what it cannot run is replaced by the best plan that it can"
    return Download(f"{target.name}{target.suffix}", about, lambda plan: export_plan(plan, target))


DOWNLOADS = (
    Download("plan.json", "what galvatron train runs", Plan.to_json),
    Download("plan.html", "a page to keep, takes some seconds", lambda plan: plan_page(plan, 2.0).html()),
    Download("plan.trace.json", "for Perfetto", lambda plan: trace_text(predicted_events(plan, timeline(plan)))),
    Download("cluster.toml", "the cluster, to edit", lambda plan: dump_cluster(plan.cluster.facts)),
    *map(_export, TARGETS),
)
"""What can be taken along; another format is another entry."""


def download(question: Question, wanted: Download) -> dict[str, Any]:
    """The text of a file, and what is to be said beside it."""
    made = wanted.make(planned(question))
    if isinstance(made, str):
        return {"text": made, "said": []}
    return {"text": export_file(made), "said": list(export_lines(made))}


def planned(question: Question) -> Plan:
    """The best plan. Raises :class:`Infeasible`, for which there is :func:`advice`, or :class:`InvalidInput`."""
    return make_plan(question.request, advised=False)


def advice(question: Question) -> dict[str, Any]:
    """What would fit, for a question that has no plan: trying it out takes longer than finding that nothing fits."""
    return {"advice": list(remedies(question.request))}


def price(question: Question) -> dict[str, Any]:
    """A plan's figures in a line, or why there is none."""
    try:
        plan = planned(question)
    except Infeasible as error:
        return _refused(error)
    return {"fits": True, "figures": _figures(plan, question)}


def reply(question: Question) -> dict[str, Any]:
    """The plan with all its pictures, or why there is none, and what else could be asked."""
    begun = time.thread_time()
    try:
        plan = planned(question)
    except Infeasible as error:
        return {**_refused(error), **_about(question), "seconds": time.thread_time() - begun}
    why = reasons(plan, question.request)
    sections = [asdict(section) for section in plan_sections(plan, why)]
    return {
        "fits": True,
        "title": f"{plan.model.name} on {plan.cluster.facts.name}",
        "subtitle": plan_subtitle(plan),
        "cards": [asdict(card) for card in plan_cards(plan)],
        "sections": sections,
        "facts": plan_facts(plan, why),
        "figures": _figures(plan, question),
        **_about(question),
        "what_ifs": [{"label": each.label, "question": each.question.to_dict()} for each in what_ifs(question, plan)],
        "seconds": time.thread_time() - begun,
    }


def _refused(error: Infeasible) -> dict[str, Any]:
    return {"fits": False, "problem": str(error.args[0])}


def _about(question: Question) -> dict[str, Any]:
    """What the page's controls need to know of model and cluster."""
    request = question.request
    device = request.cluster.device
    return {
        "devices": request.cluster.devices,
        "device": device.name,
        "cluster_toml": dump_cluster(request.cluster),
        "device_memory_bytes": device.memory_bytes,
        "budget_bytes": request.budget_bytes,
        "price_per_hour": device.price_per_hour,
        "sequence_length": request.model.training.sequence_length,
    }


def _figures(plan: Plan, question: Question) -> dict[str, Any]:
    """A plan as a row of a table."""
    degree, kinds = sort_of(plan)
    return {
        "model": plan.model.name,
        "cluster": plan.cluster.facts.name,
        "devices": plan.cluster.devices,
        "throughput": plan.throughput,
        "iteration_s": plan.iteration_s,
        "batch": plan.batch,
        "micro_batches": plan.micro_batches,
        "stages": degree,
        "parallelism": " + ".join(kind.upper() for kind in (*(["pp"] if degree > 1 else []), *kinds)) or "none",
        "memory": format_bytes(plan.memory_bytes),
        "budget": format_bytes(plan.memory_budget_bytes),
        "answer": answer_entry(answer(plan, question.tokens, question.price)),
    }
