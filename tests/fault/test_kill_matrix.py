"""The kill matrix (make fault): a rank falls at a random moment of an operation, on one host and on two."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote
from tests.support.waiting import soon

__all__ = ["hosts", "launcher", "remote"]  # fixtures
pytestmark = pytest.mark.fault

PATIENCE_S = 200.0  # no busy machine needs as long
SOON_S = 30.0  # for what takes 0.2 s to 5 s on a quiet machine; the timeout of the groups is far from it
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "messages", "barrier", "objects", "init and close")
# The exit code of the job, and what the launcher says of the rank.
FAULTS = {
    "SIGKILL": (128 + signal.SIGKILL, r"failed\n.*ended by signal 9 \(SIGKILL\)"),
    "SIGSEGV": (128 + signal.SIGSEGV, r"failed\n.*ended by signal 11 \(SIGSEGV\)"),
    "exception": (1, r"failed: (\w+\.)?Fell: the victim fell"),
    "os._exit": (3, r"failed\n.*exit code 3"),
}

# A rank leaves files: ``fell`` when the fault begins, and ``outcome-R`` with what it raised.
PROGRAM = """
import json, os, resource, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist, phalanx

case, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
count, operation = 8 if case["seed"] % 2 else 1_000_000, case["operation"]

class Fell(ValueError):
    pass

def put(name, what):
    (folder / f"{name}.part-{rank}").write_text(json.dumps(what))
    (folder / f"{name}.part-{rank}").rename(folder / name)

def fall(*_):
    put("fell", {"at": time.time(), "pid": os.getpid()})
    if case["fault"].startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[case["fault"]])
    if case["fault"] == "os._exit":
        os._exit(3)
    raise Fell("the victim fell")

def exchange():
    works = [dist.isend(torch.ones(count), (rank + 1) % size), dist.irecv(torch.empty(count), (rank - 1) % size)]
    for work in works:
        work.wait()

def open_and_close():
    phalanx.close()
    phalanx.init(timeout_s=300)

call = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(count)),
    "broadcast": lambda: dist.broadcast(torch.ones(count), 0),
    "all_gather": lambda: dist.all_gather([torch.empty(count) for _ in range(size)], torch.ones(count)),
    "messages": exchange,
    "barrier": dist.barrier,
    "objects": lambda: dist.all_gather_object([None] * size, b"x" * count),
    "init and close": open_and_close,
}[operation]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if rank == case["victim"]:
    signal.signal(signal.SIGALRM, fall)
    signal.setitimer(signal.ITIMER_REAL, case["after_s"], 0.1)  # Python ignores what a handler raises in a finaliser
elif operation != "init and close":  # in which the launcher ends them
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # they have to learn of it by themselves
try:
    phalanx.init(timeout_s=300)
    while True:
        call()
except BaseException as error:
    known = {name: getattr(error, name, None) for name in ("group_rank", "rank", "pid")}
    put(f"outcome-{rank}", {"error": type(error).__name__, "text": str(error), "at": time.time(), **known})
    raise
"""


@dataclass(frozen=True)
class Case:
    """What the ranks do, how one falls, and how many there are; which one and when is drawn."""

    operation: str
    fault: str
    world: int
    victim: int
    after_s: float
    seed: int


def drawn(place: str, count: int) -> list[object]:
    """Every combination so often, and each time at other moments, which are always the same ones."""
    chance = random.Random(f"16 {place}")
    cases: list[object] = []
    for number, (operation, fault, world) in itertools.product(
        range(count), itertools.product(OPERATIONS, FAULTS, (2, 3, 8))
    ):
        case = Case(operation, fault, world, chance.randrange(world), chance.uniform(0.0, 0.6), chance.randrange(10**6))
        cases.append(pytest.param(case, id=f"{operation}-{fault}-of {world}-{number}"))
    return cases


def run_case(case: Case, folder: Path, start: Callable[[Sequence[str]], RemoteJob]) -> None:
    """Run it, and fail with everything that was said unless it ends as docs/launchers.md and diagnosis.md promise."""
    told = folder / "told"
    told.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    job = start(["-n", str(case.world), "-q", str(folder / "program.py"), json.dumps(asdict(case)), str(told)])
    code, said = FAULTS[case.fault]
    try:
        assert soon(lambda: job.process.poll() is not None, PATIENCE_S), "the job does not end"
        fell = json.loads((told / "fell").read_text())
        assert job.process.returncode == code
        assert re.search(rf"rank {case.victim} of {case.world} {said}", job.err), f"{said} is not said"
        for rank in range(case.world):
            is_told = case.operation != "init and close" or (told / f"outcome-{rank}").exists()
            if rank != case.victim and is_told:
                error = json.loads((told / f"outcome-{rank}").read_text())
                assert error["error"] in ("PeerLost", "InitializationError"), error
                named = error["rank" if error["error"] == "InitializationError" else "group_rank"]
                assert (named, error["pid"]) == (case.victim, fell["pid"]), error
                assert error["at"] - fell["at"] < SOON_S, error
    except (AssertionError, OSError) as error:
        files = "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(told.iterdir()))
        pytest.fail(f"{case}: {error!r}\n{job.said()}\n{files}")


@pytest.mark.parametrize("case", drawn("one host", 3))
def test_fall_is_named_and_leaves_nothing(case: Case, launcher: Launcher, tmp_path: Path) -> None:
    def start(arguments: Sequence[str]) -> RemoteJob:
        with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
            started = launcher.start("--grace", "60", *arguments, stdout=out, stderr=err)
        return RemoteJob(started.process, tmp_path)

    run_case(case, tmp_path, start)


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize("case", drawn("two hosts", 2))
def test_fall_on_two_hosts_is_named_and_leaves_nothing(case: Case, remote: RemoteLauncher, tmp_path: Path) -> None:
    placed = ["--grace", "60", "-H", f"h0:{(case.world + 1) // 2},h1:{case.world // 2}"]
    run_case(case, tmp_path, lambda words: remote.start(*placed, *words[2:]))
