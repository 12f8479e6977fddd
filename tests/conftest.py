"""Makes the benchmarks and the oracles of the tests importable: tests have no packages of their own."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
for folder in (_HERE.parent / "benchmarks", *(_HERE / name for name in ("search", "models", "runtime", "rehearsal"))):
    sys.path.insert(0, str(folder))
