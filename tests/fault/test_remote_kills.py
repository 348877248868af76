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
from pathlib import Path

import pytest
from tests.launch_support import comm, wait_for
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, reachable_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

# A host has a process of the job; a agent imports torch; all ranks run; the first is about to end.
PHASES = {"starting": 0.3, "importing": 0.3, "running": 0.1, "ending": 0.02}  # how much later the death comes at most
CASES = list(itertools.product(("rank", "agent", "host", "head", "link"), PHASES))
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


@pytest.mark.parametrize(
    "seed",
    [pytest.param(15, marks=pytest.mark.long), *(pytest.param(seed, marks=pytest.mark.fault) for seed in range(10))],
)
def test_death_of_each_kind_in_each_phase(hosts: TestHosts, tmp_path: Path, seed: int) -> None:
    """All cases in a random order, shared out to the pairs of hosts."""
    cases = random.Random(seed).sample(CASES, len(CASES))

    def share(number: int) -> None:
        chance = random.Random(seed * AT_ONCE + number)
        folder = tmp_path / f"pair-{number}"
        folder.mkdir()
        remote = RemoteLauncher(hosts, folder, (2 * number, 2 * number + 1))
        try:
            for victim, phase in cases[number::AT_ONCE]:
                one_death(remote, victim, phase, chance)
        finally:
            remote.clear()

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for done in [threads.submit(share, number) for number in range(AT_ONCE)]:
            done.result()


def one_death(remote: RemoteLauncher, victim: str, phase: str, chance: random.Random) -> None:
    """Start a job, wait for the phase and a moment more, kill the victim, and look at what follows.

    By chance the first host is the launcher's own, which is never the one that dies.
    """
    here = chance.random() < 0.4
    lost = 1 if here else chance.randrange(2)
    host, rank = remote.own[lost], 2 * lost + 1
    first, second = ("localhost" if here else f"h{remote.own[0]}"), f"h{remote.own[1]}"
    # Without the import of torch all phases but the one named after it are short.
    options = ["-q"] if phase == "importing" else ["-q", "--no-preload"]
    job = remote.start(*options, "-H", f"{first}:2,{second}:2", remote.script(SCRIPT), phase)
    if phase in ("running", "ending"):
        job.wait_for_lines(4 if phase == "running" else 1, "ready")
    else:
        importing = phase == "importing"
        wait_for(lambda: named(remote, host, "phalanx-agent") if importing else remote.hosts.processes(host))
    time.sleep(chance.uniform(0.0, PHASES[phase]))
    killed = kill(job, remote, victim, phase, host, rank)
    if not killed and phase != "ending":
        job.process.send_signal(signal.SIGINT)  # there was no such process, and nothing else would end the job
    job.finish()
    took_s = remote.check(CLEAN_S)
    case = f"{victim} (rank {rank}) while {phase}: killed {killed}; {took_s:.1f} s until clean\n{job.said()}"
    judge(job, victim if killed else "", phase, f"h{host}", rank, case)
    remote.hosts.mend(host)


def named(remote: RemoteLauncher, host: int, name: str) -> list[int]:
    return [pid for pid in remote.hosts.processes(host) if comm(pid) == name]


def kill(job: RemoteJob, remote: RemoteLauncher, victim: str, phase: str, host: int, rank: int) -> bool:
    """Kill it; whether there was such a process (not yet, or not any more)."""
    if victim in ("link", "host"):
        remote.hosts.cut(host)  # what is switched off says nothing
        if victim == "host":
            remote.hosts.kill_all(host)
        return True
    if victim == "head":
        victims = [job.process.pid]  # the words before it have become it by exec
    elif phase == "starting":
        # Neither has its name yet: the starter's processes, or the program that will be the agent.
        victims = remote.hosts.processes(host)
    elif victim == "agent":
        victims = named(remote, host, "phalanx-agent")
    else:
        victims = named(remote, host, f"rank-{rank}")
    killed = False
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed = True
    return killed


def judge(job: RemoteJob, victim: str, phase: str, host: str, rank: int, case: str) -> None:
    code = job.process.returncode
    if victim == "head":
        assert code == -signal.SIGKILL or (phase == "ending" and code == 0), case
        return
    if phase == "ending" and (code == 0 or not victim):
        return  # it came too late
    if not victim:
        assert code == 130, case
        return
    assert "Traceback" not in job.err, case
    assert host in job.err, case
    if victim == "rank" and phase != "starting":
        assert code == 137, case
        assert phase == "importing" or f"rank {rank} of 4 failed" in job.err, case
    else:
        # At the start, the agent is one of several processes that are killed; it may report another one's end first.
        assert code == 1 or (phase == "starting" and code == 137), case
    if victim != "rank" and phase in ("importing", "running"):
        assert f"failed: host {host} is lost" in job.err, case
