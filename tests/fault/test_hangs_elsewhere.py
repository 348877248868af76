"""Jobs on several hosts that hang: the line and the report name the rank and its host, wherever it is.

The line of the script is found by the comment ``# HERE``, so that no test counts lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import PATIENCE_S, RemoteJob, RemoteLauncher, reachable_hosts, remote

__all__ = ["remote"]

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

FRAME = """\
import os, pathlib, signal, time
import torch
import torch.distributed as dist
import phalanx

world = phalanx.init()
rank, size, x = world.rank, world.world_size, torch.ones(4)
halves = [dist.new_group([0, 1]), dist.new_group(list(range(2, size)))] if size > 2 else []
for step in range(2):
    world.step(step)
    world.all_reduce(x)
folder = pathlib.Path(__file__).parent
(folder / f"up-{rank}").touch()
while len([*folder.glob("up-*")]) < size:  # one that is not as far as this would be taken for one that hangs
    time.sleep(0.01)
"""
QUICKLY = ("--warn-after", "0.8", "--report-after", "2")
_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def with_places(script: str, pattern: str) -> str:
    """The pattern with the places of the comments."""
    for number, line in enumerate(script.splitlines(), 1):
        mark = line.rpartition("# ")[2]
        if mark in ("HERE", "WAIT"):
            pattern = re.sub(rf"\b{mark}\b", rf"script\\.py:{number}", pattern)
    return pattern


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("hang-*.json"))]


def until(found: Any, job: RemoteJob) -> None:
    end = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < end, job.said()
        assert job.process.poll() is None, job.said()
        time.sleep(0.02)


def interrupt(job: RemoteJob) -> None:
    job.process.send_signal(signal.SIGINT)
    job.finish()


def reported(remote: RemoteLauncher, where: str, body: str, pattern: str, branch: str = "") -> dict[str, Any]:
    """Run a job until there is a report with this verdict, in which every rank says where it is; end it.

    On a busy machine there may be one before, for which a rank was late.

    Args:
        remote, where, body: what to run.
        pattern: the verdict.
        branch: the line of the script that is to be looked at; empty if none is.
    """
    script = FRAME + body + "time.sleep(600)\n"
    folder = remote.folder / "reports"
    expected = with_places(script, pattern)
    path = remote.script(script)
    job = remote.start("-H", where, *QUICKLY, "--report-dir", str(folder), path)

    def found() -> list[dict[str, Any]]:
        return [one for one in reports(folder) if says_all(one) and re.fullmatch(expected, one["verdict"])]

    until(found, job)
    report = found()[0]
    advice = f"; look at the `if` in line {script.splitlines().index(branch) + 1}" if branch else ""
    # On a busy machine the first line may name one more that is late; the next one comes after the report.
    until(lambda: re.search(rf"phalanx: {expected}, for \d+ s now{advice}\n", job.err), job)
    interrupt(job)
    return report


def says_all(report: dict[str, Any]) -> bool:
    """Whether every rank has said where it is, or is stopped."""
    return all(not rank["silent"] and (rank["stack"] or rank["state"] in ("T", "t")) for rank in report["ranks"])


@pytest.mark.parametrize(
    ("where", "others"),
    [
        pytest.param("h0:1,h1:1", "rank 0 waits", marks=pytest.mark.long),
        ("h0:1,h1:2", "ranks 0-1 wait"),
        ("h0:2,h1:2", "ranks 0-2 wait"),
        pytest.param("h0:1,h1:2,h2:2", "ranks 0-3 wait", marks=pytest.mark.long),
    ],
)
def test_a_rank_of_another_host_is_named_with_its_line(remote: RemoteLauncher, where: str, others: str) -> None:
    body = "if rank == size - 1:\n    time.sleep(600)  # HERE\nworld.all_reduce(x)  # WAIT\n"
    slots = [(part.split(":")[0], int(part.split(":")[1])) for part in where.split(",")]
    placed = [host for host, count in slots for _ in range(count)]
    pattern = (
        rf"rank {len(placed) - 1} on {placed[-1]} is at HERE .*, in no operation; "
        rf"{others} for it in all_reduce #\d+ at WAIT"
    )
    report = reported(remote, where, body, pattern, "if rank == size - 1:")
    assert [rank["host"] for rank in report["ranks"]] == placed
    for rank in report["ranks"]:
        assert rank["stack"], rank["rank"]
        last = dict(zip(rank["recording"]["fields"], rank["recording"]["records"][-1], strict=True))
        assert last["kind"] == "all_reduce"
        waits = rank["rank"] != len(placed) - 1
        assert (last["left_ns"] == 0) == waits
        # Times of other hosts are put on this one's clock: the wait began before the report and not long before it.
        assert not waits or 0 <= report["now_ns"] - last["entered_ns"] <= PATIENCE_S * 1e9
    shown = subprocess.run(
        [sys.executable, "-m", "phalanx", "report", str(remote.folder / "reports")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert f"rank {len(placed) - 1} on {placed[-1]} is at".casefold() in shown.stdout.casefold()


def test_a_rank_of_another_host_that_is_stopped_is_named(remote: RemoteLauncher) -> None:
    body = "if rank == 2:\n    os.kill(os.getpid(), signal.SIGSTOP)\nworld.all_reduce(x)  # WAIT\n"
    stopped = r"rank 2 on h1 is stopped \(state T\), after all_reduce #\d+ at \S+"
    reported(remote, "h0:2,h1:2", body, stopped + r"; ranks 0-1, 3 wait for it in all_reduce #\d+ at WAIT")


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Hold a process as a debugger does: unlike one that is stopped, it does not go on when a message comes."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(_PTRACE_ATTACH, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(pid, 0x40000000)  # __WALL
    try:
        yield
    finally:
        libc.ptrace(_PTRACE_DETACH, pid, None, None)


def test_a_host_that_does_not_answer_is_named_and_delays_no_report(remote: RemoteLauncher) -> None:
    folder = remote.folder / "reports"
    go = remote.folder / "go"
    path = remote.script(
        FRAME
        + f"""
print("ready", flush=True)
while not os.path.exists({str(go)!r}):
    time.sleep(0.05)
if rank == 0:
    time.sleep(600)  # HERE
world.all_reduce(x)  # WAIT
"""
    )
    options = ("--warn-after", "1.5", "--report-after", "1.5", "--report-dir", str(folder))
    job = remote.start("-H", "h0:2,h1:1", *options, path)
    job.wait_for_lines(3, "ready")
    with held(remote.wait_for_process(1, "phalanx-agent")):
        go.touch()
        until(lambda: any("out of sight" in report["verdict"] for report in reports(folder)), job)
    report = next(report for report in reports(folder) if "out of sight" in report["verdict"])
    assert "rank 2 on h1 is out of sight: the host does not answer" in report["verdict"]
    assert report["waiting"] == [1]
    assert [rank["silent"] for rank in report["ranks"]] == [False, False, True]
    interrupt(job)


def test_a_rank_that_goes_on_elsewhere_keeps_the_report_back(remote: RemoteLauncher) -> None:
    folder = remote.folder / "reports"
    path = remote.script(
        FRAME
        + """
if rank >= 2:
    while True:
        time.sleep(0.05)
        dist.all_reduce(x, group=halves[1])
world.all_reduce(x)
"""
    )
    job = remote.start(
        "-H", "h0:2,h1:2", "--warn-after", "1.5", "--report-after", "5", "--report-dir", str(folder), path
    )
    # The second line comes after four times as long, when a report would have been due.
    # Either of ranks 2 and 3 may just wait for the other, and so stand among those that wait.
    until(lambda: len(re.findall(r"ranks 0.* wait for \w+ in all_reduce", job.err)) >= 2, job)
    interrupt(job)
    assert list(folder.iterdir()) == []
