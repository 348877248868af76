"""Deaths in a job on two hosts, at random moments: the right one is named, and nothing is left on any host."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, reachable_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

VICTIMS = ("rank", "agent", "host", "head", "link")
PHASES = ("starting", "importing", "running", "ending")
CASES = list(itertools.product(VICTIMS, PHASES))
# How long the hosts may take to be clean: 2 s, and 10 s where nobody can tell them; more on a busy machine.
CLEAN_S = 30.0
SCRIPT = """
    import os, subprocess, sys, time
    child = subprocess.Popen(["sleep", "600"])  # it must not outlive its rank
    print("ready", flush=True)
    if "ending" in sys.argv:
        sys.exit()
    time.sleep(600)
"""


# Jobs at a time, each on two hosts of its own: most of a case is waiting.
AT_ONCE = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(2 * AT_ONCE, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def pairs(hosts: TestHosts, tmp_path: Path) -> Iterator[list[RemoteLauncher]]:
    made = []
    for number in range(AT_ONCE):
        folder = tmp_path / f"pair-{number}"
        folder.mkdir()
        made.append(RemoteLauncher(hosts, folder, (2 * number, 2 * number + 1)))
    try:
        yield made
    finally:
        for remote in made:
            remote.clear()


def test_a_death_of_each_kind_in_each_phase(pairs: list[RemoteLauncher]) -> None:
    deaths(pairs, 15)


@pytest.mark.fault
@pytest.mark.parametrize("seed", range(10))
def test_many_deaths(pairs: list[RemoteLauncher], seed: int) -> None:
    deaths(pairs, seed)


def deaths(pairs: list[RemoteLauncher], seed: int) -> None:
    """All cases in a random order, shared out to the pairs of hosts."""
    cases = random.Random(seed).sample(CASES, len(CASES))

    def share(number: int) -> None:
        chance = random.Random(seed * AT_ONCE + number)
        for victim, phase in cases[number::AT_ONCE]:
            one_death(pairs[number], victim, phase, chance)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for done in [threads.submit(share, number) for number in range(AT_ONCE)]:
            done.result()


def one_death(remote: RemoteLauncher, victim: str, phase: str, chance: random.Random) -> None:
    """Start a job, wait for the phase and a moment more, kill the victim on its second host, and look at what follows.

    The phases: that host has a process of the job; a zygote imports torch; all ranks run; the first is about to end.
    """
    first, second = (f"h{host}" for host in remote.own)
    script = remote.script(SCRIPT)
    # Without the import of torch all phases but the one named after it are short.
    options = ["-q"] if phase == "importing" else ["-q", "--no-preload"]
    job = remote.start(*options, "-H", f"{first}:2,{second}:2", script, phase)
    reach(job, remote, phase)
    time.sleep(chance.uniform(0.0, {"starting": 0.3, "importing": 0.3, "running": 0.1, "ending": 0.02}[phase]))
    killed = kill(job, remote, victim, phase)
    if not killed and phase != "ending":
        job.process.send_signal(signal.SIGINT)  # there was no such process, and nothing else would end the job
    code = job.finish()
    took_s = remote.check(CLEAN_S)
    case = f"{victim} while {phase}; exit code {code}, {took_s:.1f} s until clean\n{job.said()}"
    judge(job, victim, phase, killed, second, case)
    remote.hosts.mend(remote.own[1])
    print(f"{victim} {phase}: killed {killed or 'nothing'}, code {code}, clean after {took_s:.2f} s")


def reach(job: RemoteJob, remote: RemoteLauncher, phase: str) -> None:
    if phase == "running":
        job.wait_for_lines(4, "ready")
    elif phase == "ending":
        job.wait_for_lines(1, "ready")
    else:
        until = time.monotonic() + 60
        while not (named(remote, "phalanx-zygote") if phase == "importing" else remote.hosts.processes(remote.own[1])):
            assert time.monotonic() < until, job.said()
            time.sleep(0.005)


def kill(job: RemoteJob, remote: RemoteLauncher, victim: str, phase: str) -> str:
    """Kill it on the second host; what that was, or nothing if there is no such process (yet, or any more)."""
    if victim == "link":
        remote.hosts.cut(remote.own[1])
        return "link"
    if victim == "head":
        victims = [job.process.pid]  # the words before it have become it by exec
    elif victim == "host":
        remote.hosts.cut(remote.own[1])  # what is switched off says nothing
        remote.hosts.kill_all(remote.own[1])
        return "host"
    elif phase == "starting":
        # Neither has its name yet: the starter's processes, or the program that will be the agent.
        victims = remote.hosts.processes(remote.own[1])
    elif victim == "agent":
        victims = named(remote, "phalanx-agent")
    else:
        # Before there is a rank, there is the process from which it will be forked.
        victims = named(remote, "rank-3") or (named(remote, "phalanx-zygote") if phase == "importing" else [])
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            victims = []
    return victim if victims else ""


def named(remote: RemoteLauncher, name: str) -> list[int]:
    found = []
    for pid in remote.hosts.processes(remote.own[1]):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
        except OSError:
            continue
    return found


def judge(job: RemoteJob, victim: str, phase: str, killed: str, host: str, case: str) -> None:
    code = job.process.returncode
    if victim == "head":
        assert code == -signal.SIGKILL or (phase == "ending" and code == 0), case
        return
    if phase == "ending" and code == 0:
        return  # it came too late
    if not killed:
        assert phase == "ending" or code == 130, case
        return
    assert "Traceback" not in job.err, case
    if victim == "rank" and phase in ("running", "ending"):
        assert code == 137, case
        assert "rank 3 of 4 failed" in job.err, case
        assert f"host {host}" in job.err, case
        return
    assert code != 0, case
    assert host in job.err, case
    if phase == "running":
        assert f"failed: host {host} is lost" in job.err, case
