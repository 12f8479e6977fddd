"""Who is to blame when a job does not move, from what the ranks last said."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any, cast

import pytest

import galvatron
from galvatron.processes.heartbeats import Heartbeat, LastSeen, judge, where_am_i
from galvatron.runtime.collectives import finish

_TIMEOUT_S = 10.0
_BEAT = Heartbeat(
    rank=0,
    stage=0,
    host="a",
    machine="m",
    pid=1,
    number=5,
    step=3,
    phase="forward and backward",
    where="all_reduce",
    waiting=True,
    memory_bytes=0,
)


def _last_seen(*heartbeats: Heartbeat, alive_at: float = 100.0, moved_at: float = 100.0) -> list[LastSeen]:
    return [LastSeen(replace(heartbeat, rank=rank), alive_at, moved_at) for rank, heartbeat in enumerate(heartbeats)]


def test_nobody_while_all_move() -> None:
    assert judge(_last_seen(_BEAT, _BEAT), 105.0, _TIMEOUT_S, _TIMEOUT_S) is None


def test_a_silent_rank_even_if_it_seems_to_wait() -> None:
    last_seen = _last_seen(_BEAT, _BEAT, _BEAT, alive_at=120.0)
    last_seen[1].alive_at = 100.0
    verdict = judge(last_seen, 120.0, _TIMEOUT_S, _TIMEOUT_S)
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert "rank 1 (stage 0" in verdict.message
    assert "others wait for it in all_reduce" in verdict.message


def test_a_rank_that_was_cut_off_waits_less_for_a_sign_but_not_for_progress() -> None:
    last_seen = _last_seen(_BEAT, _BEAT, alive_at=105.0)
    assert judge(last_seen, 106.0, _TIMEOUT_S, 2.0) is None
    last_seen[1].alive_at = 103.0
    verdict = judge(last_seen, 106.0, _TIMEOUT_S, 2.0)
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert "no sign of life for 2 s" in verdict.message


def test_of_ranks_that_do_not_move_the_one_that_does_not_wait() -> None:
    busy = replace(_BEAT, waiting=False, where="decode")
    verdict = judge(_last_seen(_BEAT, _BEAT, busy, alive_at=120.0), 120.0, _TIMEOUT_S, _TIMEOUT_S)
    assert verdict is not None
    assert verdict.ranks == (2,)
    assert "decode" in verdict.message


def test_one_rank_that_moves_clears_all() -> None:
    last_seen = _last_seen(_BEAT, _BEAT, alive_at=120.0)
    last_seen[0].moved_at = 115.0
    assert judge(last_seen, 120.0, _TIMEOUT_S, _TIMEOUT_S) is None


def test_before_the_first_step_ranks_need_only_be_alive() -> None:
    starting = replace(_BEAT, step=0, phase="starting", waiting=False)
    assert judge(_last_seen(starting, starting, alive_at=120.0), 120.0, _TIMEOUT_S, _TIMEOUT_S) is None
    assert judge(_last_seen(starting, starting), 120.0, _TIMEOUT_S, _TIMEOUT_S) is not None


def test_those_that_are_done_are_left_alone() -> None:
    done = replace(_BEAT, phase="done")
    assert judge(_last_seen(done, done), 1000.0, _TIMEOUT_S, _TIMEOUT_S) is None


def test_a_sighting_tells_signs_of_life_from_progress() -> None:
    seen = LastSeen(_BEAT, 1.0, 1.0)
    seen.see(replace(_BEAT, number=6), 2.0)
    assert (seen.alive_at, seen.moved_at) == (2.0, 1.0)
    seen.see(replace(_BEAT, number=6, step=4), 3.0)
    assert (seen.alive_at, seen.moved_at) == (2.0, 3.0)


def test_a_process_knows_where_it_is() -> None:
    where, waiting = where_am_i()
    assert where.startswith("test_a_process_knows_where_it_is (test_heartbeats.py:")
    assert not waiting


class _Tensor:
    """Something large."""


@pytest.mark.parametrize("by_itself", [False, True])
def test_asking_where_a_thread_is_keeps_nothing_of_it_alive(by_itself: bool) -> None:
    """What a function had is gone when it ends: a gigabyte of logits must not wait for the garbage collector because a
    heartbeat was sent meanwhile."""
    there, asked = threading.Event(), threading.Event()
    alive: list[weakref.ref[_Tensor]] = []

    def computing() -> None:
        logits = _Tensor()
        alive.append(weakref.ref(logits))
        there.set()
        if by_itself:
            where_am_i()
        asked.wait(30)

    thread = threading.Thread(target=computing)
    gc.disable()
    try:
        thread.start()
        there.wait(30)
        where_am_i()
        asked.set()
        thread.join()
        assert alive[0]() is None
    finally:
        gc.enable()


def _called(*files: str, inside: Callable[[], None]) -> Callable[[], None]:
    """What a function is called through functions of these files, outermost first."""
    for file in reversed(files):
        code: CodeType = compile("def passed_through():\n    inside()\n", file, "exec")
        names: dict[str, Callable[[], None]] = {"inside": inside}
        exec(code, names)
        inside = names["passed_through"]
    return inside


_SAVING = ("/lib/torch/distributed/checkpoint/state_dict_saver.py", "/lib/galvatron/train/checkpoints/storage.py")


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        (_SAVING, False),
        ((*_SAVING[:1], "/lib/torch/distributed/distributed_c10d.py"), True),
        (("/lib/galvatron/train/checkpoints/together.py", "/lib/torch/distributed/distributed_c10d.py"), True),
    ],
)
def test_a_thread_that_writes_a_checkpoint_works_and_one_that_waits_for_others_to_write_waits(
    files: tuple[str, ...], waits: bool
) -> None:
    """Both are called from torch.distributed; the main thread waits for either."""
    there, over = threading.Event(), threading.Event()

    def stalled_write() -> None:
        there.set()
        over.wait(30)

    thread = threading.Thread(target=_called(*files, inside=stalled_write))
    thread.start()
    there.wait(30)
    where, waiting = where_am_i()
    over.set()
    thread.join()
    assert waiting is waits
    assert where == "passed_through" if waits else where.startswith("wait (threading.py:")


def test_ranks_wait_where_it_shows() -> None:
    """A rank that waits for another must not be taken for one that works: it would be blamed. So nobody but the files
    that heartbeats know waits for work of ``torch.distributed``."""
    runtime = Path(galvatron.__file__).parent / "runtime"
    waiting = {
        path.relative_to(runtime).as_posix()
        for path in runtime.rglob("*.py")
        if re.search(r"\.wait\(\)", path.read_text(encoding="utf-8"))
    }
    assert waiting == {"collectives.py", "pipeline/transfer.py"}


def test_who_waits_for_the_sum_is_told() -> None:
    seen = []

    class Work:
        def wait(self) -> None:
            seen.append(where_am_i())

    class Passing:
        def result(self) -> None:
            finish([cast("Any", Work())])

    def reading_the_loss() -> None:
        finish([cast("Any", Work())])

    def attending_over_a_ring() -> None:
        Passing().result()

    reading_the_loss()
    attending_over_a_ring()
    assert seen == [("reading_the_loss", True), ("attending_over_a_ring", True)]
