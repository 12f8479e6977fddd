"""A cluster file that is right, and how one that is wrong is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import load_cluster

VALID = """\
name = "pair of nodes"
reserved = "1GiB"
overlap_slowdown = 1.3

[device]
name = "card"
memory = "24GiB"
memory_bandwidth = "550GB/s"
fp32 = "9TFLOP/s"
bf16 = "60TFLOP/s"
layer_overhead = "0.2ms"

[[levels]]
name = "node"
units = 8
shared = false
bandwidth = "200GB/s"
latency = "4us"

[[levels]]
name = "cluster"
units = 2
shared = true
bandwidth = "100Gb/s"
transfer_bandwidth = "9GB/s"
latency = "9us"
"""


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "mine.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def refusal(folder: Path, content: str | bytes) -> str:
    """The message for this file, which must name the file and be for people."""
    with pytest.raises(InvalidInput) as caught:
        load_cluster(write(folder, content))
    message = str(caught.value)
    assert all(line.startswith(str(folder / "mine.toml")) for line in message.splitlines())
    assert len(message) < 5000
    return message
