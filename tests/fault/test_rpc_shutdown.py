"""``rpc.shutdown()`` ends in its time, whatever becomes of the others, and says for whom it has waited, and why."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fault.test_rpc_inquiries import line_of
from tests.rpc import workers
from tests.support.ranks import Member, on_ranks, run_ranks
from tests.support.waiting import soon, stop

from phalanx import rpc
from phalanx.rpc import inquiry, session
from phalanx.watch import from_outside

LONG_S = 60.0
TIMEOUT_S = 4.0  # within which the others come to their shutdown() on any machine, once they have met
ANSWER_S = 20.0


def be_busy(folder: Path, others: int) -> None:
    while len(list(folder.iterdir())) < others:
        time.sleep(0.01)  # where it is, or in the line before


def hold_the_interpreter(folder: Path, others: int) -> None:
    """Keep the interpreter's lock, as C code does that does not release it, until the others are done."""
    there = f"touch {folder.parent}/there"
    until_done = (
        f"{there}; n=0; while [ $(ls {folder} | wc -l) -lt {others} -a $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done"
    )
    ctypes.PyDLL(None).system(until_done.encode())


@pytest.mark.parametrize(
    ("state", "tcp"),
    [("stopped", False), ("stopped", True), ("holding", False), ("busy", True), ("killed", False), ("killed", True)],
)
def test_it_ends_and_says_for_whom_it_waited(
    state: str, tcp: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size, last = 3, 2
    called, met, over = tmp_path / "called", tmp_path / "met", tmp_path / "over"
    for folder in called, met, over:
        folder.mkdir()

    def run(member: Member) -> Any:
        if state == "busy":
            vars(inquiry)["_LEAST_S"] = ANSWER_S  # which may have to wait for a core
        vars(from_outside)["_WRITTEN_S"] = 3.0  # for each of a few threads
        vars(session)["_STORE_S"] = LONG_S  # beside the time for what the others do, which is asked meanwhile
        workers.begin(member, tcp=tcp)
        if member.rank == last:
            if state == "holding":
                hold_the_interpreter(over, last)
            (tmp_path / "there").touch()
            be_busy(over, last)
            rpc.shutdown(timeout_s=LONG_S)
            return 0.0
        try:
            return shut_down(member, last)
        finally:
            (over / str(member.rank)).touch()

    def shut_down(member: Member, last: int) -> tuple[float, int]:
        assert soon((tmp_path / "there").exists)
        pid = rpc.session.agent().member(last).pid
        if state in ("stopped", "killed"):
            rpc.call(last, workers.pid)
            (called / str(member.rank)).touch()
        if member.rank == 0 and state in ("stopped", "killed"):
            be_busy(called, last)
            stop(pid) if state == "stopped" else os.kill(pid, signal.SIGKILL)
        (met / str(member.rank)).touch()
        be_busy(met, last)
        began = time.monotonic()
        rpc.shutdown(timeout_s=TIMEOUT_S)
        took = time.monotonic() - began
        (over / str(member.rank)).touch()
        if state == "stopped" and member.rank == 0:
            be_busy(over, last)
            os.kill(pid, signal.SIGCONT)
        return took, pid

    outcomes = run_ranks(run, size)
    assert (outcomes[-1].signal == signal.SIGKILL) == (state == "killed")
    said = capfd.readouterr().err
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.traceback
        took, pid = outcome.value
        assert took < LONG_S / 2
    if state == "killed":
        assert "ends without the others" not in said
        return
    who = rf"waited {TIMEOUT_S:g} s for rpc\.shutdown\(\) of rank {last}\. "
    who += rf"worker{last} \(rank {last}, pid {pid} on \S+\): "
    held = re.escape(f"hold_the_interpreter ({line_of(hold_the_interpreter, '.system(')})")
    file, _, line = line_of(be_busy, "# where it is").rpartition(":")
    busy = rf"be_busy \({re.escape(file)}:({line}|{int(line) - 1})\)"
    why = {
        "stopped": rf"it is stopped \(SIGSTOP\); `kill -CONT {pid}`",
        "holding": f"its process is there.* It is at {held}",
        "busy": f"it runs; its main thread is at {busy}",
    }[state]
    assert len(re.findall(f"warning: rpc.shutdown\\(\\) ends without the others: {who}{why}", said)) == last, said


def is_active() -> bool:
    now = time.monotonic()
    return session.agent()._serving.active_at() >= now


@pytest.mark.parametrize("called", [True, False])
def test_a_server_that_others_call_says_nothing_while_it_waits(called: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def body(member: Member) -> None:
        assert rpc.call(workers.next_of(member), is_active)
        own, looks = session.agent(), iter([True, True, True, False])
        vars(session)["_TELL_S"] = 0.0
        vars(own)["active_at"] = time.monotonic if called else lambda: 0.0
        session._wait_while(lambda: next(looks), lambda: "for the others", LONG_S, 1)
        vars(session)["_TELL_S"] = LONG_S

    workers.with_workers(body, 2)
    assert ("waiting for the others" in capfd.readouterr().err) is not called


@pytest.mark.parametrize("slow", ["inquiry", "store"])
def test_a_question_that_takes_long_does_not_hold_it_up(slow: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its time is over while it asks: it ends, and says that it does not know why."""

    def body(member: Member) -> None:
        workers.begin(member, tcp=False)
        if member.rank == 0:
            vars(session)["_STORE_S"] = 2.0  # in which the time is over, and the question asked
            made = session.agent()

            def waits(*_: Any) -> Any:
                member.await_said("over")
                return "" if slow == "inquiry" else []

            if slow == "inquiry":
                vars(made.inquiries)["why_not_done"] = waits
            else:
                vars(made)["not_done"] = waits
            rpc.shutdown(timeout_s=1.0)
            member.say("over")
        else:
            member.await_said("over")
            rpc.shutdown()

    on_ranks(body, 2)
    said = capfd.readouterr().err
    assert "ends without the others: waited 1 s for rpc.shutdown()" in said
    assert "could not be found out within 2 s more: does the job's store answer?" in said
