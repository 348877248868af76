"""The kill matrix: processes that fall before, in and after every operation (``support/kill_cases.py``).

On one host, on two, and over the MPIs of PHALANX_MPI_VENVS, which take turns; ``make mpi`` sets some up. Only a few
quick cases run in ``make test``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.mpi.conftest import LIBRARIES_NAMES, SHARED_MEMORY
from tests.mpi.environments import MpiEnvironment, mpi_parameters
from tests.support.hosts import why_no_hosts
from tests.support.kill_cases import RANKS, Case, Right, every_case, what_is_right
from tests.support.leaks import lasts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote
from tests.support.waiting import soon

__all__ = ["hosts", "launcher", "remote"]  # fixtures


# -- the draw: few of many cases, the same ones each time, in which all combinations occur -------------------------

SEED = 16
DIMENSIONS = ("operation", "moment", "fault", "victim", "world", "meeting")
# Of these three each combination is wanted too, where the count allows it. Of any two dimensions each is in any case.
TRIPLES = (("operation", "moment", "fault"), ("operation", "fault", "victim"))
TRIED = 8  # of the cases that have a combination which is still missing

Combination = tuple[int, tuple[object, ...]]  # the number of its kind, and the values


def drawn(place: str, count: int) -> list[Case]:
    """``count`` different cases of a place, always the same ones."""
    chance = random.Random(f"{SEED} {place}")
    cases = list(every_case(place))
    chosen: dict[Case, None] = {}
    for kinds in (list(itertools.combinations(DIMENSIONS, 2)), TRIPLES):
        _cover(kinds, cases, count, chosen, chance)
    others = [case for case in cases if case not in chosen]
    chosen |= dict.fromkeys(chance.sample(others, count - len(chosen)))
    in_turn = list(chosen)
    chance.shuffle(in_turn)
    return [dataclasses.replace(case, seed=chance.randrange(10**6)) for case in in_turn]


def _cover(
    kinds: Sequence[tuple[str, ...]], cases: list[Case], count: int, chosen: dict[Case, None], chance: random.Random
) -> None:
    """Add cases until every combination of these dimensions occurs, or there are ``count``.

    For each one that is missing it takes, of some cases that have it, the one that has most of the others.
    """

    values_of = [attrgetter(*kind) for kind in kinds]

    def combinations(case: Case) -> list[Combination]:
        return [(number, values(case)) for number, values in enumerate(values_of)]

    with_it: dict[Combination, list[Case]] = {}
    for case in cases:
        for combination in combinations(case):
            with_it.setdefault(combination, []).append(case)
    missing = set(with_it)
    for case in chosen:
        missing.difference_update(combinations(case))
    for combination in chance.sample(list(with_it), len(with_it)):
        if combination not in missing or len(chosen) == count:
            continue
        some = chance.sample(with_it[combination], min(TRIED, len(with_it[combination])))
        best = max(some, key=lambda case: len(missing.intersection(combinations(case))))
        chosen[best] = None
        missing.difference_update(combinations(best))


def quick(cases: list[Case], count: int) -> list[Case]:
    """Of these cases ``count`` that take little time and differ: of each kind one, as long as there are kinds.

    A stopped rank takes long, because one waits for what is said of it.
    """
    cheap = [case for case in cases if case.fault != "SIGSTOP" and case.world < 8]
    kinds = (
        [case for case in cheap if case.victim == "zygote"],
        [case for case in cheap if case.victim in RANKS and case.operation == "init"],
        [case for case in cheap if case.victim in RANKS and case.fault == "SIGKILL" and case.moment == "first"],
        [case for case in cheap if case.victim == "launcher"],
        [case for case in cheap if case.victim in RANKS and case.operation == "close"],
    )
    chosen: list[Case] = []
    for kind in kinds[:count]:
        chosen += [case for case in kind if case not in chosen][:1]
    return chosen


# -- one case ------------------------------------------------------------------------------------------------------

PROGRAM = Path(__file__).parents[1] / "support" / "kill_program.py"
PATIENCE_S = 200.0  # no busy machine needs as long
SOON_S = 30.0  # for what takes 0.2 s to 5 s on a quiet machine; the timeout of the groups is far from it
GOES_ON_S = 1.0  # a job that must not end is looked at for so long

Start = Callable[[Sequence[str]], RemoteJob]
Find = Callable[[RemoteJob], int]


def run_case(
    case: Case, folder: Path, start: Start, find_victim: Find, *, waits_in_mpi: bool = False
) -> dict[str, float]:
    """Run it, and fail with everything that was said unless it ends as it should.

    Args:
        case: which one.
        folder: an empty folder that all ranks see.
        start: starts ``phalanx run`` with these arguments.
        find_victim: the process of the launcher or the zygote.
        waits_in_mpi: see ``what_is_right``.

    Returns:
        How long after the fault, in seconds, the last survivor had its error (``named``) and the job ended (``ended``),
        as far as these have happened.
    """
    right = what_is_right(case, waits_in_mpi=waits_in_mpi)
    arguments = ["-n", str(case.world), "-q", str(PROGRAM), json.dumps(case.for_program(right)), str(folder)]
    job = start(arguments)
    try:
        assert soon(lambda: (folder / "fell").exists() or job.process.poll() is not None, PATIENCE_S), "nobody fell"
        assert (folder / "fell").exists(), "the job has ended before"
        fell = json.loads((folder / "fell").read_text())["at"]
        if not case.of_rank:
            os.kill(find_victim(job), case.signal)
        if right.end:
            end(job, right)
        assert soon(lambda: job.process.poll() is not None, SOON_S + right.timeout_s % 300), "the job does not end"
        ended_s = time.time() - fell
        assert job.process.returncode in right.codes
        assert says(right, job), f"{right.said} is not said"
        survivors = [rank for rank in range(case.world) if not (case.of_rank and rank == case.actor)]
        told = [check_survivor(case, right, folder, rank) for rank in survivors] if right.speaks_of_survivors else []
        named = [at - fell for at in told if at is not None]
    except AssertionError as error:
        pytest.fail(f"{case}, seed {case.seed}: {error}\nright: {right}\n{job.said()}\n{outcomes(folder)}")
    return {"ended": ended_s, **({"named": max(named)} if named else {})}


def end(job: RemoteJob, right: Right) -> None:
    """End a job that goes on, when it has said what it must, unless that is that it ends by itself."""
    if right.said:
        assert soon(lambda: says(right, job), SOON_S), f"{right.said} is not said"
    else:
        assert not soon(lambda: job.process.poll() is not None, GOES_ON_S), "the job has ended"
    if right.instead and soon(lambda: says_instead(right, job), 2 * right.timeout_s):
        return
    if right.end == "stop":
        command = [sys.executable, "-m", "phalanx", "stop", str(job.process.pid)]
        stopped = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert stopped.returncode == 0, stopped.stderr
        assert "is stopped (state T)" in stopped.stderr
    else:
        job.process.send_signal(signal.Signals[right.end])


def says(right: Right, job: RemoteJob) -> bool:
    """Whether it has said what it must."""
    return says_instead(right, job) or all(re.search(words, job.err) for words in right.said)


def says_instead(right: Right, job: RemoteJob) -> bool:
    return any(re.search(words, job.err) for words in right.instead)


def check_survivor(case: Case, right: Right, folder: Path, rank: int) -> float | None:
    """It has raised the right error in time; when, in seconds since the epoch. None if it may do without, and does."""
    file = folder / f"outcome-{rank}"
    if right.may_be_ended and not file.exists():
        return None
    assert file.exists(), f"rank {rank} was not told"
    told: dict[str, Any] = json.loads(file.read_text())
    if right.may_come_through and told["error"] is None:
        return None
    assert told["error"] in right.errors, f"rank {rank}: {told}"
    for words in right.words:
        assert re.search(words, told["text"]), f"rank {rank} is not told {words!r}: {told}"
    # Before there is a group, a rank has no number in it.
    name = "rank" if told["error"] == "InitializationError" else "group_rank"
    assert told[name] == case.actor, f"rank {rank}: {told}"
    if case.place == "two hosts" and case.host(rank) != case.host(case.actor):
        assert f"h{case.host(case.actor)}" in told["text"], f"rank {rank} is not told the host: {told}"
    fell = json.loads((folder / "fell").read_text())
    assert told["pid"] == fell["pid"], f"rank {rank} is told another process: {told}, {fell}"
    if right.timeout_s == 300:
        assert told["at"] - fell["at"] < SOON_S, f"rank {rank} is told late: {told}"
    at: float = told["at"]
    return at


def outcomes(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(folder.iterdir()))


# -- where the ranks are -------------------------------------------------------------------------------------------

MPIS = mpi_parameters()
Record = Callable[[str, object], None]


def parameters(place: str, count: int, few: int) -> list[object]:
    """All cases of a place, of which only a few quick ones run in ``make test``."""
    cases = drawn(place, count)
    shown = quick(cases, few)
    return [pytest.param(case, id=str(case), marks=[] if case in shown else [pytest.mark.fault]) for case in cases]


def run_here(case: Case, launcher: Launcher, tmp_path: Path, record: Record, *, keeper: str, openmpi: bool) -> None:
    """A case under a launcher of this machine, where a process of this name stands between it and the ranks."""
    folder = tmp_path / "told"
    folder.mkdir()
    # torch makes a folder of that name for DDP, in the temporary files, with every backend.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}

    def start(arguments: Sequence[str]) -> RemoteJob:
        with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
            started = launcher.start(*arguments, stdout=out, stderr=err, environment=environment)
        return RemoteJob(started.process, tmp_path)

    def find_victim(job: RemoteJob) -> int:
        return job.process.pid if case.victim == "launcher" else launcher.jobs[0].named(keeper)

    for name, took_s in run_case(case, folder, start, find_victim, waits_in_mpi=openmpi).items():
        record(name, took_s)


@pytest.mark.parametrize("case", parameters("one host", 450, 5))
def test_a_fall_is_named_and_leaves_nothing(
    case: Case, launcher: Launcher, tmp_path: Path, record_property: Record
) -> None:
    run_here(case, launcher, tmp_path, record_property, keeper="phalanx-zygote", openmpi=False)


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize("case", parameters("two hosts", 300, 3))
def test_a_fall_on_two_hosts_is_named_and_leaves_nothing(
    case: Case, remote: RemoteLauncher, tmp_path: Path, record_property: Record
) -> None:
    folder = tmp_path / "told"
    folder.mkdir()
    placed = f"h0:{case.split},h1:{case.world - case.split}"

    def find_victim(job: RemoteJob) -> int:
        # The words before it have become the launcher by exec.
        return job.process.pid if case.victim == "launcher" else zygote_of(remote, case.seed % 2)

    for name, took_s in run_case(case, folder, lambda words: remote.start("-H", placed, *words), find_victim).items():
        record_property(name, took_s)


def zygote_of(remote: RemoteLauncher, host: int) -> int:
    for pid in remote.hosts.processes(host):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "phalanx-zygote":
                return pid
    pytest.fail(f"h{host} has no zygote")


@pytest.fixture
def mpi_launcher(tmp_path: Path, mpi: MpiEnvironment) -> Iterator[Launcher]:
    """``phalanx run --mpi mpiexec``, which must leave nothing behind, nor what the library keeps in /dev/shm."""
    before = set(os.listdir(SHARED_MEMORY))
    made = Launcher(tmp_path, mpi.python, ("--mpi", "mpiexec"))
    try:
        yield made
        made.check()
        files = {name for name in set(os.listdir(SHARED_MEMORY)) - before if LIBRARIES_NAMES.match(name)}
        assert not [name for name in files if lasts(name)]
    finally:
        made.close()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("case", "mpi"),
    [
        pytest.param(case, *mpi.values, id=f"{case}-{mpi.id}", marks=mpi.marks)
        for number, case in enumerate(drawn("mpi", 150))
        for mpi in [MPIS[number % len(MPIS)]]
    ],
)
def test_a_fall_over_mpi_is_named_and_leaves_nothing(
    case: Case, mpi: MpiEnvironment, mpi_launcher: Launcher, tmp_path: Path, record_property: Record
) -> None:
    # The relay takes the zygote's place.
    run_here(case, mpi_launcher, tmp_path, record_property, keeper="phalanx-relay", openmpi=mpi.is_openmpi)
