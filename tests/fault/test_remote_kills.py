"""Deaths in a job on two hosts, at random moments: the right one is named, and nothing is left on any host."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.launch_support import comm
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, reachable_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

VICTIMS = ("rank", "agent", "host", "head", "link")
PHASES = ("starting", "importing", "running", "ending")
CASES = list(itertools.product(VICTIMS, PHASES))
CLEAN_S = 30.0  # in which the hosts must be clean: 10 s suffice where nobody can tell them, and the machine is idle
AT_ONCE = 4  # jobs at a time, each on two hosts of its own: most of a case is waiting
SCRIPT = """
    import os, subprocess, sys, time
    child = subprocess.Popen(["sleep", "600"])  # it must not outlive its rank
    print("ready", flush=True)
    if "ending" in sys.argv:
        sys.exit()
    time.sleep(600)
"""


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


@pytest.mark.parametrize(
    "seed",
    [pytest.param(15, marks=pytest.mark.long), *(pytest.param(seed, marks=pytest.mark.fault) for seed in range(10))],
)
def test_death_of_each_kind_in_each_phase(pairs: list[RemoteLauncher], seed: int) -> None:
    """All cases in a random order, shared out to the pairs of hosts."""
    cases = random.Random(seed).sample(CASES, len(CASES))

    def share(number: int) -> None:
        chance = random.Random(seed * AT_ONCE + number)
        for victim, phase in cases[number::AT_ONCE]:
            one_death(pairs[number], victim, phase, chance)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for done in [threads.submit(share, number) for number in range(AT_ONCE)]:
            done.result()


@dataclass
class Death:
    """Who dies and when; whether the first host is the head's own; and the victim's host, 0 or 1, never that one."""

    victim: str
    phase: str
    here: bool
    lost: int

    @property
    def rank(self) -> int:
        return 2 * self.lost + 1


def one_death(remote: RemoteLauncher, victim: str, phase: str, chance: random.Random) -> None:
    """Start a job, wait for the phase and a moment more, kill the victim, and look at what follows.

    The phases: its host has a process of the job; a zygote imports torch; all ranks run; the first is about to end.
    """
    here = chance.random() < 0.4
    death = Death(victim, phase, here, 1 if here else chance.randrange(2))
    first, second = (f"h{host}" for host in remote.own)
    script = remote.script(SCRIPT)
    # Without the import of torch all phases but the one named after it are short.
    options = ["-q"] if phase == "importing" else ["-q", "--no-preload"]
    job = remote.start(*options, "-H", f"{'localhost' if death.here else first}:2,{second}:2", script, phase)
    reach(job, remote, death)
    time.sleep(chance.uniform(0.0, {"starting": 0.3, "importing": 0.3, "running": 0.1, "ending": 0.02}[phase]))
    killed = kill(job, remote, death)
    began = time.monotonic()
    if not killed and phase != "ending":
        job.process.send_signal(signal.SIGINT)  # there was no such process, and nothing else would end the job
    job.finish()
    ended_s = time.monotonic() - began
    took_s = remote.check(CLEAN_S)
    case = f"{death}: killed {killed or 'nothing'}; {ended_s:.1f} s until the end, {took_s:.1f} s more until clean"
    judge(job, death, killed, (first, second)[death.lost], f"{case}\n{job.said()}")
    remote.hosts.mend(remote.own[death.lost])
    print(f"{case}; exit code {job.process.returncode}")


def reach(job: RemoteJob, remote: RemoteLauncher, death: Death) -> None:
    if death.phase == "running":
        job.wait_for_lines(4, "ready")
    elif death.phase == "ending":
        job.wait_for_lines(1, "ready")
    else:
        until, host = time.monotonic() + 60, remote.own[death.lost]
        importing = death.phase == "importing"
        while not (named(remote, host, "phalanx-zygote") if importing else remote.hosts.processes(host)):
            assert time.monotonic() < until, job.said()
            assert job.process.poll() is None, job.said()
            time.sleep(0.005)


def kill(job: RemoteJob, remote: RemoteLauncher, death: Death) -> str:
    """Kill it; what that was, or nothing if there is no such process (yet, or any more)."""
    victim, phase, host = death.victim, death.phase, remote.own[death.lost]
    if victim == "link":
        remote.hosts.cut(host)
        return "link"
    if victim == "head":
        victims = [job.process.pid]  # the words before it have become it by exec
    elif victim == "host":
        remote.hosts.cut(host)  # what is switched off says nothing
        remote.hosts.kill_all(host)
        return "host"
    elif phase == "starting":
        # Neither has its name yet: the starter's processes, or the program that will be the agent.
        victims = remote.hosts.processes(host)
    elif victim == "agent":
        victims = named(remote, host, "phalanx-agent")
    else:
        # Before there is a rank, there is the process from which it will be forked.
        victims = named(remote, host, f"rank-{death.rank}")
        if not victims and phase == "importing":
            victims = named(remote, host, "phalanx-zygote")
    killed = ""
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed = victim
    return killed


def named(remote: RemoteLauncher, host: int, name: str) -> list[int]:
    return [pid for pid in remote.hosts.processes(host) if comm(pid) == name]


def judge(job: RemoteJob, death: Death, killed: str, host: str, case: str) -> None:
    code, phase = job.process.returncode, death.phase
    if death.victim == "head":
        assert code == -signal.SIGKILL or (phase == "ending" and code == 0), case
        return
    if phase == "ending" and code == 0:
        return  # it came too late
    if not killed:
        assert phase == "ending" or code == 130, case
        return
    assert "Traceback" not in job.err, case
    assert host in job.err, case
    if death.victim == "rank" and phase in ("running", "ending"):
        assert code == 137, case
        assert f"rank {death.rank} of 4 failed" in job.err, case
        assert f"host {host}" in job.err, case
    elif death.victim == "rank" and phase == "importing":
        assert code == 137, case
    else:
        # At the start, the agent is one of several processes that are killed; it may report another one's end first.
        assert code == 1 or (phase == "starting" and code == 137), case
    if death.victim != "rank" and phase in ("importing", "running"):
        assert f"failed: host {host} is lost" in job.err, case
