"""The size of the space: a tree that loses or repeats a path changes these numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from math import comb, factorial, perm, prod

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Axis, Kind, LayerSpec, Strategy, Training, prime_factors
from galvatron.families import load_model
from galvatron.planner.cost.allowed import allowed
from galvatron.planner.space import (
    CONTEXT_1,
    EXPERT_RULES,
    EXTENDED,
    PAPER,
    SPACES,
    Space,
    Switches,
    divisors,
    pipeline_degrees,
    space_named,
    tree,
)

_HYBRID = Switches(hybrid_sharding=True)


def _sizes(devices: int, switches: Switches) -> list[int]:
    """Number of strategies by pipeline degree."""
    space = Space(name="full", title="", switches=switches)
    return [len(space.strategies(devices // degree)) for degree in space.pipeline_degrees(devices)]


@pytest.mark.parametrize(
    ("devices", "all_of_them", "pruned"), [(8, 34, 22), (16, 73, 37), (32, 136, 56), (64, 229, 79)]
)
def test_the_papers_counts(devices: int, all_of_them: int, pruned: int) -> None:
    """Section 3.2: 34 candidates on 8 GPUs, 22 after Takeaway #3; the others follow from the same rules."""
    assert sum(_sizes(devices, _HYBRID)) == all_of_them
    assert sum(_sizes(devices, PAPER)) == pruned


def test_counts_by_pipeline_degree() -> None:
    assert _sizes(8, _HYBRID) == [21, 9, 3, 1]
    assert _sizes(8, PAPER) == [11, 7, 3, 1]
    assert _sizes(16, PAPER) == [15, 11, 7, 3, 1]
    assert _sizes(32, PAPER) == [19, 15, 11, 7, 3, 1]
    assert _sizes(64, PAPER) == [23, 19, 15, 11, 7, 3, 1]


def _ordered_factorisations(number: int, parts: int) -> int:
    """Ordered products of ``parts`` factors of at least two, by inclusion and exclusion of factors that are one."""
    exponents = [prime_factors(number).count(prime) for prime in set(prime_factors(number))]

    def with_ones(factors: int) -> int:
        if factors == 0:
            return int(number == 1)
        return prod(comb(exponent + factors - 1, factors - 1) for exponent in exponents)

    return sum((-1) ** ones * comb(parts, ones) * with_ones(parts - ones) for ones in range(parts + 1))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 12, 24, 36, 60, 128, 1024])
def test_counts_by_formula(devices: int) -> None:
    """Σ over depths of (orders of kinds) × (ordered factorisations); without DP beside SDP 3, 4 and 0 orders remain."""
    expected, pruned = [], []
    for degree in (d for d in range(1, devices + 1) if devices % d == 0):
        stage = devices // degree
        factorisations = [_ordered_factorisations(stage, depth) for depth in (1, 2, 3)]
        alone = int(stage == 1)
        expected.append(alone + sum(perm(3, depth) * factorisations[depth - 1] for depth in (1, 2, 3)))
        pruned.append(alone + 3 * factorisations[0] + 4 * factorisations[1])
    assert _sizes(devices, _HYBRID) == expected
    assert _sizes(devices, PAPER) == pruned


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 12])
def test_paths_are_distinct_valid_and_of_the_right_size(devices: int) -> None:
    paths = tree(devices)
    assert len(set(paths)) == len(paths)
    for path in paths:
        path.check()
        assert path.devices == devices


def test_the_flags_of_a_strategy() -> None:
    """Each extension appears exactly where it means something: +sp with TP, +zero2 with DP and without SDP, +fl
    without a grade of recompute, of which there is one at most."""
    for strategy in tree(8):
        grades = ("", "recompute", "selective_recompute", "recompute_but_attention", "offload")
        either = (False, True)
        flagged = {
            Strategy(
                strategy.axes,
                sequence_parallel=sequence,
                zero2=zero2,
                fused_loss=fused,
                recompute=grade == "recompute",
                selective_recompute=grade == "selective_recompute",
                recompute_but_attention=grade == "recompute_but_attention",
                offload=grade == "offload",
            )
            for grade, sequence, zero2, fused in product(grades, either, either, either)
            if not (sequence and strategy.degree(Kind.TP) == 1)
            and not (fused and grade)
            and not (zero2 and (strategy.degree(Kind.DP) == 1 or strategy.degree(Kind.SDP) > 1))
        }
        space = Space(name="full", title="", switches=EXTENDED)
        candidates = [candidate for candidate in space.strategies(8) if candidate.axes == strategy.axes]
        assert set(candidates) == flagged
        assert len(candidates) == len(flagged)


def test_paper_space_has_no_flags() -> None:
    space = Space(name="full", title="")
    for strategy in space.strategies(8):
        assert strategy == Strategy(strategy.axes)


def test_divisors_and_pipeline_degrees() -> None:
    for number in range(1, 200):
        assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]
    assert pipeline_degrees(12) == (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize(
    ("name", "degrees", "strategies"),
    [
        ("dp", (1,), ["dp8"]),
        ("tp", (1,), ["tp8"]),
        ("sdp", (1,), ["sdp8"]),
        ("pp", (8,), ["single"]),
        ("3d", (2,), ["dp2-tp2"]),
        ("dp+tp", (1,), ["dp8", "tp8", "dp2-tp4", "dp4-tp2", "tp2-dp4", "tp4-dp2"]),
        ("dp+pp", (1, 2, 4, 8), ["dp8", "dp4", "dp2", "single"]),
    ],
)
def test_the_papers_baselines_on_8_devices(name: str, degrees: tuple[int, ...], strategies: list[str]) -> None:
    """Section 5.1: each baseline is a restriction of the full space."""
    space = space_named(name)
    assert space.pipeline_degrees(8) == degrees
    found = [str(strategy) for degree in degrees for strategy in space.strategies(8 // degree)]
    assert found == strategies


def test_every_baseline_lies_in_the_full_space() -> None:
    full = space_named("full")
    for space in SPACES:
        assert set(space.pipeline_degrees(8)) <= set(full.pipeline_degrees(8))
        for degree in space.pipeline_degrees(8):
            assert set(space.strategies(8 // degree)) <= set(full.strategies(8 // degree))


def test_unknown_names_and_impossible_shapes_are_the_users_mistakes() -> None:
    with pytest.raises(InvalidInput, match="dp\\+tp"):
        space_named("dp-tp")
    with pytest.raises(InvalidInput, match="6 devices"):
        space_named("3d").pipeline_degrees(6)


@pytest.mark.parametrize(
    ("devices", "stages", "strategy"),
    [(12, 2, "dp3-tp2"), (16, 2, "dp4-tp2"), (32, 4, "dp4-tp2"), (64, 4, "dp4-tp4"), (512, 8, "dp8-tp8")],
)
def test_three_dimensions_have_degrees_as_equal_as_can_be(devices: int, stages: int, strategy: str) -> None:
    space = space_named("3d")
    assert space.pipeline_degrees(devices) == (stages,)
    assert [str(each) for each in space.strategies(devices // stages)] == [strategy]


def test_three_dimensions_on_the_smallest_cluster() -> None:
    """On 4 devices a stage has 2, all of them TP: no axis of degree one is left over."""
    assert space_named("3d").strategies(2) == (Strategy((Axis(Kind.TP, 2),)),)


def _expert_axes(devices: int, tensor: list[int]) -> int:
    """By counting: axes with EP, DP only outermost, DP beside SDP or not, and TP in one place or none."""
    kinds = ("ep", "dp", "sdp", "tp")
    found = 0
    for degrees in product(divisors(devices), repeat=4):
        if prod(degrees) == devices and degrees[0] > 1 and degrees[3] in tensor:
            used = [kind for kind, degree in zip(kinds, degrees, strict=True) if degree > 1]
            found += sum(1 for order in permutations(used) if "dp" not in order[1:])
    return found


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 12])
def test_axes_of_experts(devices: int) -> None:
    """All that the rules for experts leave, counted in another way; none where EP is off or not in the space."""
    space = Space(name="full", title="", switches=Switches(hybrid_sharding=True, expert_parallel=True))
    assert len(space.expert_axes(devices)) == _expert_axes(devices, list(divisors(devices)))
    strategies = space.strategies(devices, experts=True)
    assert len(set(strategies)) == len(strategies)
    for strategy in strategies:
        strategy.check()
        assert not any(rule.forbids and rule.forbids(strategy) for rule in EXPERT_RULES)
    whole = [strategy for strategy in strategies if str(strategy).startswith(f"dp{devices}/")]
    assert len(whole) == _expert_axes(devices, [1])
    for off in (replace(space, switches=PAPER), replace(space, kinds=frozenset({Kind.DP, Kind.TP}))):
        assert off.strategies(devices, experts=True) == off.strategies(devices)
    assert not any(space_named(space.name, EXTENDED).has_experts for space in SPACES if space.name != "full")


_CONTEXT = Switches(context_parallel=True)


@pytest.mark.parametrize(
    ("devices", "pruned"),
    [(8, [34, 16, 5, 1]), (16, [61, 34, 16, 5, 1]), (64, [150, 99, 61, 34, 16, 5, 1]), (12, None), (60, None)],
)
def test_counts_with_context_parallelism(devices: int, pruned: list[int] | None) -> None:
    """Beside the paper's counts: each choice of degrees of a data axis, Ring, Ulysses and TP with one of the middle
    two above 1 adds a path, and two where data can be DP or SDP; with hybrid sharding DP over SDP as well."""
    for switches, most in ((_CONTEXT, 1), (replace(_CONTEXT, hybrid_sharding=True), 2)):
        sizes = []
        for stage in (devices // degree for degree in divisors(devices)):
            whole = len(
                Space(name="full", title="", switches=replace(switches, context_parallel=False)).strategies(stage)
            )
            more = 0
            for degrees in product(divisors(stage), repeat=5):
                if prod(degrees) == stage and degrees[2] * degrees[3] > 1:
                    more += sum(degree > 1 for degree in degrees[:2]) <= most
            sizes.append(whole + more)
        assert _sizes(devices, switches) == sizes
        if pruned is not None and most == 1:
            assert sizes == pruned


@pytest.mark.parametrize("devices", [2, 6, 8, 12])
def test_context_axes_have_one_order(devices: int) -> None:
    space = Space(name="full", title="", switches=replace(EXTENDED, context_parallel=True, hybrid_sharding=True))
    strategies = space.strategies(devices)
    assert len(set(strategies)) == len(strategies)
    order = ["dp", "sdp", "ring", "ulysses", "tp"]
    for strategy in strategies:
        strategy.check()
        assert strategy.devices == devices
        places = [order.index(axis.kind) for axis in strategy.axes]
        assert strategy.context_degree == 1 or places == sorted(places)
        assert not (CONTEXT_1.forbids and CONTEXT_1.forbids(strategy))
    texts = {str(strategy) for strategy in strategies}
    assert {f"ring{devices}+zero3", f"ulysses{devices}+zero2+rc", f"ulysses{devices}+rs"} <= texts
    without = Space(name="full", title="", switches=replace(EXTENDED, hybrid_sharding=True)).strategies(devices)
    assert tuple(each for each in strategies if each.context_degree == 1) == without, "others stay as they were"


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 12, 16])
def test_context_axes_in_any_order(devices: int) -> None:
    """Each choice of degrees as often as its axes have orders, and those of the rule among them."""
    switches = replace(_CONTEXT, context_orders=True)
    found = [
        own for own in Space(name="full", title="", switches=switches).strategies(devices) if own.context_degree > 1
    ]
    expected = 0
    for degrees in product(divisors(devices), repeat=5):
        if prod(degrees) == devices and degrees[2] * degrees[3] > 1 and min(degrees[:2]) == 1:
            expected += factorial(sum(degree > 1 for degree in degrees))
    assert len(found) == len(set(found)) == expected
    assert set(Space(name="full", title="", switches=_CONTEXT).strategies(devices)) & set(found) == {
        own for own in found if not (CONTEXT_1.forbids and CONTEXT_1.forbids(own))
    }


def test_only_the_full_space_has_context_axes() -> None:
    on = replace(EXTENDED, context_parallel=True)
    assert [space.name for space in SPACES if space_named(space.name, on).has_context] == ["full"]


@pytest.mark.parametrize("name", ["bert-large", "t5-large", "llama3-8b"])
def test_what_layers_can_take_is_known_for_all_strategies_at_once(name: str) -> None:
    """The search asks once for all strategies that divide a sample alike, and once for all with the same switches."""
    model = load_model(name, Training())
    strategies = space_named("full", replace(EXTENDED, context_parallel=True, zero3=True)).strategies(8)
    one_by_one = [[model.allows(kind, strategy) for strategy in strategies] for kind in model.kinds]
    assert allowed(model, model.kinds, strategies, LayerSpec.supports).tolist() == one_by_one
    assert len({tuple(row) for row in one_by_one}) > 1


@pytest.mark.parametrize("devices", [6, 8])
def test_strategies_that_share_what_follows_from_axes_are_as_if_read(devices: int) -> None:
    """Strategies of a space share what follows from their axes: it must be what each would find itself."""
    strategies = space_named("full", replace(EXTENDED, context_parallel=True, zero3=True)).strategies(devices)
    names = [
        "devices", "divided", "switches", "data_degree", "context_degree", "layout", "sharding_factors",
        "batch_factors", "context_factors", "gradient_factors", "replica_factors",
    ]  # fmt: skip
    for made in strategies:
        read = Strategy.parse(str(made))
        assert made == read
        assert hash(made) == hash(read)
        assert [getattr(made, name) for name in names] == [getattr(read, name) for name in names]
        assert [made.factors(kind) for kind in Kind] == [read.factors(kind) for kind in Kind]
