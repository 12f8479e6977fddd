"""How long exchanges take beside sums, over links of which we know how they carry messages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from galvatron.measure.cluster_jobs.exchanges import exchange_probes
from galvatron.measure.cluster_jobs.findings import DeviceProbe

EXCHANGE_S, SUM_S = 0.005, 0.009
VALUES = 1000


@dataclass
class Links:
    """Of one rank. Messages have a link for each group, or one for all of them that carries them as they come."""

    in_order: bool
    free_at: dict[str, float] = field(default_factory=dict)

    def send(self, group: str, seconds: float) -> SimpleNamespace:
        link = "all" if self.in_order else group
        ends = max(time.perf_counter(), self.free_at.get(link, 0.0)) + seconds
        self.free_at[link] = ends
        return SimpleNamespace(wait=lambda: time.sleep(max(0.0, ends - time.perf_counter())))


@pytest.fixture
def peers() -> Any:
    return SimpleNamespace(
        world=1,
        device=torch.device("cpu"),
        gather=lambda value: [value],
        meet=lambda: None,
        wait_for_device=lambda: None,
    )


@pytest.mark.parametrize(("in_order", "factor"), [(False, 1.0), (True, 5.0)])
def test_exchanges_are_timed_while_sums_are_on_their_way(
    in_order: bool, factor: float, peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums last four times as long as an exchange, which waits for them where messages are carried as they come."""
    links = Links(in_order)
    monkeypatch.setattr(dist, "new_group", lambda: None)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: links.send("exchange", EXCHANGE_S))
    monkeypatch.setattr(dist, "all_reduce", lambda summed, **_: links.send("sum", SUM_S * len(summed) / VALUES))
    probes = dict(exchange_probes(peers, torch.zeros(VALUES), SUM_S))
    seconds = {kind: min(sum(probe.run(1)) for _ in range(3)) for kind, probe in probes.items()}
    assert seconds[DeviceProbe.SHARED] == pytest.approx(factor * seconds[DeviceProbe.EXCHANGE], rel=0.35)
