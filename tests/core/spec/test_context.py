"""Context parallelism in strategies: who holds which tokens, who sums and shards what, what is refused."""

from __future__ import annotations

from functools import cache
from itertools import chain, product
from typing import Any

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Context, Factor, Kind, LayerSpec, Layout, Strategy, sequence_change, sequence_pieces


def _tokens(text: str, index: int, length: int) -> list[int]:
    return list(chain.from_iterable(sequence_pieces(Strategy.parse(text).layout, index, length)))


def _by_definition(text: str, index: int, length: int) -> list[int]:
    """Reads the strategy's text: the ring takes a chunk from each end, Ulysses and then TP under +sp consecutive parts,
    whatever the order of the axes over the links."""
    strategy = Strategy.parse(text)
    numbers, rest = {}, index
    for axis in reversed(strategy.axes):
        numbers[axis.kind], rest = rest % axis.degree, rest // axis.degree
    tokens = list(range(length))
    ring = strategy.degree(Kind.RING)
    if ring > 1:
        chunk, own = length // (2 * ring), numbers[Kind.RING]
        far = 2 * ring - 1 - own
        tokens = tokens[own * chunk : (own + 1) * chunk] + tokens[far * chunk : (far + 1) * chunk]
    for kind in (Kind.ULYSSES, Kind.TP):
        if kind in numbers and (kind is Kind.ULYSSES or strategy.sequence_parallel):
            size = len(tokens) // strategy.degree(kind)
            tokens = tokens[numbers[kind] * size : (numbers[kind] + 1) * size]
    return tokens


_AXES = ["dp2", "sdp2", "ring2", "ring3", "ring4", "ulysses2", "ulysses3", "ulysses4", "tp2", "tp3"]
_SMALL = ["dp2", "ring2", "ring3", "ulysses2", "ulysses3", "tp2"]


def _strategies() -> list[str]:
    """Of up to three axes in every order, with and without +sp."""
    texts = []
    for axes in chain(product(_AXES), product(_AXES, repeat=2), product(_SMALL, repeat=3)):
        kinds = {text.rstrip("234") for text in axes}
        if len(kinds) == len(axes) and kinds & {"ring", "ulysses"}:
            texts += ["-".join(axes)] + (["-".join(axes) + "+sp"] if "tp" in kinds else [])
    return texts


def test_each_rank_has_the_tokens_that_its_axes_say() -> None:
    for text in _strategies():
        for index in range(Strategy.parse(text).devices):
            assert _tokens(text, index, 288) == _by_definition(text, index, 288), (text, index)


def test_context_ranks_have_all_tokens_once() -> None:
    for text in _strategies():
        strategy = Strategy.parse(text)
        held: dict[tuple[int, ...], list[int]] = {}
        for index in range(strategy.devices):
            rows = tuple(index // factor.stride % factor.size for factor in sorted(strategy.batch_factors))
            held.setdefault(rows, []).extend(_tokens(text, index, 288))
        copies = 1 if strategy.sequence_parallel else strategy.degree(Kind.TP)
        assert all(sorted(tokens) == sorted(list(range(288)) * copies) for tokens in held.values()), text


def test_causal_work_is_the_same_on_each_rank_of_a_ring() -> None:
    work = [sum(token + 1 for token in _tokens("ring4", rank, 64)) for rank in range(4)]
    assert len(set(work)) == 1


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a sequence of 62 tokens cannot be divided by a ring of 2 and 1 parts"):
        sequence_pieces(Strategy.parse("ring2").layout, 0, 62)
    assert len(sequence_pieces(Strategy.parse("ring2").layout, 0, 64)) == 2


def test_layouts_are_equal_exactly_where_tokens_are() -> None:
    """Otherwise a change would be paid for nothing, or tokens would be taken for others."""
    for texts in (["ulysses4", "tp4+sp"], ["dp2-ulysses2", "sdp2-tp2+sp"], ["ring2-ulysses2", "ring2-tp2+sp"]):
        assert len({Strategy.parse(text).layout for text in texts}) == 1
    differ = ["ring4", "ring2-ulysses2", "ulysses2-ring2", "ulysses2-tp2", "ulysses2-tp2+sp"]
    differ += ["tp2-ulysses2+sp", "tp2-ulysses2", "tp4", "dp2-ring2", "dp2-ulysses2"]
    assert len({Strategy.parse(text).layout for text in differ}) == len(differ)


@pytest.mark.parametrize(
    ("text", "sharded", "replicas", "gathers"),
    [
        ("dp2-ring2", "", "dp2-ring2", False),
        ("dp2-ring2-tp2", "", "dp2-ring2", False),
        ("sdp2-ring2-ulysses2-tp2", "sdp2-ring2-ulysses2", "", True),
        ("dp2-sdp2-ring2", "sdp2-ring2", "dp2", True),
        ("dp2-ulysses2+zero2", "dp2-ulysses2", "", False),
        ("ring4+zero2", "ring4", "", False),
        ("ring4+zero3", "ring4", "", True),
        ("ring2-ulysses2-tp2+zero3+sp", "ring2-ulysses2", "", True),
        ("ulysses4", "", "ulysses4", False),
        ("sdp4-tp2", "sdp4", "", True),
        ("dp4+zero2", "dp4", "", False),
    ],
)
def test_parameters_are_shared_over_context_as_over_data(text: str, sharded: str, replicas: str, gathers: bool) -> None:
    strategy = Strategy.parse(text)

    def factors(of: str) -> frozenset[Factor]:
        return strategy.factors(*(Kind(axis.rstrip("0123456789")) for axis in of.split("-") if axis))

    assert strategy.sharding_factors == factors(sharded)
    assert strategy.replica_factors == factors(replicas)
    assert strategy.gathers_parameters == gathers
    assert str(strategy) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ring2-ring2", "each kind may appear once"),
        ("dp2+zero3", r"ZeRO-3 \(\+zero3\) needs a ring or ulysses axis and no dp axis and no sdp axis"),
        ("dp2-ring2+zero3", "no dp axis"),
        ("ring2+zero3+zero2", "exclude each other"),
        ("sdp2-ring2+zero2", "no sdp axis"),
        ("ring2+sp", "needs a tp axis"),
        ("dp2-ring2/ring2-ep2", "ring and ulysses divide sequences for the whole layer"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Strategy.parse(text)


@cache
def _held(layout: Layout, index: int) -> frozenset[int]:
    return frozenset(chain.from_iterable(sequence_pieces(layout, index, 32)))


def _check_change(source: Layout, target: Layout, index: int, devices: int) -> None:
    """A rank gathers from those that differ from it in the gathered factors only, and then has what it slices from."""
    change = sequence_change(source, target)
    kept = frozenset(change.kept)
    between = Layout(source.rows, kept, source.zigzag & kept, source.inner & kept)
    gathered: set[int] = set()
    for other in range(devices):
        apart = {factor for factor in _bits(devices) if (other ^ index) & factor.stride}
        if apart <= set(change.gathered):
            gathered |= _held(source, other)
    assert gathered == _held(between, index), "all that the kept factors leave, and no more"
    assert _held(target, index) <= gathered
    assert set(change.kept) | set(change.sliced) == target.sequence


def _bits(devices: int) -> list[Factor]:
    return [Factor(2**bit, 2) for bit in range(devices.bit_length() - 1)]


def test_a_change_gathers_what_the_other_layer_needs() -> None:
    """Of pairs of layouts on 8 devices, zig-zag or not: simulated rank by rank."""
    texts = [text for text in _strategies() if Strategy.parse(text).devices == 8] + ["dp8", "dp2-tp4+sp", "tp8+sp"]
    layouts = list(dict.fromkeys(Strategy.parse(text).layout for text in texts))[::2]
    fewer = 0
    for source, target in product(layouts, repeat=2):
        for index in (0, 3, 5):
            _check_change(source, target, index, 8)
        fewer += 0 < len(sequence_change(source, target).gathered) < len(source.sequence)
    assert fewer > 10, "where the first division stays, only the rest is gathered"


def test_sequences_divided_alike_stay_as_they_are() -> None:
    one, other = Strategy.parse("dp2-ring2-tp2").layout, Strategy.parse("sdp2-ring2-tp2+sp").layout
    change = sequence_change(other, one)
    assert (change.kept, change.gathered, change.sliced) == ((Factor(2, 2),), (Factor(1, 2),), ())
    assert sequence_change(one, one).gathered == sequence_change(one, other).gathered == ()
    rows = Strategy.parse("tp2-ring2-dp2").layout
    assert sequence_change(one, rows).gathered == (), "rows alone change"


def _layer(**context: Any) -> LayerSpec:
    return LayerSpec(
        name="decoder",
        parameters=1,
        forward_flops=1,
        split_activation_bytes=1,
        boundary_bytes=1,
        context=Context(length=96, **context),
    )


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ("ulysses4", True),
        ("ulysses8", False),  # four heads of keys and values
        ("ulysses2-tp2", True),
        ("ulysses4-tp2", False),  # two of them after TP
        ("ulysses3", False),
        ("ring16", True),
        ("ring32", False),  # 64 chunks of 96 tokens
        ("ring16-tp2", True),
        ("ring16-tp4+sp", False),
        ("ring4-ulysses4", True),
        ("dp8", True),
    ],
)
def test_which_degrees_a_layer_takes(text: str, possible: bool) -> None:
    assert _layer(heads=8, key_value_heads=4).allows_context(Strategy.parse(text)) == possible


def test_a_layer_without_attention_takes_any_ulysses() -> None:
    assert _layer().allows_context(Strategy.parse("ulysses8"))
    unknown = LayerSpec(name="window", parameters=1, forward_flops=1, split_activation_bytes=1, boundary_bytes=1)
    assert not unknown.allows_context(Strategy.parse("ulysses2"))
    assert unknown.allows_context(Strategy.parse("dp2"))
