"""Finding the MPI libraries of this machine, and having their ``mpiexec`` start ranks under the conditions of a fork.

Which library mpi4py loads depends on the environment it is installed in, so an MPI is an ``mpiexec`` together with
the Python in the same folder. Ranks are not bound to cores, because forked ones are not either. Open MPI is allowed to
start more ranks than there are cores, and to run as root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx import settings
from phalanx.system.processes import descendants_of

__all__ = ["Mpi", "find_mpi", "installed_mpi", "shared_memory_of"]

# Each library reads its own variables and ignores the others.
_SETTINGS = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "I_MPI_PIN": "0",
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Phalanx need not be installed in the other environment. Its folder is appended, so that environment's packages come
# first.
_START = "import sys; sys.path.append(sys.argv.pop(1)); from phalanx.bench.mpi_worker import main; main()"


@dataclass(frozen=True)
class Mpi:
    """An MPI that can be measured.

    Attributes:
        mpiexec: its launcher.
        python: the interpreter whose mpi4py loads the library that the launcher belongs to.
    """

    mpiexec: str
    python: str

    def command(self, ranks: int, folder: Path) -> list[str]:
        """The command line that starts the ranks, which then meet in ``folder``."""
        home = str(Path(settings.__file__).parents[1])
        return [self.mpiexec, "-n", str(ranks), self.python, "-c", _START, home, str(folder)]

    @staticmethod
    def environment(folder: Path) -> dict[str, str]:
        """The ranks' environment; files that a library makes are in ``folder``, and are removed with it."""
        own = {**_SETTINGS, **(_AS_ROOT if os.geteuid() == 0 else {})}
        return {**own, **os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def find_mpi(path: str) -> Mpi:
    """The MPI of a given ``mpiexec``, with the Python in the same folder, or with this one if there is none.

    Raises:
        ValueError: there is no such program.
    """
    mpiexec = shutil.which(path)
    if mpiexec is None:
        raise ValueError(
            f"{path!r} is not a program that can be run; give the path of an mpiexec, as in --mpi venv/bin/mpiexec"
        )
    beside = Path(mpiexec).with_name("python")
    return Mpi(os.path.abspath(mpiexec), str(beside.absolute()) if os.access(beside, os.X_OK) else sys.executable)


def installed_mpi() -> Mpi | None:
    """The MPI of this environment; None unless mpi4py and an ``mpiexec`` (beside Python, or on PATH) are installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    mpiexec = shutil.which(beside) or shutil.which("mpiexec")
    return None if mpiexec is None else Mpi(mpiexec, sys.executable)


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """The files in /dev/shm that the descendants of ``pids`` have mapped.

    MPICH and Open MPI remove these files when a program finalises MPI. If it is ended before that, they stay.
    """
    found = set()
    for pid in descendants_of(pids):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            found |= {line.split(maxsplit=5)[5].strip() for line in file if " /dev/shm/" in line}
    return {path for path in found if path.startswith("/dev/shm/") and not path.endswith(" (deleted)")}
