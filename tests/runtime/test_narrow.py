"""Products with narrow matrices are merged, and what a graph computes stays what it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor import cpu_vec_isa
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from galvatron.runtime import narrow
from galvatron.runtime.compiled import Compiler, why_not
from galvatron.runtime.narrow import merge

_WIDE, _TOKENS = 96, 128


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _adapted(tokens: Tensor, *matrices: Tensor) -> list[Tensor]:
    """Of pairs of matrices A and B: a projection each of the same tokens, and the gradients of all."""
    flat = tokens.flatten(0, 1)
    low = [flat @ down.t() for down in matrices[::2]]
    wide = [(one.view(2, -1, len(up.t())) * 2) @ up.t() for one, up in zip(low, matrices[1::2], strict=True)]
    return [torch.stack(wide).sin().sum(), *low]


def _with_gradients(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    def both(*inputs: Tensor) -> list[Tensor]:
        leaves = [own.detach().requires_grad_() for own in inputs]
        results = function(*leaves)
        return [*results, *torch.autograd.grad(results[0], leaves)]

    return both


def _products(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))


def _merged(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Products before and after, of a graph that then gives the same."""
    made = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
    made.graph.eliminate_dead_code()
    before = _products(made.graph)
    merge(made.graph)
    made.graph.lint()
    made.recompile()
    for found, expected in zip(made(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return before, _products(made.graph)


def test_adapters_of_the_same_tokens_read_them_once() -> None:
    inputs = _tensors((2, _TOKENS // 2, _WIDE), *((8, _WIDE), (_WIDE, 8)) * 3)
    # Three adapters: A x, B of that, and backward by B, by A x, by A and by x: of these four are for all in one.
    assert _merged(_with_gradients(_adapted), inputs) == (18, 3 * 3 + 3)


def test_ranks_may_differ() -> None:
    inputs = _tensors((2, _TOKENS // 2, _WIDE), (8, _WIDE), (_WIDE, 8), (16, _WIDE), (_WIDE, 16))
    assert _merged(_with_gradients(_adapted), inputs) == (12, 2 * 3 + 3)


def test_wide_and_unaligned_ones_stay_apart() -> None:
    inputs = _tensors((2, _TOKENS // 2, _WIDE), *((_WIDE, _WIDE),) * 4)
    assert _merged(_with_gradients(_adapted), inputs) == (12, 12)
    inputs = _tensors((2, _TOKENS // 2, _WIDE), *((1, _WIDE), (_WIDE, 1)) * 2)
    before, after = _merged(lambda *own: _adapted(*own)[1:], inputs)
    assert before == after == 2


def test_one_that_is_made_of_another_stays() -> None:
    def chained(tokens: Tensor, down: Tensor) -> list[Tensor]:
        low = tokens @ down
        return [tokens @ low + low]

    assert _merged(chained, _tensors((_TOKENS, _TOKENS), (_TOKENS, 8))) == (2, 2)


def test_one_that_is_used_before_the_next_can_be_computed_stays() -> None:
    """A second product with a matrix that the first one makes."""

    def chained(tokens: Tensor, down: Tensor, own: Tensor) -> list[Tensor]:
        low = tokens @ down
        return [tokens @ (own @ low)]

    inputs = _tensors((_TOKENS, _WIDE), (_WIDE, 8), (_WIDE, _TOKENS))
    assert _merged(chained, inputs) == (3, 3)


@pytest.mark.parametrize("alpha", [1, 2])
def test_only_plain_sums_are_merged(alpha: int) -> None:
    def added(left: Tensor, right: Tensor, other: Tensor) -> list[Tensor]:
        return [torch.add(left @ right, other.t() @ right, alpha=alpha)]

    inputs = _tensors((_TOKENS, 8), (8, _WIDE), (8, _TOKENS))
    assert _merged(added, inputs) == ((2, 1) if alpha == 1 else (2, 2))


def test_a_part_of_a_sum_that_is_used_elsewhere_stays() -> None:
    def added(left: Tensor, right: Tensor, other: Tensor) -> list[Tensor]:
        first = left @ right
        return [first + other.t() @ right, first]

    inputs = _tensors((_TOKENS, 8), (8, _WIDE), (8, _TOKENS))
    assert _merged(added, inputs) == (2, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.skipif(why_not("cpu") is not None, reason=str(why_not("cpu")))
def test_the_compilers_own_graphs_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, also when the number of tokens is one that the compiler leaves open."""
    counts: list[tuple[int, int]] = []

    def counted(graph: fx.Graph) -> None:
        before = _products(graph)
        merge(graph)
        counts.append((before, _products(graph)))

    monkeypatch.setattr(narrow, "merge", counted)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # or four programs are compiled to find out
    compiler = Compiler()

    def adapted(tokens: Tensor, *matrices: Tensor) -> list[Tensor]:
        low = [functional.linear(tokens, down) for down in matrices[::2]]
        wide = [functional.linear(one * 2, up) for one, up in zip(low, matrices[1::2], strict=True)]
        return [torch.stack(wide).sin().sum()]

    compiled = compiler.function(adapted)
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):  # or no pass runs again
        for length in (50, 51, 52):
            inputs = _tensors((2, length, _WIDE), *((8, _WIDE), (_WIDE, 8)) * 3)
            for found, expected in zip(
                _with_gradients(compiled)(*inputs), _with_gradients(adapted)(*inputs), strict=True
            ):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not compiler.failures
    assert counts == [(6, 4), (12, 8)] * 2
