"""Linear layers in float8: which of them it pays for, and what it changes in a layer's work.

Scaling is dynamic and by rows (torchao's ``rowwise``): a token's scale does not depend on the other tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Float8", "float8_of", "float8_pays"]


def float8_pays(inputs: int, outputs: int) -> bool:
    """torchao's own rule for rowwise scaling (``_auto_filter_for_rowwise``), from its tables of H100s: both a multiple
    of 16, which the hardware asks for, and large enough that casting does not eat up what the product gains."""
    if inputs % 16 or outputs % 16:
        return False
    return outputs > 2048 and inputs > 1024 and not (outputs <= 4096 and inputs <= 2048)


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8:
    """Of a layer, the part that float8 changes. Sizes are for one sample, and elements those that are cast."""

    forward_flops: int
    """Of the layer's, those of products that would be in float8; backward has twice as many."""
    inputs: int
    """Elements of what enters these products."""
    outputs: int
    weights: int
    """Elements of their weights, cast once a pass, however many the samples."""

    def cast_bytes(self, element: int) -> tuple[int, int, int]:
        """Memory traffic of casting: of one sample in forward and in backward, and of the weights in either.

        A cast reads an element twice, for the scale and for itself, and writes one byte. Forward casts the inputs;
        backward casts the outputs' gradients by rows and by columns, and the inputs by columns. Both cast the weights.
        """
        each = 2 * element + 1
        return each * self.inputs, each * (2 * self.outputs + self.inputs), each * self.weights


def float8_of(tokens: int, shapes: Iterable[tuple[int, int]]) -> Float8 | None:
    """The part of a layer with linear layers of these (inputs, outputs); None: float8 pays for none of them."""
    paying = [shape for shape in shapes if float8_pays(*shape)]
    if not paying:
        return None
    weights = sum(inputs * outputs for inputs, outputs in paying)
    return Float8(
        forward_flops=2 * tokens * weights,
        inputs=tokens * sum(inputs for inputs, _ in paying),
        outputs=tokens * sum(outputs for _, outputs in paying),
        weights=weights,
    )
