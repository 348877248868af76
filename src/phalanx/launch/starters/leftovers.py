"""Shared memory that an MPI library leaves in /dev/shm when its process is ended before it finalises.

MPICH leaves 2 MB there each time, Open MPI and Intel MPI 16 MB a rank, until /dev/shm is full. An agent removes such
files when it comes and when it leaves, so the next launch also removes what a job left that was killed as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat

from phalanx.system.files import MPI_FOLDER, MPI_NAMES

__all__ = ["remove_unused"]


def remove_unused() -> None:
    """Remove the files of this user that have a name of an MPI library's and that no process has open or mapped.

    The kernel grants a read lease on a file only if nobody has it open for writing, in whatever container, and MPI
    libraries open theirs so. Until the lease is given back here, who opens the file waits.
    """
    with contextlib.suppress(OSError), os.scandir(MPI_FOLDER) as entries:
        for entry in entries:
            if MPI_NAMES.match(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_unused(entry.path)


def _remove_if_unused(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # ignored; SIGIO would end this process
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            os.unlink(path)
    finally:
        os.close(file)
