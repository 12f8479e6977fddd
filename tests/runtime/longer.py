"""Cases of a parametrized test that only the longer run (``make test-all``) has."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet

__all__ = ["longer"]


def longer(*values: Any) -> ParameterSet:
    """More of what another case of the same test shows in ``make test``."""
    return pytest.param(*values, marks=pytest.mark.slow)
