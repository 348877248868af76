"""Which rank is the cause, and what is printed about it."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
from tests.support.golden import MOST_LINES, without_frames

from phalanx.errors import CollectiveMismatch
from phalanx.launch.output.failure import Failure, find_cause, format_failure, signal_name
from phalanx.launch.output.report import Report, read_report
from phalanx.watch.calls import listed


def report(
    name: str = "builtins.ValueError", *, time: float | None = 1.0, text: str = "bad", consequence: bool = False
) -> Report:
    return Report(name, text, f"Traceback\n{name}: {text}\n", False, time, 1, consequence=consequence)


def test_cause_is_the_earliest_report_but_for_complaints_about_others() -> None:
    first = Failure(2, 12, 1, 5.0, report(time=5.0))
    later = Failure(0, 10, 1, 5.2, report("builtins.ConnectionError", time=5.2))
    assert find_cause([later, first]) is first  # whatever ended first
    killed = Failure(1, 11, -9, 5.010)
    complaint = Failure(0, 10, 1, 5.005, report("builtins.RuntimeError", time=5.005))
    assert find_cause([complaint, killed]) is killed
    lost = Failure(0, 10, 1, 5.0, report("phalanx.errors.PeerLost", consequence=True))
    exited = Failure(1, 11, 3, 5.5)
    assert find_cause([lost, exited]) is exited
    assert find_cause([lost]) is lost
    ended = Failure(0, 10, -15, 1.0, ended_by_launcher=True)
    assert find_cause([ended, Failure(1, 11, 3, 2.0)]).rank == 1


def test_script_that_exited_is_recognised_by_its_field() -> None:
    exited = replace(report("script.Enough", text="3 of 4\nmore"), exited=True)
    block = format_failure(Failure(0, 1, 1, 1.0, exited), [], ranks=1, host="h", started=0.0)
    assert block.startswith("phalanx: rank 0 of 1 failed: 3 of 4\n")
    assert "sys.exit" in block
    without = replace(exited, message="")
    block = format_failure(
        Failure(0, 1, 3, 1.0, without), [Failure(1, 2, 1, 2.0, exited)], ranks=2, host="h", started=0
    )
    assert block.startswith("phalanx: rank 0 of 2 failed\n")
    assert "rank 1 then failed: 3 of 4" in block


@pytest.mark.parametrize("count", [4, 64])
def test_block_on_many_different_calls_is_not_longer_than_a_user_reads(count: int) -> None:
    """Each rank has called something else, and each fails with words of its own."""
    calls = {rank: f"all_reduce(float32[{rank + 4}], sum) at train.py:7" for rank in range(count)}
    error = CollectiveMismatch.of_calls(listed(calls, range(count)), calls)
    name = "phalanx.errors.CollectiveMismatch"
    raised = Report(name, str(error), f"{name}: {error}\n", False, 1.0, 1)
    others = [Failure(rank, rank, 1, 2.0, replace(raised, message=f"{rank}")) for rank in range(1, count)]
    block = format_failure(Failure(0, 1, 1, 1.0, raised), others, ranks=count, host="h", started=0.0)
    assert len(without_frames(block).splitlines()) <= MOST_LINES, block
    assert (f"  and {count - 3} other calls on other ranks\n" in block) == (count > 4)
    assert len(error.calls) == count  # a program can read all of them


def test_the_block() -> None:
    cause = Failure(1, 11, 1, 13.25, report())
    others = [
        Failure(0, 10, 1, 13.3, report("phalanx.errors.PeerLost", text="rank 1 ended\nmore")),
        Failure(2, 12, -15, 14.0, ended_by_launcher=True),
        Failure(3, 13, -15, 14.0, ended_by_launcher=True),
        Failure(4, 14, -11, 13.4),
    ]
    text = format_failure(cause, others, ranks=5, host="h", started=10.0)
    assert text == (
        "phalanx: rank 1 of 5 failed: ValueError: bad\n"
        "  host h, pid 11, 3.2 s after the start, exit code 1\n"
        "\n"
        "Traceback\nbuiltins.ValueError: bad\n"
        "\n"
        "  rank 0 then failed: phalanx.errors.PeerLost: rank 1 ended\n"
        "  rank 4 then failed: ended by signal 11 (SIGSEGV)\n"
        "  ranks 2-3 ended by the launcher\n"
    )


def test_hints() -> None:
    def block(status: int, *, oom: bool = False) -> str:
        failure = Failure(0, 1, status, 1.0, out_of_memory=oom)
        return format_failure(failure, [], ranks=1, host="h", started=0.0)

    assert "signal 9 (SIGKILL)" in block(-9)
    assert "dmesg" in block(-9)
    assert "ran out of memory" in block(-9, oom=True)
    assert "Python stack" in block(-signal.SIGSEGV)
    assert "no Python exception" in block(3)
    assert signal_name(200) == "signal 200"


def test_reports_are_read_and_nonsense_is_not_believed() -> None:
    file = os.memfd_create("report")

    def read(data: bytes) -> Report | None:
        os.ftruncate(file, 0)
        os.pwrite(file, data, 0)
        return read_report(file)

    assert read(b"") is None
    assert read(b"{") is None
    assert read(b"[1]") is None
    assert read(b'{"message": 3}') is None
    recorded = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "T", "timestamp": "1"}}}
    found = read(json.dumps(recorded).encode())
    assert found is not None
    assert (found.summary, found.shown, found.time) == ("ValueError: x", True, None)
    os.close(file)
