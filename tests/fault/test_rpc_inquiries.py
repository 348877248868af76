"""A call that is not answered in time says why: what the worker that was called does, or what has become of it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.rpc import workers
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon, stop

from phalanx import rpc
from phalanx.errors import CallTimeout
from phalanx.rpc import inquiry

LONG_S = 200.0
LATE_S = 0.3
_gate = threading.Event()
_over = threading.Event()
_holding: list[Path] = []


def tell_it() -> None:
    _gate.set()


def end_it() -> None:
    _over.set()


def hold_from_the_main_thread(folder: Path) -> None:
    _holding.append(folder)


def work_until_told() -> None:
    _gate.wait(LONG_S)  # where it is


def slow_items() -> Iterator[int]:
    yield 1
    _gate.wait(LONG_S)  # before the second item
    yield 2


async def wait_for_nothing() -> None:
    await asyncio.sleep(LONG_S)


def hold_the_interpreter(folder: Path) -> None:
    """Keep the interpreter's lock, as C code does that does not release it, until there is a file ``over``."""
    there = f"touch {folder}/holds; "
    until_over = f"n=0; while [ ! -e {folder}/over -a $n -lt 2000 ]; do n=$((n+1)); sleep 0.1; done"
    ctypes.PyDLL(None).system((there + until_over).encode())


def line_of(function: Callable[..., Any], words: str) -> str:
    """Where these words are in a function, as ``file:line``."""
    code = function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    number = next(n for n in range(code.co_firstlineno, len(lines) + 1) if words in lines[n - 1])
    return f"{code.co_filename}:{number}"


def timeout_of(enough: Callable[[CallTimeout], bool], act: Callable[[], object]) -> CallTimeout:
    """The first timeout that says enough: an earlier call may be late since its worker has not come to it yet."""
    until = time.monotonic() + LONG_S
    while True:
        with pytest.raises(CallTimeout) as caught:
            act()
        error = caught.value
        assert (error.worker, error.timeout_s) == ("worker1", LATE_S)
        assert error.line.startswith(__file__)
        assert error.line in str(error)
        if enough(error) or time.monotonic() > until:
            return error


def calling(function: Callable[..., Any], *arguments: Any) -> Callable[[], object]:
    return lambda: rpc.call(1, function, *arguments, timeout_s=LATE_S)


def running_functions() -> None:
    place = line_of(work_until_told, "# where it is")
    told = timeout_of(lambda error: place in error.at, calling(work_until_told))
    assert (told.cause, told.at) == ("handler", f"work_until_told ({place})")
    assert re.search(r"did not answer within 0.3 s: work_until_told \(\S+:\d+\), \d+\.\d s ago", str(told))
    assert re.search(rf"It has worked on this for \d+\.\d s and is at work_until_told \({place}\)", str(told))
    told = timeout_of(lambda error: error.cause == "handler", calling(wait_for_nothing))
    assert (told.cause, told.at) == ("handler", "")

    generators: list[Any] = []

    def second_item() -> None:
        generators.append(rpc.call(1, slow_items, timeout_s=LONG_S))
        assert next(generators[-1]) == 1
        vars(generators[-1])["_timeout_s"] = LATE_S  # now that the first item has come
        next(generators[-1])

    place = line_of(slow_items, "# before the second item")
    told = timeout_of(lambda error: place in error.at, second_item)
    assert (told.cause, told.at) == ("handler", f"slow_items ({place})")
    assert told.asked == "the next item of a generator"
    vars(generators[-1])["_timeout_s"] = LONG_S
    rpc.call(1, tell_it)
    assert list(generators[-1]) == [2]


def stopped_process() -> None:
    pid = rpc.call(1, workers.pid)
    stop(pid)
    try:
        told = timeout_of(lambda error: error.cause == "stopped", calling(workers.add, 1, 2))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (told.cause, told.pid) == ("stopped", pid)
    assert f"kill -CONT {pid}" in str(told)


def held_interpreter(folder: Path, *, by_the_main_thread: bool) -> None:
    place = line_of(hold_the_interpreter, ".system(")
    future = rpc.start(1, hold_from_the_main_thread if by_the_main_thread else hold_the_interpreter, folder)
    assert soon((folder / "holds").exists)

    def is_told(error: CallTimeout) -> bool:
        # Of another thread that sleeps in C nobody can know that it has the lock.
        return error.cause == "interpreter" and (place in error.at or not by_the_main_thread)

    told = timeout_of(is_told, calling(workers.add, 1, 2))
    (folder / "over").touch()
    future.wait()
    assert rpc.call(1, workers.add, 1, 2) == 3
    assert is_told(told)


@pytest.mark.parametrize("tcp", [False, True])
def test_overdue_call_says_what_its_worker_does(tcp: bool) -> None:
    def body(member: Member) -> None:
        workers.begin(member, tcp=tcp)
        if member.rank == 0:
            try:
                running_functions()
                stopped_process()
                held_interpreter(member.folder, by_the_main_thread=not tcp)
            finally:
                rpc.call(1, end_it)
        while member.rank and not _over.wait(0.01):
            while _holding:
                hold_the_interpreter(_holding.pop())
        rpc.shutdown()

    on_ranks(body, 2)


def work_until_written(pipe: Path) -> None:
    os.close(os.open(pipe, os.O_RDONLY))  # where it is: this returns when somebody opens it to write


def test_call_without_a_timeout_is_noted_less_and_less_often(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = line_of(work_until_written, "# where it is")

    def run(member: Member) -> float:
        noted: list[str] = []
        tell = vars(inquiry)["tell"]

        def tell_and_note(text: str) -> None:
            tell(text)
            noted.extend([text] if place in text else [])
            if len(noted) == 3:
                (tmp_path / "noted").open("w").close()

        vars(inquiry)["tell"] = tell_and_note
        workers.begin(member, warn_after_s=0.2)
        began = time.monotonic()
        if member.rank == 0:
            rpc.call(1, work_until_written, tmp_path / "noted", timeout_s=float("inf"))
        took = time.monotonic() - began
        rpc.shutdown()
        return took

    os.mkfifo(tmp_path / "noted")
    took_s = on_ranks(run, 2)[0]
    notes = [line for line in capfd.readouterr().err.splitlines() if "note: waiting for" in line]
    assert len(notes) >= 3
    assert 0.2 * 2 ** (len(notes) - 1) <= took_s  # after 0.2, 0.4, 0.8 s and so on
    for note in [note for note in notes if place in note][:3]:  # the call may end while the next is looked into
        assert note.startswith("phalanx: note: waiting for worker1 (rank 1, pid ")
        assert re.search(rf"work_until_written \({re.escape(__file__)}:\d+\), \d+\.\d s ago", note)
        assert f"is at work_until_written ({place})" in note
