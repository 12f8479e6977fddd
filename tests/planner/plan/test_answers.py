"""Days, money and energy by hand; the fewest devices, the best plans and clusters against searches one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

import galvatron
from galvatron.core.errors import Infeasible, InvalidInput
from galvatron.core.files.clusters import dump_cluster, load_cluster
from galvatron.core.spec.limits import Limits
from galvatron.planner.plan.advice import make_plan
from galvatron.planner.plan.answers import Sort, answer, fewest_devices, offers, sort_of, top_plans
from galvatron.planner.plan.planner import Request, try_plan
from galvatron.planner.plan.setup import Setup, request_for


def _request(model: str = "bert-large", cluster: str = "titan-rtx-8", **said: object) -> Request:
    return request_for(model, cluster, Setup(**said))  # type: ignore[typeddict-item]


def test_money_and_energy_by_hand() -> None:
    request = _request(batch=32, memory="8GiB")
    device = replace(request.cluster.device, price_per_hour=2.0, power_w=300.0)
    plan = make_plan(replace(request, cluster=replace(request.cluster, device=device)))
    said = answer(plan, tokens=1e9)
    per_s = plan.batch / plan.iteration_s * 512  # BERT's sequences
    assert said.tokens_per_s == pytest.approx(per_s)
    hours = 1e9 / per_s / 3600
    assert said.days == pytest.approx(hours / 24)
    assert said.device_hours == pytest.approx(8 * hours)
    assert said.cost == pytest.approx(8 * hours * 2.0)
    assert said.energy_kwh == pytest.approx(8 * hours * 0.3)
    assert said.samples_per_price == pytest.approx(plan.throughput * 3600 / (8 * 2.0))
    assert answer(plan, 1e9, price_per_hour=1.0).cost == pytest.approx(8 * hours)


def test_a_price_changes_neither_plan_nor_digest_and_is_kept_in_files(tmp_path: object) -> None:
    cluster = load_cluster("titan-rtx-8")
    priced = replace(cluster, device=replace(cluster.device, price_per_hour=2.5, power_w=280.0))
    assert priced.digest == cluster.digest
    path = f"{tmp_path}/priced.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(dump_cluster(priced))
    assert load_cluster(path) == priced


def test_what_cannot_be_known_is_refused() -> None:
    image = galvatron.plan("vit-tiny", "titan-rtx-8", batch=8)
    assert answer(image).tokens_per_s is None
    with pytest.raises(InvalidInput, match="have no number of tokens"):
        answer(image, tokens=1e9)
    with pytest.raises(InvalidInput, match="above 0"):
        answer(image, tokens=-1)
    with pytest.raises(InvalidInput, match="an hour of one device"):
        answer(image, price_per_hour=-1)


def test_no_fewer_devices_fit() -> None:
    request = _request("bert-huge-32", batch=16, memory="5GiB")
    count = fewest_devices(request)
    assert count is not None
    assert 1 < count <= 8
    for fewer in range(1, count + 1):
        cluster = request.cluster.shrunk(fewer)
        assert (try_plan(replace(request, cluster=cluster)) is not None) == (fewer == count)
    assert fewest_devices(_request("bert-xhuge", batch=8, memory="2GiB")) is None


def test_top_plans_are_the_best_of_their_sort() -> None:
    """Against the best plan of each number of stages and each set of kinds, all searched."""
    request = _request("bert-tiny", batch=32, recompute=False, sequence_parallel=False)
    best: dict[Sort, float] = {}
    for degree in (1, 2, 4, 8):
        for size in range(4):
            for forbid in combinations(("dp", "sdp", "tp"), size):
                try:
                    plan = try_plan(replace(request, limits=Limits(pipeline_degree=degree, forbid=forbid)))
                except InvalidInput:
                    continue
                if plan is not None:
                    best[sort_of(plan)] = max(plan.throughput, best.get(sort_of(plan), 0.0))
    found = top_plans(request, 6)
    assert len({sort_of(plan) for plan in found}) == len(found) == min(6, len(best))
    assert [plan.throughput for plan in found] == sorted(best.values(), reverse=True)[: len(found)]
    assert found[0].throughput == make_plan(request).throughput


def test_clusters_that_do_not_fit_stand_beside_those_that_do() -> None:
    small = _request("bert-huge-32", "cpu-4", batch=8, memory="1GiB")
    large = _request("bert-huge-32", batch=8)
    first, second = offers([small, large])
    assert first.plan is None
    assert "does not fit" in first.why_not
    assert second.plan == make_plan(large)
    with pytest.raises(Infeasible):
        offers([small])
