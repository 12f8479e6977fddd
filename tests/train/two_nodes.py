"""Two machines out of one: network namespaces joined by a cable of limited speed, torchrun's agent in each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Nodes", "nodes", "why_not"]

_LIMIT_S = 300.0
_FIRST = "10.77.0.1"


class Nodes:
    """Runs commands on both."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names

    def torchrun(self, processes: int, *command: str) -> list[str]:
        """``torchrun -m COMMAND`` on both nodes, so many processes on each; what each node said."""
        running = [self._start(number, processes, command) for number in range(2)]
        said = []
        try:
            for process in running:
                text, _ = process.communicate(timeout=_LIMIT_S)
                said.append(text)
        finally:
            for process in running:
                process.kill()
                process.wait()
        for process, text in zip(running, said, strict=True):
            assert process.returncode == 0, text
        return said

    def _start(self, number: int, processes: int, command: tuple[str, ...]) -> subprocess.Popen[str]:
        name = self._names[number]
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(processes)),
            *("--master-addr", _FIRST, "--master-port", "29500", "-m", *command),
        ]
        within = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]
        return subprocess.Popen(
            [*within, *torchrun],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": f"{name}-cable", "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"},
        )


def why_not() -> str | None:
    """Why there can be no namespaces here, if so."""
    try:
        done = subprocess.run(["ip", "netns", "add", "gv-try"], capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "del", "gv-try"], capture_output=True, check=False)
    except FileNotFoundError:
        return "the program 'ip' is not installed"
    return None if done.returncode == 0 else f"network namespaces are not permitted: {done.stderr.strip()}"


@contextmanager
def nodes(megabits_per_s: int) -> Iterator[Nodes]:
    """Two nodes, joined by a cable of this speed in each direction; gone afterwards."""
    names = (f"gv{os.getpid() % 10000}a", f"gv{os.getpid() % 10000}b")
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        first, second = names
        cable = ("type", "veth", "peer", "name", f"{second}-cable", "netns", second)
        _do("ip", "link", "add", f"{first}-cable", "netns", first, *cable)
        for number, name in enumerate(names, 1):
            _do("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"{name}-cable")
            _do("ip", "-n", name, "link", "set", f"{name}-cable", "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("tbf", "rate", f"{megabits_per_s}mbit", "burst", "128kb", "latency", "100ms")
            _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", f"{name}-cable", "root", *limit)
        yield Nodes(names)
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _do("ip", "netns", "del", name)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
