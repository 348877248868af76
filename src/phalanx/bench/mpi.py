"""Finding the MPI libraries of this machine, and having their ``mpiexec`` start ranks like forked ones.

Which library mpi4py loads depends on the environment it is installed in, so an MPI is an ``mpiexec`` together with
the Python beside it. Ranks are not bound to cores, since forked ones are not either; Open MPI may start more ranks
than cores, and may be run by root in a container.
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
from phalanx.launch.job.mpi_launcher import unbound_environment
from phalanx.system.processes import descendants_of

__all__ = ["Mpi", "find_mpi", "installed_mpi", "shared_memory_of"]

# The other environment's own packages come first; Phalanx need not be installed there.
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
        """The command that starts the ranks, which then meet in ``folder``."""
        home = str(Path(settings.__file__).parents[1])
        return [self.mpiexec, "-n", str(ranks), self.python, "-c", _START, home, str(folder)]

    @staticmethod
    def environment(folder: Path) -> dict[str, str]:
        """The ranks' environment. Temporary files of a library go into ``folder``, and are removed with it."""
        return {**unbound_environment(), **os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def find_mpi(path: str) -> Mpi:
    """The MPI of a given ``mpiexec``: with the Python in the same folder, otherwise with this one.

    Raises:
        ValueError: there is no such program.
    """
    mpiexec = shutil.which(path)
    if mpiexec is None:
        raise ValueError(f"{path!r} is not a program; give the path of an mpiexec, as in --mpi venv/bin/mpiexec")
    beside = Path(mpiexec).with_name("python")
    return Mpi(os.path.abspath(mpiexec), str(beside.absolute()) if os.access(beside, os.X_OK) else sys.executable)


def installed_mpi() -> Mpi | None:
    """The MPI of this environment: mpi4py can be imported and an ``mpiexec`` is there, beside Python or on PATH."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    mpiexec = shutil.which(beside) or shutil.which("mpiexec")
    return None if mpiexec is None else Mpi(mpiexec, sys.executable)


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """The files in /dev/shm that the descendants of ``pids`` have mapped.

    MPICH and Open MPI remove theirs when a program finalises, and leave them behind when it is ended before.
    """
    found = set()
    for pid in descendants_of(pids):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            found |= {line.split(maxsplit=5)[5].strip() for line in file if " /dev/shm/" in line}
    return {path for path in found if path.startswith("/dev/shm/") and not path.endswith(" (deleted)")}
