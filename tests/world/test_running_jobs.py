"""``phalanx list`` and ``phalanx top``: which jobs run, and how their ranks are getting on, seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher, wait_for
from tests.support.golden import Job
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote
from tests.support.strangers import as_another_user
from tests.support.waiting import stop

from phalanx.launch.running.jobs import running_jobs

__all__ = ["hosts", "launcher", "remote"]  # fixtures

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, phalanx

world, folder = phalanx.init(), Path(sys.argv[1])
attempt = world.attempt

def wait_for(name):
    while not (folder / name).exists():
        sum(range(1000))

(folder / f"pid-{world.rank}").write_text(str(os.getpid()))
for step in range(3):
    world.step(step)
    world.all_reduce(torch.ones(256))
if attempt:
    (folder / f"again-{world.rank}").touch()
    wait_for("never")
if world.rank == world.world_size - 1:
    wait_for("over")
    os.kill(os.getpid(), signal.SIGKILL)
with phalanx.label("evaluation"):
    world.all_reduce(torch.ones(256))  # waits
"""
STATES = ["waits", "waits", "computes"]


def phalanx(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The command, as a user calls it."""
    command = [sys.executable, "-m", "phalanx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=300)


def asked(run_id: str) -> bytes:
    """What the launcher answers this process."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(ConnectionError):
        client.connect(f"\0{run_id}-look")
        client.sendall(b'{"do": "look"}\n')
        return client.recv(100)
    return b""


def each(shown: dict[str, Any], name: str) -> list[Any]:
    return [rank[name] for rank in shown["ranks"]]


class Top:
    """``phalanx top`` that runs on, and prints what it sees."""

    def __init__(self, job: Job, *options: str, within: Sequence[str] = ()) -> None:
        words = ["top", str(job.process.pid), "--json", "--interval", "0.2", *options]
        command = [*within, sys.executable, "-m", "phalanx", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def until(self, seen: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first look at which this is seen."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            shown: dict[str, Any] = json.loads(line)
            if seen(shown):
                return shown
        pytest.fail("it has ended")

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it wrote on standard error."""
        _, err = self.process.communicate(timeout=300)
        return self.process.returncode, err


def check_ranks(shown: dict[str, Any], job: Job) -> None:
    """Ranks 0 and 1 wait for rank 2, which computes."""
    for rank in shown["ranks"][:2]:
        operation = rank["operation"]
        assert (operation["kind"], operation["in_group"], operation["nbytes"]) == ("all_reduce", 4, 1024)
        assert re.fullmatch(job.at("waits"), operation["site"])
        assert 0 < operation["for_s"] < 300  # by this host's clock
        assert (rank["label"], rank["lag"]) == ("evaluation", 0)
    last = shown["ranks"][2]
    assert (last["operation"], last["last"]["kind"], last["lag"]) == (None, "all_reduce", 1)
    assert last["cores"] > 0
    assert each(shown, "rank") == [0, 1, 2]
    assert each(shown, "step") == [2] * 3
    assert all(size > 1 << 20 for size in each(shown, "resident_bytes"))


def test_a_job_is_listed_and_shown_and_followed_to_its_end(launcher: Launcher) -> None:
    """While ranks wait, when one is stopped, in the next attempt, and when the launcher is killed."""
    job = Job(launcher, SCRIPT, options="-q --restarts 1")
    wait_for((job.folder / "pid-2").exists, complaint=job.said)
    top = Top(job)
    shown = top.until(lambda shown: each(shown, "state") == STATES and each(shown, "communication") == [1.0, 1.0, 0.0])
    (listed,) = (one for one in json.loads(phalanx("list", "--json").stdout) if one["pid"] == job.process.pid)
    assert (listed["ranks"], listed["target"], listed["arguments"]) == (3, job.script, [str(job.folder)])
    assert (listed["directory"], listed["pids"]) == (str(job.folder), [job.pid(rank) for rank in range(3)])
    assert listed["run_id"].endswith(listed["id"])
    line = next(line for line in phalanx("list").stdout.splitlines() if listed["id"] in line)
    assert str(job.process.pid) in line.split()
    assert f"{job.script} {job.folder}" in line
    if os.geteuid() == 0:
        assert as_another_user(lambda: (running_jobs(), asked(listed["run_id"]))) == ([], b"")

    check_ranks(shown, job)
    assert (each(shown, "pid"), shown["elsewhere"]) == (listed["pids"], {})
    table = phalanx("top", listed["id"][:8], "--once").stdout.splitlines()
    assert re.search(rf"all_reduce #4 at {job.at('waits')}, for rank 2", table[2])
    assert "computes" in table[4]
    assert "after all_reduce" in table[4]
    stop(job.pid(0))
    shown = top.until(lambda shown: each(shown, "state")[0] == "stopped" and each(shown, "cores")[0] == 0.0)
    os.kill(job.pid(0), signal.SIGCONT)
    assert shown["ranks"][0]["operation"]["kind"] == "all_reduce"
    stop(job.process.pid)
    shown = top.until(lambda shown: not shown["ranks"])
    os.kill(job.process.pid, signal.SIGCONT)
    assert f"the launcher (pid {job.process.pid}) is stopped" in shown["notes"][0]
    top.until(lambda shown: each(shown, "state") == STATES)

    job.go("over")
    wait_for(lambda: all((job.folder / f"again-{rank}").exists() for rank in range(3)), complaint=job.said)
    again = top.until(lambda shown: len(shown["ranks"]) == 3 and not {*each(shown, "pid")} & {*listed["pids"]})
    assert each(again, "pid") == [job.pid(rank) for rank in range(3)]
    os.kill(job.process.pid, signal.SIGKILL)
    job.end()
    code, err = top.end()
    assert (code, err.endswith("has ended\n")) == (0, True)
    assert job.process.pid not in [one["pid"] for one in json.loads(phalanx("list", "--json").stdout)]
    gone = phalanx("top", listed["id"], check=False)
    assert (gone.returncode, f"no job {listed['id']}" in gone.stderr) == (2, True)


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_ranks_of_all_hosts_are_shown(remote: RemoteLauncher) -> None:
    job = Job(remote, SCRIPT.replace("os.kill(os.getpid(), signal.SIGKILL)", "pass"), options="-q -H h0:1,h1:2")
    wait_for((job.folder / "pid-2").exists, complaint=job.said)
    before = {pid for host in (0, 1) for pid in remote.hosts.processes(host)}
    own = remote.hosts.outside({})  # the launcher's network, in which its socket is
    top = Top(job, within=own)
    shown = top.until(lambda shown: each(shown, "state") == STATES and None not in each(shown, "cores"))
    check_ranks(shown, job)
    assert (each(shown, "host"), shown["elsewhere"]) == (["h0", "h1", "h1"], {})

    # From another host, which is this one, as for ssh to the own name: a helper must see what is seen directly.
    starter = remote.script("import os, sys\nos.execvp(sys.argv[2], sys.argv[2:])\n", "starter.py")
    same = Top(job, "--once", "-H", "login1", "--starter", f"{sys.executable} {starter}", within=own).until(bool)
    assert [each(same, name) for name in ("pid", "host", "lag")] == [
        each(shown, name) for name in ("pid", "host", "lag")
    ]
    assert {pid for host in (0, 1) for pid in remote.hosts.processes(host)} == before
    stopped = remote.wait_for_process(1, "rank-1")
    os.kill(stopped, signal.SIGSTOP)
    top.until(lambda shown: len(shown["ranks"]) == 3 and each(shown, "state")[1] == "stopped")
    os.kill(stopped, signal.SIGCONT)
    top.process.send_signal(signal.SIGINT)
    assert top.end() == (0, "")

    job.go("over")
    assert job.end() == 0, job.said()
