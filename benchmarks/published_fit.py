"""The rooflines of presets, fitted to published runs, and how stable they are.

    python benchmarks/published_fit.py   takes minutes

Least squares of the logarithm of predicted over published throughput, over all runs marked ``fit``. The A100 and the
H100 have two rates each. The H200 has the H100's chip, so the same rate of products; its attention is that of a newer
kernel. The two figures of memory traffic are the same for all: seven numbers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from galvatron.core.spec import Device
from published import Run, predicted, published, read_runs

__all__ = ["fitted", "report"]

Numbers = NDArray[np.float64]
_START = np.array([241.0, 110.0, 593.0, 197.0, 500.0, 2.55, 0.8])
"""In the order of these names, rates in TFLOP/s."""
_NAMES = (
    "A100: products",
    "A100: attention",
    "H100 and H200: products",
    "H100: attention",
    "H200: attention",
    "traffic",
    "compiled traffic",
)
_RATES = {"a100-80gb": (0, 1), "h100": (2, 3), "h200": (2, 4)}
"""Which of them are those of products and of attention on a device."""


def _changed(values: Numbers) -> Callable[[str, Device], Device]:
    """Devices with these figures."""

    def change(preset: str, device: Device) -> Device:
        products, attention = _RATES[preset]
        return replace(
            device,
            bf16_products_flops_per_s=float(values[products]) * 1e12,
            bf16_attention_flops_per_s=float(values[attention]) * 1e12,
            traffic=float(values[-2]),
            compiled_traffic=float(values[-1]),
        )

    return change


def _errors(runs: Sequence[Run], change: Callable[[str, Device], Device]) -> Numbers:
    return np.array([math.log(predicted(run, change) / published(run)) for run in runs])


def fitted(runs: Sequence[Run]) -> tuple[Numbers, Numbers, Numbers]:
    """The seven numbers, the errors there, and their slopes."""
    done = least_squares(
        lambda values: _errors(runs, _changed(values)), _START, x_scale=_START, diff_step=0.01, max_nfev=12
    )
    return done.x, done.fun, done.jac


def _shown(errors: Numbers) -> str:
    sizes = np.abs(np.expm1(errors))
    return f"{len(sizes)} runs, median error {np.median(sizes):.1%}, worst {sizes.max():.1%}"


def report(runs: Sequence[Run]) -> str:
    """The fit, each run left out of it, and each source left out of it."""
    own = [run for run in runs if run.role == "fit"]
    values, errors, slopes = fitted(own)
    spread = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)) * (errors @ errors) / (len(errors) - len(values)))
    lines = [f"{name}: {value:.4g} ± {each:.2g}" for name, value, each in zip(_NAMES, values, spread, strict=True)]
    # Without a run its error is e / (1 − its leverage): exact for a linear fit, and the slopes hardly change here.
    leverage = np.einsum("ij,jk,ik->i", slopes, np.linalg.inv(slopes.T @ slopes), slopes)
    lines += [f"fitted: {_shown(errors)}", f"each run left out: {_shown(errors / (1 - leverage))}"]
    held = [run for run in runs if run.role == "held out"]
    lines.append(f"held out: {_shown(_errors(held, _changed(values)))}")
    for source in ("mosaic", "torchtitan", "megatron"):
        rest = [run for run in own if run.source.split("-")[0] != source]
        away = [run for run in own if run not in rest]
        without = fitted(rest)[0]
        lines.append(f"{source} left out: {_shown(_errors(away, _changed(without)))}; {np.round(without, 2)}")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(report(read_runs()))
