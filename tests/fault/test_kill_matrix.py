"""The kill matrix: processes that fall before, in and after every operation (``support/kill_cases.py``).

On one host, on two, and over the MPIs of PHALANX_MPI_VENVS, which take turns; ``make mpi`` sets some up. Only a few
quick cases run in ``make test``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.mpi.conftest import LIBRARIES_NAMES, SHARED_MEMORY
from tests.mpi.environments import MpiEnvironment, mpi_parameters
from tests.support.hosts import why_no_hosts
from tests.support.kill_cases import Case
from tests.support.kill_draw import drawn, quick
from tests.support.kill_runs import run_case
from tests.support.leaks import lasts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote

__all__ = ["hosts", "launcher", "remote"]  # fixtures

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
