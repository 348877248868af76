"""Fixtures of the MPI tests."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch_support import Launcher
from tests.mpi.environments import MpiEnvironment, mpi_parameters
from tests.support.leaks import mapped

SHARED_MEMORY = Path("/dev/shm")
LIBRARIES_NAMES = re.compile(r"mpich_shm_|mpich_shar_|sm_segment\.|vader_segment\.|\d+:\d+:\d+$|fi_shm")


@pytest.fixture(params=mpi_parameters())
def mpi(request: pytest.FixtureRequest) -> MpiEnvironment:
    """Each MPI that there is; skipped with a reason where there is none."""
    environment: MpiEnvironment = request.param
    return environment


@pytest.fixture
def launcher(tmp_path: Path, mpi: MpiEnvironment) -> Iterator[Launcher]:
    """``phalanx run --mpi mpiexec``, which must leave nothing behind."""
    made = Launcher(tmp_path, mpi.python, ("--mpi", "mpiexec"))
    try:
        yield made
        for job in made.jobs:
            for folder in job.temporary.glob("ompi.*"):
                shutil.rmtree(folder)  # which stays if Open MPI's mpirun is killed (docs/mpi.md)
        made.check()
    finally:
        made.close()


@pytest.fixture(autouse=True)
def remove_what_a_bare_mpiexec_leaves() -> Iterator[None]:
    """An aborted job leaves its shared memory; libfabric names it by process id, and fails should that come again."""
    before = set(os.listdir(SHARED_MEMORY))
    yield
    for name in set(os.listdir(SHARED_MEMORY)) - before:
        if LIBRARIES_NAMES.match(name) and not mapped(name) and not _names_a_process(name):
            with contextlib.suppress(OSError):
                (SHARED_MEMORY / name).unlink()


def _names_a_process(name: str) -> bool:
    """Whether a number in a name is the id of a process that runs, such as another test's, whose file it is.

    A part with letters is none: MPICH's names have hexadecimal digits.
    """
    return any(part.isdecimal() and Path("/proc", part).exists() for part in re.split(r"[^0-9A-Za-z]+", name))
