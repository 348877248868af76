"""A call that is not answered in time says why: what the worker that was called does, or what has become of it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable
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
_gate = threading.Event()


def work_until_told() -> None:
    _gate.wait(LONG_S)  # where it is


def tell_it() -> None:
    _gate.set()


async def wait_for_nothing() -> None:
    import asyncio

    await asyncio.sleep(LONG_S)


def hold_the_interpreter(folder: Path) -> None:
    """Keep the interpreter's lock, as C code does that does not release it, until there is a file ``over``."""
    until_over = (
        f"touch {folder}/holds; n=0; while [ ! -e {folder}/over -a $n -lt 2000 ]; do n=$((n+1)); sleep 0.1; done"
    )
    ctypes.PyDLL(None).system(until_over.encode())


def hold_from_the_main_thread(folder: Path) -> None:
    _holding.append(folder)


_holding: list[Path] = []


def line_of(function: Callable[..., Any], words: str) -> str:
    """Where these words are in a function, as ``file:line``."""
    code = function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    number = next(n for n in range(code.co_firstlineno, len(lines) + 1) if words in lines[n - 1])
    return f"{code.co_filename}:{number}"


def asked_of_the_last(body: Callable[[str], Any], size: int, *, tcp: bool) -> list[Any]:
    """What ``body`` returns on each rank but the last, which it gets the name of."""

    def run(member: Member) -> Any:
        workers.begin(member, tcp=tcp)
        try:
            if member.rank < size - 1:
                return body(f"worker{size - 1}")
            while workers.calls.get("over", 0) != size - 1:
                if _holding:
                    hold_the_interpreter(_holding.pop())
                time.sleep(0.01)
            return None
        finally:
            if member.rank < size - 1:
                rpc.call(size - 1, workers.count, "over")
            rpc.shutdown()

    return on_ranks(run, size)[:-1]


def timeout_of(
    enough: Callable[[CallTimeout], bool], to: str, function: Callable[..., Any], *args: Any, timeout_s: float = 1.0
) -> CallTimeout:
    """The first timeout that says enough: an earlier call may be late since its worker has not come to it yet."""
    until = time.monotonic() + LONG_S
    while True:
        with pytest.raises(CallTimeout) as caught:
            rpc.call(to, function, *args, timeout_s=timeout_s)
        error = caught.value
        assert error.worker == to
        assert error.timeout_s == timeout_s
        assert error.line.startswith(__file__)
        assert error.line in str(error)
        if enough(error) or time.monotonic() > until:
            return error


@pytest.mark.parametrize(("size", "tcp"), [(3, False), (2, True)])
def test_a_handler_that_runs_is_told_with_its_line(size: int, tcp: bool) -> None:
    place = line_of(work_until_told, "# where it is")

    def body(to: str) -> Any:
        error = timeout_of(lambda error: place in error.at, to, work_until_told)
        later = timeout_of(lambda error: (error.cause, error.at) == ("handler", ""), to, wait_for_nothing)
        if rpc.call(to, workers.count, "asked") == size - 1:  # the others have their errors as well
            rpc.call(to, tell_it)
        return error.cause, error.at, str(error), later.cause, later.at

    for cause, at, text, later_cause, later_at in asked_of_the_last(body, size, tcp=tcp):
        assert (cause, at) == ("handler", f"work_until_told ({place})")
        assert re.search(r"did not answer within 1 s: work_until_told \(\S+:\d+\), \d+\.\d s ago", text)
        assert re.search(rf"It has worked on this for \d+\.\d s and is at work_until_told \({place}\)", text)
        assert (later_cause, later_at) == ("handler", "")


@pytest.mark.parametrize("tcp", [False, True])
def test_a_stopped_worker_is_told(tcp: bool) -> None:
    def body(to: str) -> Any:
        pid = rpc.call(to, workers.pid)
        stop(pid)
        try:
            error = timeout_of(lambda error: error.cause == "stopped", to, workers.add, 1, 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        return error.cause, error.pid == pid, f"kill -CONT {pid}" in str(error)

    assert asked_of_the_last(body, 2, tcp=tcp) == [("stopped", True, True)]


@pytest.mark.parametrize(("starter", "tcp"), [(hold_from_the_main_thread, False), (hold_the_interpreter, True)])
def test_something_that_holds_the_interpreter_is_told_with_its_line(
    starter: Callable[..., Any], tcp: bool, tmp_path: Path
) -> None:
    place = line_of(hold_the_interpreter, ".system(")
    is_known = starter is hold_from_the_main_thread  # of another thread that sleeps in C nobody can know that it has it

    def body(to: str) -> Any:
        future = rpc.start(to, starter, tmp_path)
        assert soon((tmp_path / "holds").exists)

        def is_told(error: CallTimeout) -> bool:
            return error.cause == "interpreter" and (place in error.at or not is_known)

        error = timeout_of(is_told, to, workers.add, 1, 2)
        (tmp_path / "over").touch()
        future.wait()
        assert rpc.call(to, workers.add, 1, 2) == 3
        return error.cause, error.at

    [(cause, at)] = asked_of_the_last(body, 2, tcp=tcp)
    assert cause == "interpreter"
    if is_known:
        assert at == f"hold_the_interpreter ({place})"


def slow_items() -> Any:
    yield 1
    _gate.wait(LONG_S)  # before the second item
    yield 2


def test_an_item_that_does_not_come_says_why_and_comes_later() -> None:
    place = line_of(slow_items, "# before the second item")

    def body(to: str) -> Any:
        items = rpc.call(to, slow_items, timeout_s=LONG_S)
        assert next(items) == 1
        vars(items)["_timeout_s"] = 1.0  # now that the first item has come, for which a worker may take long
        until = time.monotonic() + LONG_S
        while True:
            with pytest.raises(CallTimeout) as caught:
                next(items)
            if place in caught.value.at or time.monotonic() > until:
                break
        vars(items)["_timeout_s"] = LONG_S
        rpc.call(to, tell_it)
        assert list(items) == [2]
        return caught.value.cause, caught.value.at, caught.value.asked

    [(cause, at, asked)] = asked_of_the_last(body, 2, tcp=False)
    assert (cause, at, asked) == ("handler", f"slow_items ({place})", "the next item of a generator")


def test_a_call_without_a_timeout_is_noted_once_and_seldom_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size = 2
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
        member.join()
        rpc.init(warn_after_s=0.5)
        began = time.monotonic()
        if member.rank == 0:
            rpc.call(size - 1, work_until_written, tmp_path / "noted", timeout_s=float("inf"))
        took = time.monotonic() - began
        rpc.shutdown()
        return took

    os.mkfifo(tmp_path / "noted")
    took_s = on_ranks(run, size)[0]
    notes = [line for line in capfd.readouterr().err.splitlines() if "note: waiting for" in line]
    assert len(notes) >= 3
    assert 0.5 * 2 ** (len(notes) - 1) <= took_s  # after 0.5, 1, 2, 4 s and so on
    for note in [note for note in notes if place in note][:3]:  # the call may end while the next is looked into
        assert note.startswith(f"phalanx: note: waiting for worker{size - 1} (rank {size - 1}, pid ")
        assert re.search(rf"work_until_written \({re.escape(__file__)}:\d+\), \d+\.\d s ago", note)
        assert f"is at work_until_written ({place})" in note


def work_until_written(pipe: Path) -> None:
    os.close(os.open(pipe, os.O_RDONLY))  # where it is: this returns when somebody opens it to write
