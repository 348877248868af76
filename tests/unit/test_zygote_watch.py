"""A zygote that owes a word: when it is continued, left alone, and given up."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.waiting import await_end, await_stop, soon, stop

from phalanx.launch import zygote_watch
from phalanx.launch.zygote_watch import ZygoteWatch
from phalanx.system import processes


class Family:
    """Children of this test: ranks that wait, and a zygote that does what it is told."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def fork(self, act: Callable[[], object], then: Callable[[], object] = signal.pause) -> int:
        """A child that does the first once and the second again and again; returns when it has done the first."""
        ready, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                act()
                os.write(say, b"x")
                while True:
                    then()
            os._exit(1)
        os.close(say)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        self.pids.append(pid)
        return pid


@pytest.fixture
def family() -> Iterator[Family]:
    made = Family()
    yield made
    for pid in made.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_watch, "_CONTINUE_AFTER_S", 0.0)
    monkeypatch.setattr(zygote_watch, "_CONTINUE_EVERY_S", 0.0)


def watch_of(ranks: list[int]) -> ZygoteWatch:
    watch = ZygoteWatch("the ranks", "h0", range(4, 4 + len(ranks)))
    watch.begin(ranks)
    return watch


@pytest.mark.parametrize("size", [1, 3, 5])
def test_one_that_is_stopped_is_continued_when_a_rank_has_ended(family: Family, size: int) -> None:
    ranks = [family.fork(lambda: None) for _ in range(size)]
    zygote = family.fork(lambda: None)
    with contextlib.closing(watch_of(ranks)) as watch:
        stop(zygote)
        watch.act(zygote)
        assert watch.due_in_s() is None
        assert processes.state_of(zygote) == "T"
        os.kill(ranks[-1], signal.SIGKILL)
        await_end(ranks[-1])
        watch.act(zygote)
        assert soon(lambda: processes.state_of(zygote) != "T")
        assert watch.due_in_s() is not None
        watch.told(size - 1)
        assert (watch.due_in_s() is None) == (size > 1)  # after the last one it owes its own end


def test_one_that_is_stopped_before_its_own_end_is_continued(family: Family) -> None:
    rank, zygote = family.fork(lambda: None), family.fork(lambda: None)
    with contextlib.closing(watch_of([rank])) as watch:
        watch.told(0)
        stop(zygote)
        watch.act(zygote)
        assert soon(lambda: processes.state_of(zygote) != "T")
        assert watch.refusal is None


def test_one_that_is_stopped_again_and_again_is_given_up(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_watch, "SILENCE_S", 0.5)
    rank = family.fork(lambda: None)

    def stop_again() -> None:  # in no handler of SIGCONT, of which the next one would run within the one before
        signal.sigwait({signal.SIGCONT})
        os.kill(os.getpid(), signal.SIGSTOP)

    zygote = family.fork(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT}), stop_again)
    with contextlib.closing(watch_of([rank])) as watch:
        os.kill(rank, signal.SIGKILL)
        await_end(rank)
        stop(zygote)
        while watch.refusal is None:
            watch.act(zygote)
            if watch.refusal is None:
                await_stop(zygote)
        await_end(zygote)
        text, code = watch.refusal
    assert code == 1
    assert text == (
        "phalanx: the process that starts and watches the ranks is stopped (state T); the job ended with it\n"
        "  rank 4 has ended, and for 0.5 s it has not said how, which nobody else can know\n"
        f"  host h0, pid {zygote}; it was continued each second; look for what stops it again, such as a batch system "
        "or a script\n"
    )


def test_one_that_was_ordered_to_end_the_ranks_is_killed_if_it_does_not(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_watch, "SILENCE_S", 0.1)
    rank, zygote = family.fork(lambda: None), family.fork(lambda: None)
    with contextlib.closing(watch_of([rank])) as watch:
        watch.allow(0.1)
        watch.allow(100.0)  # the earlier limit counts
        due = watch.due_in_s()
        assert due is not None
        assert due <= 0.2
        time.sleep(due)
        watch.act(zygote)
        await_end(zygote)
        assert watch.refusal is None


def test_a_rank_that_has_been_reaped_already_is_not_waited_for(family: Family) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    zygote = family.fork(lambda: None)
    with contextlib.closing(watch_of([pid])) as watch:
        watch.act(zygote)
        assert watch.due_in_s() is None
        watch.told(0)
