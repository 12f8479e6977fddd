"""Two machines out of one: namespaces, with names and processes of their own, joined by a cable of limited speed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Node", "Nodes", "nodes", "why_not"]

_LIMIT_S = 180.0
_FIRST = "10.77.0.1"


class Node:
    """One of them, and the torchrun that was started on it last."""

    def __init__(self, number: int, name: str, folder: Path) -> None:
        self.number, self.name = number, name
        self._folder, self._log = folder, folder / f"node{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, torchrun: tuple[str, ...], command: tuple[str, ...]) -> None:
        within = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--pid", "--fork", "--mount-proc"]
        hostname = ["sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        options = ("--node-rank", str(self.number), "--master-addr", _FIRST, "--master-port", "29500", *torchrun)
        settings = {
            "GALVATRON_CACHE": str(self._folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "KINETO_LOG_LEVEL": "99",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*within, *hostname, sys.executable, "-m", "torch.distributed.run", *options, "-m", *command],
                stdout=log,
                stderr=log,
                env={**os.environ, **settings},
            )

    def runs(self) -> bool:
        assert self._process is not None
        return self._process.poll() is None

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def end(self, limit_s: float = _LIMIT_S) -> int:
        """Its exit status."""
        assert self._process is not None
        return self._process.wait(limit_s)

    def pull_the_cable(self) -> None:
        """From now on nobody hears of the other."""
        _do("ip", "-n", self.name, "link", "set", f"{self.name}-cable", "down")

    def kill(self) -> None:
        """All processes, at once."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if self._process is not None:
            self._process.wait()


class Nodes:
    """Both."""

    def __init__(self, names: tuple[str, str], folder: Path) -> None:
        self.first, self.second = (Node(number, name, folder) for number, name in enumerate(names))

    def start(self, *command: str) -> None:
        """``torchrun -m COMMAND`` on both, with two processes on each."""
        for node in (self.first, self.second):
            node.start(("--nnodes", "2", "--nproc-per-node", "2"), command)

    def run(self, *command: str) -> None:
        """The same, until it has ended well."""
        self.start(*command)
        for node in (self.first, self.second):
            assert node.end() == 0, node.said()


def why_not() -> str | None:
    """Why there can be no namespaces here, if so."""
    try:
        done = subprocess.run(["ip", "netns", "add", "gv-try"], capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "del", "gv-try"], capture_output=True, check=False)
    except FileNotFoundError:
        return "the program 'ip' is not installed"
    return None if done.returncode == 0 else f"network namespaces are not permitted: {done.stderr.strip()}"


@contextmanager
def nodes(megabits_per_s: int, folder: Path) -> Iterator[Nodes]:
    """Two nodes, joined by a cable of this speed in each direction; gone afterwards, with all that runs on them.

    ``folder``: for what they say and keep.
    """
    names = (f"gv{os.getpid() % 10000}a", f"gv{os.getpid() % 10000}b")
    pair = Nodes(names, folder)
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
        yield pair
    finally:
        for node in (pair.first, pair.second):
            node.kill()
            with suppress(subprocess.CalledProcessError):
                _do("ip", "netns", "del", node.name)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
