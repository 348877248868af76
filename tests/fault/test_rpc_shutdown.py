"""``rpc.shutdown()`` ends in its time, whatever becomes of the others, and says for whom it has waited, and why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fault.test_rpc_inquiries import hold_the_interpreter, line_of
from tests.rpc import workers
from tests.support.ranks import Member, run_ranks
from tests.support.waiting import await_end, soon, stop

from phalanx import rpc
from phalanx.diagnosis import stacks
from phalanx.rpc import inquiry, session

LONG_S = 60.0
TIMEOUT_S = 1.0
BUSY, STOPPED, HOLDING, KILLED = 2, 3, 4, 5  # what becomes of these ranks; the others leave


def be_busy(member: Member) -> None:
    while not (member.folder / "over").exists():
        time.sleep(0.01)  # where it is, or in the line before


def leaves(member: Member, pids: dict[int, int]) -> float:
    """Call shutdown() when all that is to become of the others has; in what time it has ended."""
    if member.rank == 0:
        member.await_said("called-1", "holds")
        stop(pids[STOPPED])
        os.kill(pids[KILLED], signal.SIGKILL)
        await_end(pids[KILLED])
        member.say("all has come")
    member.await_said("all has come")
    began = time.monotonic()
    rpc.shutdown(timeout_s=TIMEOUT_S)
    took_s = time.monotonic() - began
    member.say(f"over-{member.rank}")
    if member.rank == 0:
        member.await_said("over-1")
        member.say("over")  # for the one that holds the interpreter
        os.kill(pids[STOPPED], signal.SIGCONT)
    return took_s


@pytest.mark.parametrize("tcp", [False, True])
def test_shutdown_ends_and_says_for_whom_it_waited(tcp: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def run(member: Member) -> Any:
        vars(inquiry)["_LEAST_S"] = 3.0 if tcp else 0.5
        vars(stacks)["_WRITTEN_S"] = 20.0  # for each of a few threads
        vars(session)["_STORE_S"] = LONG_S  # beside the time for what the others do, which is asked meanwhile
        workers.begin(member, tcp=tcp)
        pids = {one.rank: one.pid for one in rpc.workers()}
        if member.rank in (0, 1):
            for rank in (BUSY, STOPPED, HOLDING, KILLED):
                rpc.call(rank, workers.pid)
            member.say(f"called-{member.rank}")
            return leaves(member, pids)
        member.await_said("called-0", "called-1")
        if member.rank == HOLDING:
            hold_the_interpreter(member.folder)
        be_busy(member)
        rpc.shutdown(wait=False)
        return member.rank, os.getpid()

    outcomes = run_ranks(run, 6)
    assert [one.signal for one in outcomes] == [0, 0, 0, 0, 0, signal.SIGKILL]
    said = capfd.readouterr().err
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.traceback
    assert max(one.value for one in outcomes[:2]) < LONG_S / 2
    pids = dict(one.value for one in outcomes[2:5])
    file, _, line = line_of(be_busy, "# where it is").rpartition(":")
    held = re.escape(f"hold_the_interpreter ({line_of(hold_the_interpreter, '.system(')})")
    why = {
        BUSY: rf"it runs; its main thread is at be_busy \({re.escape(file)}:({line}|{int(line) - 1})\)\.",
        STOPPED: rf"it is stopped \(SIGSTOP\); `kill -CONT {pids[STOPPED]}` on \S+ lets it go on\.",
        HOLDING: rf"its process is there.* It is at {held}",
    }
    each = [rf"worker{rank} \(rank {rank}, pid {pids[rank]} on \S+\): {text}" for rank, text in why.items()]
    expected = rf"ends without the others: waited {TIMEOUT_S:g} s for rpc\.shutdown\(\) of ranks 2-4\. " + " ".join(
        each
    )
    assert len(re.findall(expected, said)) == 2, said


told: list[str] = []


def told_in_a_call(folder: Path) -> list[str]:
    assert soon((folder / "waits").exists)
    time.sleep(0.5)
    return told


def test_server_says_for_whom_it_waits_but_not_while_others_call_it() -> None:
    def body(member: Member) -> None:
        def tell(text: str) -> None:
            told.append(text)
            member.say("told")

        vars(session).update(_TELL_S=0.2, tell=tell)
        if member.rank:
            assert rpc.call(0, told_in_a_call, member.folder) == []
            member.await_said("told")
        else:
            member.say("waits")
            rpc.shutdown()
            assert told[0].startswith("waiting for rpc.shutdown() of rank 1. worker1 (rank 1, pid ")

    workers.with_workers(body, 2)
