"""``phalanx list`` and ``phalanx top``: which jobs run, and how their ranks are getting on, seen from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.launch_support import Launcher, RunningJob, launcher, wait_for
from tests.support.strangers import as_another_user, needs_another_user
from tests.support.waiting import stop

from phalanx.launch.running.jobs import running_jobs

__all__ = ["launcher"]


def phalanx(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The command, as a user calls it."""
    command = [sys.executable, "-m", "phalanx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=300)


def listed(job: RunningJob) -> dict[str, Any]:
    """The job as phalanx list shows it; other tests may have jobs beside it."""
    found = [one for one in json.loads(phalanx("list", "--json").stdout) if one["pid"] == job.pid]
    assert len(found) == 1
    one: dict[str, Any] = found[0]
    return one


def look(job: RunningJob, *options: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(phalanx("top", str(job.pid), "--once", "--json", *options).stdout)
    return shown


def line_of(script: str, mark: str) -> str:
    """Where the comment stands in the script, as ``script.py:7``."""
    path = Path(script)
    return f"{path.name}:{1 + [mark in line for line in path.read_text().splitlines()].index(True)}"


WAITING = """
    import os, sys, time
    import torch, phalanx
    world = phalanx.init()
    x = torch.ones(256)
    for step in range(3):
        world.step(step)
        world.all_reduce(x)
    pair = world.subgroup([0, 1])
    if pair is not None:
        pair.barrier()
    print("ready", flush=True)
    if world.rank == 1:
        while not os.path.exists("over"):
            sum(range(1000))
    with phalanx.label("evaluation"):
        world.all_reduce(x)  # WAIT
    world.barrier()
"""


@contextmanager
def waiting(launcher: Launcher, ranks: int) -> Iterator[tuple[RunningJob, str]]:
    """A job in which rank 1 computes, and the others wait for it."""
    script = launcher.script(WAITING)
    job = launcher.start("-q", "-n", str(ranks), script, "--lr", "0.1")
    assert job.read_lines(ranks) == [f"[rank {rank}] ready" for rank in range(ranks)]
    yield job, script
    (launcher.directory / "over").touch()
    assert job.finish().code == 0


def test_a_job_is_listed_while_it_runs(launcher: Launcher) -> None:
    with waiting(launcher, 3) as (job, script):
        shown = listed(job)
        assert shown["ranks"] == 3
        assert shown["target"] == script
        assert shown["arguments"] == ["--lr", "0.1"]
        assert shown["directory"] == str(launcher.directory)
        assert shown["pids"] == job.ranks()
        assert shown["run_id"].endswith(shown["id"])
        for_people = phalanx("list").stdout
        line = next(line for line in for_people.splitlines() if shown["id"] in line)
        assert str(job.pid) in line.split()
        assert f"{script} --lr 0.1" in line
    assert job.pid not in [one["pid"] for one in json.loads(phalanx("list", "--json").stdout)]
    gone = phalanx("top", shown["id"], check=False)
    assert gone.returncode == 2
    assert f"no job {shown['id']}" in gone.stderr


def test_top_tells_who_computes_and_who_waits_where(launcher: Launcher) -> None:
    with waiting(launcher, 3) as (job, script):
        # Until both have come to the place where they wait.
        expected = ["waits", "computes", "waits"]
        wait_for(lambda: [rank["state"] for rank in look(job, "--interval", "0.3")["ranks"]] == expected)
        shown = look(job)
        assert shown["job"]["pid"] == job.pid
        assert shown["elsewhere"] == {}
        first, second, third = shown["ranks"]
        for rank in (first, third):
            assert rank["operation"]["kind"] == "all_reduce"
            assert rank["operation"]["site"] == line_of(script, "# WAIT")
            assert rank["operation"]["in_group"] == 4
            assert rank["operation"]["nbytes"] == 1024
            assert rank["operation"]["awaits"] == 1
            assert rank["operation"]["for_s"] > 0
            assert rank["label"] == "evaluation"
            assert rank["communication"] == 1.0  # for the whole interval
            assert rank["lag"] == 0
        assert second["operation"] is None
        assert second["last"]["kind"] == "barrier"
        assert second["communication"] == 0.0
        assert second["lag"] == 1
        assert second["cores"] > 0
        assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2]
        assert [rank["pid"] for rank in shown["ranks"]] == job.ranks()
        assert {rank["step"] for rank in shown["ranks"]} == {2}
        assert all(rank["resident_bytes"] > 1 << 20 for rank in shown["ranks"])

        table = phalanx("top", str(job.pid), "--once").stdout.splitlines()
        assert f"all_reduce #4 at {line_of(script, '# WAIT')}, for rank 1" in table[2]
        assert "computes" in table[3]
        assert "after barrier" in table[3]

        stop(job.ranks()[0])
        stopped = look(job)["ranks"][0]
        os.kill(job.ranks()[0], signal.SIGCONT)
        assert (stopped["state"], stopped["operation"]["kind"], stopped["cores"]) == ("stopped", "all_reduce", 0.0)


def test_a_killed_launcher_leaves_no_entry_and_a_restart_is_followed(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, signal, time
        import torch, phalanx
        world = phalanx.init()
        world.all_reduce(torch.ones(256))
        print("ready", flush=True)
        while not os.path.exists("over"):
            time.sleep(0.01)
        if world.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
    """)
    job = launcher.start("-q", "-n", "2", "--restarts", "1", script)
    job.read_lines(2)
    before = [rank["pid"] for rank in look(job)["ranks"]]
    (launcher.directory / "over").touch()
    job.read_lines(2)
    wait_for(lambda: len(look(job)["ranks"]) == 2)
    after = look(job)["ranks"]
    assert not {rank["pid"] for rank in after} & set(before)
    assert [rank["last"]["kind"] for rank in after] == ["all_reduce"] * 2
    os.kill(job.pid, signal.SIGKILL)
    job.finish()
    assert job.pid not in [one["pid"] for one in json.loads(phalanx("list", "--json").stdout)]


def test_top_follows_a_job_to_its_end(launcher: Launcher) -> None:
    with waiting(launcher, 2) as (job, _):
        top = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "top", str(job.pid), "--json", "--interval", "0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert top.stdout is not None
        looks = [json.loads(top.stdout.readline()) for _ in range(3)]
        assert [len(one["ranks"]) for one in looks] == [2, 2, 2]
    _, err = top.communicate(timeout=300)
    assert top.returncode == 0
    assert err.endswith("has ended\n")


WAITS_FOR_INPUT = """
import os
rank = int(os.environ["RANK"])
print("ready", flush=True)
if rank == 1:
    input()
"""
ON_GLOO = f"""
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
{WAITS_FOR_INPUT}
dist.barrier()  # WAIT
dist.destroy_process_group()
"""


def test_a_job_on_a_backend_of_torchs_is_shown_with_its_operations(launcher: Launcher) -> None:
    script = launcher.script(ON_GLOO)
    job = launcher.start("-q", "-n", "2", "--stdin", "1", script, stdin=subprocess.PIPE)
    job.read_lines(2)
    wait_for(lambda: look(job)["ranks"][0]["operation"] is not None)
    shown = look(job)
    outcome, _ = job.process.communicate(b"\n", timeout=300)
    assert job.process.returncode == 0, outcome
    first, second = shown["ranks"]
    assert first["operation"]["kind"] == "barrier"
    assert first["operation"]["site"] == line_of(script, "# WAIT")
    assert second["operation"] is None
    assert [rank["lag"] for rank in shown["ranks"]] == [0, 1]


def test_job_is_named_by_the_beginning_of_its_id(launcher: Launcher) -> None:
    with waiting(launcher, 2) as (job, _):
        name = listed(job)["id"]
        wanted = json.loads(phalanx("top", name[:8], "--once", "--json", "--interval", "0.1").stdout)
        assert wanted["job"]["pid"] == job.pid
        other = launcher.start("-q", "-n", "1", "sleep", "300")
        wait_for(lambda: other.pid in [one.pid for one in running_jobs()])
        for unclear in "", name[:1]:
            unnamed = phalanx("stop", unclear, check=False)
            assert unnamed.returncode == 2
            assert f"{name}  pid {job.pid}" in unnamed.stderr
        several = phalanx("top", "--once", check=False)
        assert several.returncode == 2
        assert "several jobs run here; name one by more of its id" in several.stderr
        assert f"{name}  pid {job.pid}" in several.stderr
        assert f"pid {other.pid}, sleep" in several.stderr
        other.process.terminate()
        other.finish()


@needs_another_user
def test_another_user_sees_no_job(launcher: Launcher) -> None:
    with waiting(launcher, 2):
        assert as_another_user(lambda: running_jobs()) == []
