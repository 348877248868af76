"""``phalanx timeline``: for which rank the others waited in jobs that ended well, of torch's Gloo too, or hung."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.launch_support import Launcher, launcher, wait_for
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

__all__ = ["hosts", "launcher", "remote"]  # fixtures

PHALANX = """
import time, torch, phalanx
with phalanx.init() as world:
    for step in range(4):
        world.step(step)
        if world.rank == 1:
            time.sleep(0.3)
        world.all_reduce(torch.ones(1000))
    with phalanx.label("evaluation"):
        if world.rank == 0:
            time.sleep(0.6)
            world.send(torch.ones(3), 2)
        if world.rank == 2:
            world.recv(torch.ones(3), 0)
"""
GLOO = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4):
    if dist.get_rank() == 1:
        time.sleep(0.3)
    dist.all_reduce(torch.ones(1000))
work = dist.all_reduce(torch.ones(1000), async_op=True)
dist.barrier()
work.wait()
dist.destroy_process_group()
"""
HANGS = """
import sys, time, pathlib, torch, phalanx
with phalanx.init() as world:
    world.barrier()
    if world.rank == 1:
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
    world.all_reduce(torch.ones(3))
"""


def timeline(*arguments: str, cwd: Path, code: int = 0) -> str:
    """The command, as a user calls it."""
    command = [sys.executable, "-m", "phalanx", "timeline", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def check_trace(trace: Mapping[str, Any]) -> None:
    """Each rank has its lane, and what lies in one thread does not overlap in part."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    for lane in {(event["pid"], event["tid"]) for event in events}:
        ends = [float("inf")]  # of those that have begun
        of_lane = [each for each in events if (each["pid"], each["tid"]) == lane]
        for each in sorted(of_lane, key=lambda each: (each["ts"], -each["dur"])):
            while ends[-1] <= each["ts"] + 1e-3:
                ends.pop()
            assert each["ts"] + each["dur"] <= ends[-1] + 1e-3
            ends.append(each["ts"] + each["dur"])
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {"rank 0", "rank 1", "rank 2"}


def test_the_slow_rank_is_named_and_drawn(launcher: Launcher) -> None:
    folder = launcher.directory
    scripts = [launcher.script(text, f"{name}.py") for name, text in (("own", PHALANX), ("torchs", GLOO))]
    begun = folder / "begun"
    hung = launcher.start("-n", "2", "-q", "--log-dir", "hung", launcher.script(HANGS, "hangs.py"), str(begun))
    for script, logs in zip(scripts, ("own", "torchs"), strict=True):
        outcome = launcher.run("-n", "3", "-q", "--log-dir", logs, script)
        assert (outcome.code, outcome.err_text) == (0, "")
    for logs in ("own", "torchs"):
        said = timeline(logs, "--trace", "trace.json", "--svg", "lanes.svg", "--html", "page.html", cwd=folder)
        assert "rank 1 was waited for most: 1." in said
        assert "  rank 1 was waited for 3" in said
        assert f"in all_reduce #2 at {logs}.py:" in said
        found = json.loads(timeline(logs, "--json", cwd=folder))
        computes = {rank["rank"]: rank["computes"] for rank in found["ranks"]}
        assert computes[1] == max(computes.values())
        assert all(0.99 < rank["computes"] + rank["communicates"] + rank["waits"] < 1.01 for rank in found["ranks"])
        of_second = next(wait for wait in found["waits"] if wait["operation"] == "all_reduce #2")
        assert (of_second["awaited"], of_second["waiting"]) == (1, [0, 2])
        assert 0.2 < of_second["wait_s"] < 3
        check_trace(json.loads((folder / "trace.json").read_text()))
        svg = ElementTree.parse(folder / "lanes.svg").getroot()
        words = " ".join(each for each in svg.itertext())
        assert "rank 1: computes" in words
        assert "prefers-color-scheme: dark" in words
        assert "The longest waits" in (folder / "page.html").read_text()
    assert "in step 1" in timeline("own", cwd=folder)
    (message,) = [wait for wait in json.loads(timeline("own", "--json", cwd=folder))["waits"] if wait["awaited"] == 0]
    assert message["operation"] == "recv from rank 0"
    assert (message["waiting"], message["label"], message["step"]) == ([2], "evaluation", 3)
    assert timeline("own", "--svg", "-", cwd=folder).startswith("<svg ")

    wait_for(begun.exists)
    hung.process.terminate()
    assert hung.finish().code == 143
    waits = json.loads(timeline("hung", "--json", cwd=folder))["waits"]
    assert [(wait["awaited"], wait["waiting"]) for wait in waits if "reduce" in wait["operation"]] == [(1, [0])]


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_ranks_of_other_hosts_leave_their_last_operations(remote: RemoteLauncher) -> None:
    job = remote.run("-q", "-H", "h0:2,h1:1", "--log-dir", "logs", remote.script(PHALANX))
    assert job.process.returncode == 0, job.said()
    found = json.loads(timeline("logs", "--json", cwd=remote.folder))
    assert [rank["host"] for rank in found["ranks"]] == ["h0", "h0", "h1"]
    of_second = next(wait for wait in found["waits"] if wait["operation"] == "all_reduce #2")
    assert (of_second["awaited"], of_second["waiting"]) == (1, [0, 2])


@pytest.mark.parametrize("text", ["", "{}", '{"version": 2, "ranks": [[]]}'])
def test_what_is_not_a_recording_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    assert "logs has no operations. phalanx run --log-dir logs" in timeline("logs", cwd=tmp_path, code=2)
    (logs / "operations.json").write_text(text)
    said = timeline("logs", cwd=tmp_path, code=2)
    assert said.count("\n") == 1
    assert said.startswith("phalanx: logs cannot be read: ")
