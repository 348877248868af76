"""The kill matrix over MPI: processes that fall before, in and after every operation (``support/kill_cases.py``).

With the MPIs of PHALANX_MPI_VENVS, which take turns; ``make mpi`` sets some up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.launch_support import Launcher
from tests.mpi.conftest import LIBRARIES_NAMES, SHARED_MEMORY
from tests.mpi.environments import MpiEnvironment, mpi_parameters
from tests.support.kill_cases import Case
from tests.support.kill_draw import drawn
from tests.support.kill_runs import run_case
from tests.support.leaks import lasts
from tests.support.remote import RemoteJob

pytestmark = pytest.mark.fault

CASES = drawn("mpi", 150)
MPIS = mpi_parameters()


def parameters() -> list[object]:
    """Each case with one of the MPIs; skipped with the reason where there is none."""
    turns = [MPIS[number % len(MPIS)] for number in range(len(CASES))]
    return [
        pytest.param(case, *mpi.values, id=f"{case}-{mpi.id}", marks=mpi.marks)
        for case, mpi in zip(CASES, turns, strict=True)
    ]


@pytest.fixture
def launcher(tmp_path: Path, mpi: MpiEnvironment) -> Iterator[Launcher]:
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


@pytest.mark.parametrize(("case", "mpi"), parameters())
def test_a_fall_over_mpi_is_named_and_leaves_nothing(
    case: Case, mpi: MpiEnvironment, launcher: Launcher, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = tmp_path / "told"
    folder.mkdir()
    # torch makes a folder of that name for DDP, in the temporary files, with every backend.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}

    def start(arguments: Sequence[str]) -> RemoteJob:
        with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
            started = launcher.start(*arguments, stdout=out, stderr=err, environment=environment)
        return RemoteJob(started.process, tmp_path)

    def find_victim(job: RemoteJob) -> int:
        # The relay takes the zygote's place.
        return job.process.pid if case.victim == "launcher" else launcher.jobs[0].named("phalanx-relay")

    took = run_case(case, folder, start, find_victim, waits_in_mpi=mpi.is_openmpi)
    for name, took_s in took.items():
        record_property(name, took_s)
