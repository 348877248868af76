"""The kill matrix (make fault): a process falls before, in or after every operation, on one host and on two."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote
from tests.support.waiting import soon

__all__ = ["hosts", "launcher", "remote"]  # fixtures
pytestmark = pytest.mark.fault

PATIENCE_S = 200.0  # no busy machine needs as long
SOON_S = 30.0  # for what takes 0.2 s to 5 s on a quiet machine; the timeout of the groups is far from it
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "messages", "barrier", "DDP step", "init", "close")
MOMENTS = ("before", "within", "after")
FAULTS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "exception", "os._exit", "exit(0)")
VICTIMS = ("rank", "launcher", "phalanx-zygote")
EXIT_CODE = 3

# A rank leaves files: ``ready-R`` when it begins, ``fell`` when the fault begins, ``outcome-R`` with what it raised.
PROGRAM = """
import json, os, resource, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist, phalanx
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

case, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
acts, fault, fallen = rank == case["actor"], case["fault"], False

class Fell(ValueError):
    pass

def put(name, what):
    (folder / f"{name}.part-{rank}").write_text(json.dumps(what))
    (folder / f"{name}.part-{rank}").rename(folder / name)

def fall(*_):
    global fallen
    fallen = True
    put("fell", {"at": time.time(), "pid": os.getpid()})
    if case["victim"] != "rank":
        return  # the test strikes
    if fault.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[fault])
    elif fault == "os._exit":
        os._exit(3)
    elif fault == "exit(0)":
        sys.exit(0)
    else:
        raise Fell("the victim fell")

def look_whether_fallen():  # Python ignores an exception that a handler raises within a finaliser
    if fallen and case["victim"] == "rank" and fault in ("exception", "exit(0)"):
        fall()

def exchange(count):
    works = [dist.isend(torch.ones(count), (rank + 1) % size), dist.irecv(torch.empty(count), (rank - 1) % size)]
    for work in works:
        work.wait()

def step(count):
    models[0](torch.ones(4, 64)).sum().backward()
    models[0].zero_grad()

models = []
operation = {
    "all_reduce": lambda count: dist.all_reduce(torch.ones(count)),
    "broadcast": lambda count: dist.broadcast(torch.ones(count), (case["actor"] + 1) % size),
    "all_gather": lambda count: dist.all_gather([torch.empty(count) for _ in range(size)], torch.ones(count)),
    "messages": exchange,
    "barrier": lambda count: dist.barrier(),
    "DDP step": step,
    "init": lambda count: phalanx.init(timeout_s=300),
    "close": lambda count: phalanx.close(),
}[case["operation"]]

def perform():
    if case["operation"] != "init":
        phalanx.init(timeout_s=300)
        if case["operation"] == "DDP step":
            layers = torch.nn.Sequential(torch.nn.Linear(64, 20_000), torch.nn.Linear(20_000, 64))
            models.append(DistributedDataParallel(layers, bucket_cap_mb=1))
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=case["timeout_s"]))
        dist.barrier()
    put(f"ready-{rank}", os.getpid())
    if case["moment"] == "before" and acts:
        fall()
    if case["moment"] == "within":
        if acts and fault in ("exception", "exit(0)"):
            signal.signal(signal.SIGALRM, fall)
            signal.setitimer(signal.ITIMER_REAL, case["after_s"])
        elif acts:
            threading.Timer(case["after_s"], fall).start()
        while case["operation"] not in ("init", "close"):
            operation(case["count"])
            look_whether_fallen()
    operation(8)
    if case["moment"] == "after" and acts:
        fall()
    while dist.is_initialized():
        look_whether_fallen()
        dist.barrier()
    while acts and not fallen or case["victim"] != "rank":
        time.sleep(0.01)
    look_whether_fallen()

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if case["survivors_wait"] and not acts:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # they have to learn of it by themselves
try:
    perform()
    put(f"outcome-{rank}", {"error": None})
except BaseException as error:
    known = {name: getattr(error, name, None) for name in ("group_rank", "rank", "pid", "host")}
    put(f"outcome-{rank}", {"error": type(error).__name__, "text": str(error), "at": time.time(), **known})
    raise
"""


@dataclass(frozen=True)
class Case:
    """What falls, how, and when; what else there is, such as the rank, is drawn from the seed."""

    operation: str
    moment: str
    fault: str
    victim: str
    world: int
    seed: int

    def __str__(self) -> str:
        return "-".join((self.operation, self.moment, self.fault, self.victim, f"of {self.world}"))

    @property
    def actor(self) -> int:
        """The rank that falls; for another victim the rank whose progress is waited for."""
        return self.seed % self.world

    @property
    def split(self) -> int:
        """How many of the ranks are on the first of two hosts."""
        return (self.world + 1) // 2

    @property
    def is_in_init(self) -> bool:
        return self.operation == "init" and self.moment != "after"


@dataclass(frozen=True)
class Right:
    """What has to come of a case: an exit code, what is said, and the errors of which every survivor raises one.

    ``end`` is how the job has to be ended, once that has been said: a signal, or ``stop`` for ``phalanx stop``.
    """

    codes: tuple[int, ...]
    said: str = ""
    errors: tuple[str, ...] = ()
    may_do_without: bool = False  # a survivor may come through, or be ended before it knows
    end: str = ""


def what_is_right(case: Case, two_hosts: bool) -> Right:
    """What docs/launchers.md, diagnosis.md and clusters.md promise."""
    rank, world, number = case.actor, case.world, getattr(signal, case.fault, 0)
    ended = f"ended by signal {number:d} \\({case.fault}\\)"
    if case.victim == "launcher":
        return Right((143,), end="stop") if case.fault == "SIGSTOP" else Right((-number,))
    if case.victim == "phalanx-zygote":
        if case.fault == "SIGSTOP":
            return Right((143,), end="SIGTERM")
        return Right((128 + number,), f"the process that starts and watches the ranks.* was {ended}; the job ended")
    without = case.operation == "close" or case.is_in_init
    if case.fault == "SIGSTOP":
        line = rf"phalanx: rank {rank}( on h[01])?( \(local rank \d+\))? is stopped \(state T\)[,;] .*waits? for it"
        if case.operation == "close":
            return Right((143,), end="SIGTERM")
        if not two_hosts or case.operation == "init":
            return Right((1, 143), line, end="SIGTERM")
        return Right((1,), f"rank {rank} of the group", ("CollectiveTimeout", "PeerLost"))
    if case.fault == "exit(0)":
        if case.operation == "close":
            return Right((0,))
        return Right(
            (1,), rf"rank \d+ of {world} failed: .*rank {rank}\b", ("PeerLost", "InitializationError"), without
        )
    code, cause = 128 + number, rf"rank {rank} of {world} failed\n.*{ended}"
    if case.fault == "exception":
        code, cause = 1, rf"rank {rank} of {world} failed: (\w+\.)?Fell: the victim fell"
    elif case.fault == "os._exit":
        code, cause = EXIT_CODE, rf"rank {rank} of {world} failed\n.*exit code {EXIT_CODE}"
    return Right((code,), cause, ("PeerLost", "InitializationError"), without)


def drawn(place: str, count: int) -> list[object]:
    """So many different cases, always the same ones."""
    chance = random.Random(f"16 {place}")
    every = [
        facts
        for facts in itertools.product(OPERATIONS, MOMENTS, FAULTS, VICTIMS, (2, 3, 8))
        if facts[3] == "rank" or facts[2].startswith("SIG")
    ]
    cases = [Case(*facts, chance.randrange(10**6)) for facts in chance.sample(every, count)]
    return [pytest.param(case, id=str(case)) for case in cases]


def run_case(
    case: Case,
    folder: Path,
    start: Callable[[Sequence[str]], RemoteJob],
    find: Callable[[RemoteJob, str], int],
    *,
    two_hosts: bool = False,
) -> None:
    """Run it, and fail with everything that was said unless it ends as it should."""
    right = what_is_right(case, two_hosts)
    told = folder / "told"
    told.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    of_program = {
        **vars(case),
        "actor": case.actor,
        "after_s": random.Random(case.seed).uniform(0.0, 0.35),
        "count": 8 if case.seed % 2 else 1_000_000,
        "timeout_s": 5 if case.fault == "SIGSTOP" else 300,
        "survivors_wait": bool(right.errors) and not case.is_in_init,
    }
    job = start(["-n", str(case.world), "-q", str(folder / "program.py"), json.dumps(of_program), str(told)])
    try:
        assert soon(lambda: (told / "fell").exists() or job.process.poll() is not None, PATIENCE_S), "nobody fell"
        if case.victim != "rank":
            os.kill(find(job, case.victim), signal.Signals[case.fault])
        if right.end:
            assert soon(lambda: re.search(right.said, job.err) is not None, SOON_S), f"{right.said} is not said"
            end(job, right.end)
        assert soon(lambda: job.process.poll() is not None, SOON_S), "the job does not end"
        assert job.process.returncode in right.codes
        assert re.search(right.said, job.err), f"{right.said} is not said"
        for rank in range(case.world) if right.errors else ():
            if rank != case.actor:
                check_survivor(case, right, told, rank)
    except AssertionError as error:
        files = "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(told.iterdir()))
        pytest.fail(f"{case}, seed {case.seed}: {error}\nright: {right}\n{job.said()}\n{files}")


def end(job: RemoteJob, how: str) -> None:
    """End a job that goes on."""
    if how == "stop":
        command = [sys.executable, "-m", "phalanx", "stop", str(job.process.pid)]
        stopped = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert stopped.returncode == 0, stopped.stderr
        assert "is stopped (state T)" in stopped.stderr
    elif job.process.poll() is None:
        job.process.send_signal(signal.Signals[how])


def check_survivor(case: Case, right: Right, folder: Path, rank: int) -> None:
    """It has raised the right error in time, which names the rank that fell, and its process."""
    file = folder / f"outcome-{rank}"
    if right.may_do_without and not (file.exists() and json.loads(file.read_text())["error"]):
        return
    assert file.exists(), f"rank {rank} was not told"
    told: dict[str, Any] = json.loads(file.read_text())
    fell = json.loads((folder / "fell").read_text())
    assert told["error"] in right.errors, f"rank {rank}: {told}"
    number = told["rank" if told["error"] == "InitializationError" else "group_rank"]
    assert (number, told["pid"]) == (case.actor, fell["pid"]), f"rank {rank}: {told}"
    assert told["at"] - fell["at"] < SOON_S, f"rank {rank} is told late: {told}"


@pytest.mark.parametrize("case", drawn("one host", 400))
def test_fall_is_named_and_leaves_nothing(case: Case, launcher: Launcher, tmp_path: Path) -> None:
    # torch makes a folder of that name for DDP, in the temporary files, with every backend.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}

    def start(arguments: Sequence[str]) -> RemoteJob:
        with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
            started = launcher.start(*arguments, stdout=out, stderr=err, environment=environment)
        return RemoteJob(started.process, tmp_path)

    run_case(
        case, tmp_path, start, lambda job, name: job.process.pid if name == "launcher" else launcher.jobs[0].named(name)
    )


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize("case", drawn("two hosts", 250))
def test_fall_on_two_hosts_is_named_and_leaves_nothing(case: Case, remote: RemoteLauncher, tmp_path: Path) -> None:
    placed = f"h0:{case.split},h1:{case.world - case.split}"

    def find(job: RemoteJob, name: str) -> int:
        # The words before it have become the launcher by exec.
        return job.process.pid if name == "launcher" else remote.wait_for_process(case.seed % 2, name)

    run_case(case, tmp_path, lambda words: remote.start("-H", placed, *words[2:]), find, two_hosts=True)
