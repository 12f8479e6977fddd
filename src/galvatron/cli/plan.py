"""``galvatron plan``: the provably best plan for a model on a cluster; on the best of several, or the best few."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from galvatron.cli import options as opt
from galvatron.cli.progress import shown_progress, shown_search
from galvatron.core.errors import InvalidInput
from galvatron.planner.plan.options import Setup

if TYPE_CHECKING:
    from rich.console import RenderableType

    from galvatron.planner.plan.plan import Plan
    from galvatron.planner.plan.planner import Request
    from galvatron.planner.search import Tell

__all__ = ["EXAMPLES", "command"]

_SPEED, _PRICE = "speed", "price"


EXAMPLES = (
    "Examples:",
    "galvatron plan llama3-8b --cluster h100-8 --output plan.json",
    "galvatron plan ./my-llama --cluster rtx4090 --devices 4 --batch-tokens 1M",
    "galvatron plan bert-large --cluster auto",
)


@opt.arranged(opt.SETUP_PANELS)
@opt.takes_setup()
def command(
    model: opt.ModelSource,
    cluster: opt.ClusterHere,
    setup: Setup,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever was measured before.")] = False,
    tokens: Annotated[float | None, typer.Option(help="Say days, cost and energy of so many tokens: 1e12.")] = None,
    price: Annotated[
        float | None, typer.Option(help="What an hour of a device costs (default: the cluster's).")
    ] = None,
    by: Annotated[
        str, typer.Option(help="Which of several clusters is chosen: speed, the fastest; price, most samples for it.")
    ] = _SPEED,
    top: Annotated[int | None, typer.Option(help="Show the best so many plans that differ in kind.")] = None,
    fewest_devices: Annotated[
        bool, typer.Option("--fewest-devices", help="Say on how few of the cluster's devices the model fits.")
    ] = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Find the fastest plan for MODEL and prove that none in the space is better."""
    from galvatron.planner.plan.answer_tables import answer_entry, answer_view
    from galvatron.planner.plan.answers import answer

    opt.checked_file(output, ".json", "plan")
    if by not in (_SPEED, _PRICE):
        raise InvalidInput(f"by: {by!r} is unknown; choose one of {_SPEED}, {_PRICE}")
    requests = [_request(model, name, setup, fresh=fresh) for name in _names(cluster)]
    started = time.perf_counter()
    with shown_search() as tell:
        plan, views, entries = _searched(requests, (tokens, price), by, top, tell)
    search_s = time.perf_counter() - started
    if fewest_devices:
        _add_fewest(requests, views, entries)
    said = answer(plan, tokens, price)
    if output:
        plan.save(output)
    asked = tokens is not None or price is not None
    if as_json:
        answers = {"answer": answer_entry(said)} if asked else {}
        opt.print_json({**plan.to_dict(), "search_s": search_s, **answers, **entries})
        return
    from galvatron.planner.plan.render import plan_view

    opt.show(plan_view(plan), *([answer_view(said)] if asked else []), *views)
    opt.show(f"search took {search_s * 1e3:.0f} ms")
    if output:
        opt.show(f"written to {output}; 'galvatron explain {output}' says why")


def _names(cluster: str) -> list[str]:
    """Clusters by commas."""
    names = [name.strip() for name in cluster.split(",") if name.strip()]
    if not names:
        raise InvalidInput(f"cluster: {cluster!r} given; expected a cluster's name or file, or several by commas")
    return names


def _request(model: str, cluster: str, setup: Setup, *, fresh: bool) -> Request:
    if cluster == "auto":
        opt.need_torch("plan --cluster auto")
        from galvatron.measure.auto import request_here

        own = cast(Setup, {name: value for name, value in setup.items() if name != "devices"})
        return request_here(model, own, devices=setup.get("devices"), measuring=shown_progress, fresh=fresh)
    if fresh:
        raise InvalidInput(f"--fresh: nothing is measured for --cluster {cluster}; leave one of the two out")
    from galvatron.measure.models import load_any_model
    from galvatron.planner.plan.setup import request_for

    return request_for(model, cluster, setup, load_any_model)


def _searched(
    requests: list[Request], asked: tuple[float | None, float | None], by: str, top: int | None, tell: Tell | None
) -> tuple[Plan, list[RenderableType], dict[str, Any]]:
    """The plan that is chosen, and what to show and to print besides."""
    from galvatron.planner.plan.advice import make_plan

    if top is not None and len(requests) > 1:
        raise InvalidInput(f"--top: {len(requests)} clusters given; expected one, or leave --top out")
    if len(requests) > 1:
        return _best_offer(requests, asked, by, tell)
    if by == _PRICE:
        raise InvalidInput("--by price: one cluster given; expected several by commas to choose from")
    (request,) = requests
    if top is None:
        return make_plan(request, tell), [], {}
    from galvatron.planner.plan.answer_tables import answer_entry, top_view
    from galvatron.planner.plan.answers import answer, top_plans

    best = make_plan(request, tell)  # proven for all of the space, and where there is none it says why
    plans = top_plans(request, top)
    said = [answer(plan, *asked) for plan in plans]
    entries = [{"plan": plan.to_dict(), "answer": answer_entry(one)} for plan, one in zip(plans, said, strict=True)]
    return best, [top_view(plans, said)], {"top": entries}


def _best_offer(
    requests: list[Request], asked: tuple[float | None, float | None], by: str, tell: Tell | None
) -> tuple[Plan, list[RenderableType], dict[str, Any]]:
    from galvatron.planner.plan.answer_tables import answer_entry, offers_view
    from galvatron.planner.plan.answers import answer, offers

    offered = offers(requests, tell)
    said = [None if offer.plan is None else answer(offer.plan, *asked) for offer in offered]
    unpriced = [
        offer.cluster for offer, one in zip(offered, said, strict=True) if one and one.samples_per_price is None
    ]
    if by == _PRICE and unpriced:
        raise InvalidInput(
            f"--by price: no price is known of {', '.join(unpriced)}; give price_per_hour in its [device], or --price"
        )
    worth = [
        -1.0 if one is None or offer.plan is None
        else (one.samples_per_price or 0.0) if by == _PRICE
        else offer.plan.throughput
        for offer, one in zip(offered, said, strict=True)
    ]  # fmt: skip
    chosen = worth.index(max(worth))
    plan = offered[chosen].plan
    assert plan is not None
    entries = [
        {
            "cluster": offer.cluster,
            "throughput": offer.plan.throughput if offer.plan else None,
            "answer": answer_entry(one) if one else None,
            "why_not": offer.why_not or None,
        }
        for offer, one in zip(offered, said, strict=True)
    ]
    return plan, [offers_view(offered, said, chosen)], {"clusters": entries, "chosen": offered[chosen].cluster}


def _add_fewest(requests: list[Request], views: list[RenderableType], entries: dict[str, Any]) -> None:
    from galvatron.planner.plan.answers import fewest_devices

    found = {request.cluster.name: fewest_devices(request) for request in requests}
    entries["fewest_devices"] = found
    for name, count in found.items():
        views.append(f"fits on {count} of {name}'s devices, and on no fewer" if count else f"does not fit on {name}")
