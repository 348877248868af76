"""Jobs that hang: the line and the report name the rank that keeps the others, its place, and the branch to look at.

One job goes through many hangs, and goes on after each when the test says so, by a file in its folder. Lines of the
scripts are known by the comment at their end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.launch_support import Launcher, launcher, wait_for
from tests.support.faults import BEGIN
from tests.support.golden import Job
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

from phalanx.commands.report import report
from phalanx.system.processes import state_of

__all__ = ["hosts", "launcher", "remote"]  # fixtures

WATCHED = "-q --warn-after 0.4 --report-after 0.8"
JOINS = (
    BEGIN
    + """
import ctypes
import phalanx

all_come_to("up")
if rank == 2:  # branch of join
    wait_for("join")
"""
)


class Hanging(Job):
    """A job that writes reports."""

    def __init__(self, launcher: Launcher | RemoteLauncher, text: str, *arguments: str, options: str = "") -> None:
        self.reports_in = (launcher.directory if isinstance(launcher, Launcher) else launcher.folder) / "reports"
        options = f"{WATCHED} --report-dir {self.reports_in} {options}"
        super().__init__(launcher, text, *arguments, options=options)

    def reports(self) -> list[dict[str, Any]]:
        files = sorted(self.reports_in.glob("hang-*.json"), key=lambda path: int(path.stem.split("-")[1]))
        return [json.loads(path.read_text()) for path in files]

    def await_hang(self, verdict: str, branch: str = "") -> dict[str, Any]:
        """Wait until a line and a report say this; the report, in which every rank that can has said where it is.

        Where ``branch`` is a mark, both say that this statement is to be looked at.
        """
        for mark in re.findall(r"<(.*?)>", verdict):
            verdict = verdict.replace(f"<{mark}>", self.at(mark))
        hint = f"the `if` in line {self.known()[f'line {branch}']}" if branch else ""

        def found() -> list[dict[str, Any]]:
            return [one for one in self.reports() if re.fullmatch(verdict, one["verdict"]) and one["hint"] == hint]

        def complaint() -> str:
            return f"{verdict}\nis not in\n{[one['verdict'] for one in self.reports()]}\n{self.said()}"

        wait_for(lambda: any(map(says_all, found())) or self.process.poll() is not None, complaint=complaint)
        assert found(), complaint()
        self.await_said(rf"^phalanx: {verdict}, for \d+ s now{f'; look at {hint}' if hint else ''}$")
        return next(filter(says_all, found()))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.end()


def says_all(found: dict[str, Any]) -> bool:
    """Whether every rank has said where it is, is stopped, or cannot be reached."""
    return all(rank["silent"] or rank["stack"] or rank["state"] in ("T", "t") for rank in found["ranks"])


SCRIPT = (
    JOINS
    + """
world = phalanx.init()  # join
x, pairs = torch.ones(4), [dist.new_group([0, 1]), dist.new_group([1, 2])]
everybody = dist.new_group()
os.rmdir("build") if rank == 1 else None  # in which the job was started
for step in range(2):
    world.step(step)
    world.all_reduce(x)  # last

with phalanx.label("evaluation"):
    if rank == 1:  # branch
        wait_for("computed")
    world.all_reduce(x)  # call

if rank == 0:  # branch of C
    ctypes.PyDLL(None).system(f"until test -e {folder}/held; do sleep 0.05; done".encode())  # holds
world.all_reduce(x)  # after C

all_come_to("chain")
if rank == 2:  # chain
    wait_for("chained")
if rank:
    dist.all_reduce(x, group=pairs[1])  # second
if rank < 2:
    dist.all_reduce(x, group=pairs[0])  # first

all_come_to("message")
if rank == 2:
    wait_for("sent")
    dist.send(x, 0)
elif rank == 0:
    dist.recv(x, 2)  # receives

all_come_to("swap")
if rank == 0:  # branch of swap
    dist.all_reduce(x, group=pairs[0])  # of pair
else:
    dist.all_reduce(x, group=everybody)  # of all
"""
)
# In wait_for(), with the line's text.
PLACE = r"(<looks>|<sleeps>) .*"


def test_each_way_to_hang_is_named_with_rank_line_and_branch(launcher: Launcher) -> None:
    (launcher.directory / "build").mkdir()
    text = SCRIPT.replace('"build"', repr(str(launcher.directory / "build")))
    job = Hanging(launcher, text)
    joins = "ranks 0-1 wait for it in init at <join>"
    job.await_hang(rf"rank 2 is at {PLACE}, in no operation yet; {joins}", "branch of join")
    job.go("join")
    found = job.await_hang(
        rf"rank 1 is at {PLACE}, in no operation; ranks 0, 2 wait for it in all_reduce #\d+ at <call>", "branch"
    )
    check_evidence(job, found)
    job.go("computed")
    job.await_hang(
        r"rank 0 is at <holds> .*, in no operation; ranks 1-2 wait for it in all_reduce #\d+ at <after C>",
        "branch of C",
    )
    job.go("held")
    waits = r"all_reduce #1 of group '\S+' at <first> and all_reduce #1 of group '\S+' at <second>"
    job.await_hang(rf"rank 2 is at {PLACE}, in no operation; ranks 0-1 wait for it in {waits}", "chain")
    job.go("chained")
    job.await_hang(rf"rank 2 is at {PLACE}, in no operation; rank 0 waits for it in recv from rank 2 at <receives>")
    job.go("sent")
    circle = [
        rf"rank {rank} is in all_reduce #\d of group '\S+' at <of {which}>" for rank, which in ((0, "pair"), (1, "all"))
    ]
    job.await_hang(f"ranks 0-1 wait for each other: {', '.join(circle)}", "branch of swap")
    said = job.said()
    job.interrupt()
    assert "Traceback" not in said, said


def check_evidence(job: Hanging, found: dict[str, Any]) -> None:
    """Of the report on rank 1: for programs, for people, and as a page."""
    assert (found["awaited"], found["waiting"]) == ([1], [0, 2])
    run = CliRunner().invoke
    text = run(report, [str(job.reports_in)]).stdout
    assert re.match(
        r"Rank 1 is at script\.py:\d+ .*, in no operation; ranks 0, 2 .*; look at the `if` in line \d+\.", text
    )
    for part in ('in step 1, "evaluation", for', "in wait_for", "rank 1 is at", "ranks 0, 2 are at"):
        assert part in text, text
    assert json.loads(run(report, [str(job.reports_in), "--json"]).stdout)["awaited"] == [1]
    page = run(report, [str(job.reports_in), "--html", "-"]).stdout
    assert re.search(r"<h1>Rank 1 is at .*look at the <code>if</code> in line \d+\.</h1>", page)
    assert len(list((job.reports_in / f"{newest(job).stem}-torch").iterdir())) == 3


def newest(job: Hanging) -> Path:
    return max(job.reports_in.glob("hang-*.json"), key=lambda path: int(path.stem.split("-")[1]))


OVER_GLOO = (
    JOINS
    + """
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")  # which torch makes with DDP
dist.init_process_group("gloo")  # join
x = torch.ones(4)
works = [dist.all_reduce(x, async_op=True) for _ in range(3)]  # nobody waits for these, and they keep no rank
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(3):
    model(torch.ones(2, 8)).sum().backward()

all_come_to("begun")
if rank == 2:  # branch of work
    wait_for("work")
dist.all_reduce(x, async_op=True).wait()  # work

if rank == 2:  # branch of backward
    wait_for("backward")
model(torch.ones(2, 8)).sum().backward()  # backward

if rank == 0:  # branch of next
    wait_for("next")
dist.broadcast(x, 0)  # next

all_come_to("message")
if rank == 1:
    wait_for("sent")
    dist.send(x, 0)
elif rank == 0:
    dist.irecv(x, 1).wait()  # receives

all_come_to("differ")
if rank == 1:
    dist.broadcast(x, 0)  # odd
else:
    dist.all_reduce(x)  # usual
"""
)


@pytest.mark.long
def test_each_way_to_hang_over_gloo_is_named_too(launcher: Launcher) -> None:
    job = Hanging(launcher, OVER_GLOO)
    joins = "ranks 0-1 wait for it in init at <join>"
    job.await_hang(rf"rank 2 is at {PLACE}, in no operation yet; {joins}", "branch of join")
    job.go("join")
    for call, mark in (("all_reduce", "work"), ("all_reduce", "backward")):
        waits = rf"ranks 0-1 wait for it in {call} #\d+ at <{mark}>"
        found = job.await_hang(rf"rank 2 is at {PLACE}, in no operation; {waits}", f"branch of {mark}")
        if mark == "backward":  # a call of C++
            recording = found["ranks"][0]["recording"]
            assert recording["records"][-1][recording["fields"].index("nbytes")] == 288
        job.go(mark)
    job.await_hang(
        rf"rank 0 is at {PLACE}, in no operation; ranks 1-2 wait for it in broadcast #\d+ at <next>", "branch of next"
    )
    job.go("next")
    job.await_hang(rf"rank 1 is at {PLACE}, in no operation; rank 0 waits for it in recv from rank 1 at <receives>")
    job.go("sent")
    job.await_said(
        r"^phalanx: .* wait.*, for \d+ s now.*\n  the ranks called different operations:\n"
        rf"    ranks 0, 2: all_reduce #\d+ \(float32, 16 B, sum\) at {job.at('usual')}\n"
        rf"    rank 1: broadcast #\d+ \(float32, 16 B, src=0\) at {job.at('odd')}$"
    )
    job.interrupt()


ELSEWHERE = (
    BEGIN
    + """
import phalanx

world = phalanx.init()
x = torch.ones(4)
for step in range(2):
    world.all_reduce(x)  # last
all_come_to("up")
if rank == 2:  # branch
    wait_for("computed")
world.all_reduce(x)  # call
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
world.all_reduce(x)  # next
all_come_to("on")
wait_for("held")
if rank == 0:
    wait_for("never")
world.all_reduce(x)  # end
"""
)


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Hold a process as a debugger does: unlike one that is stopped, it does not go on when a message comes."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(16, pid, None, None) == 0, os.strerror(ctypes.get_errno())  # PTRACE_ATTACH
    os.waitpid(pid, 0x40000000)  # __WALL
    try:
        yield
    finally:
        libc.ptrace(17, pid, None, None)  # PTRACE_DETACH


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_a_rank_or_a_host_that_keeps_ranks_of_others_is_named(remote: RemoteLauncher) -> None:
    """A host that does not answer delays no report."""
    job = Hanging(remote, ELSEWHERE, options="-H h0:2,h1:1")
    waits = r"ranks 0-1 wait for it in all_reduce #\d+ at"
    found = job.await_hang(rf"rank 2 on h1 is at {PLACE}, in no operation; {waits} <call>", "branch")
    assert [rank["host"] for rank in found["ranks"]] == ["h0", "h0", "h1"]
    for rank in found["ranks"]:
        last = dict(zip(rank["recording"]["fields"], rank["recording"]["records"][-1], strict=True))
        is_waiting = rank["rank"] != 2
        assert (last["kind"], last["left_ns"] == 0) == ("all_reduce", is_waiting)
        # Times of other hosts are put on this one's clock: the wait began before the report and not long before it.
        assert not is_waiting or 0 <= found["now_ns"] - last["entered_ns"] <= 120e9
    job.go("computed")
    job.await_hang(rf"rank 2 on h1 is stopped \(state T\), after all_reduce #\d+ at <call>; {waits} <next>")
    (pid,) = (pid for pid in remote.hosts.processes(1) if state_of(pid) == "T")
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: all((job.folder / f"on-{rank}").exists() for rank in range(3)), complaint=job.said)
    with held(remote.wait_for_process(1, "phalanx-agent")):
        job.go("held")

        def silent() -> list[dict[str, Any]]:
            return [one for one in job.reports() if "out of sight" in one["verdict"]]

        wait_for(silent, complaint=job.said)
    (found, *_) = silent()
    assert "rank 2 on h1 is out of sight: the host does not answer" in found["verdict"]
    assert [rank["silent"] for rank in found["ranks"]] == [False, False, True]
    job.interrupt()
