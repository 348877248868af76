"""Files: written whole or not at all, source text, names for people, and what MPI libraries leave in /dev/shm."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import stat
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from phalanx import settings
from phalanx.system.threads import within

# -- written whole -------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """Open a file to write, and to read again, which takes the place of ``target`` at the end of the block.

    It is on the disk before it does. After an exception, ``target`` is as it was.

    Args:
        target: the file; a symbolic link itself would be replaced.

    Raises:
        OSError: it cannot be written, or another process has begun to write it meanwhile.
    """
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)  # what a killed writer has left
    with open(part, "x+b") as file:

        def is_there() -> bool:
            return part.exists() and os.path.samestat(os.fstat(file.fileno()), part.lstat())

        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not is_there():
                raise FileExistsError(errno.EEXIST, "another process writes it at the same time", str(target))
            part.replace(target)
        except BaseException:
            if is_there():
                part.unlink()
            raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_creatable(target: Path) -> None:
    """Make a file without a name beside ``target``; raise OSError if that is not possible."""
    with tempfile.TemporaryFile(dir=target.parent):
        pass


# -- source text ---------------------------------------------------------------------------------------

_READ_WITHIN_S = 0.5
_silent: set[str] = set()  # files that did not come in time


def source_lines(path: str) -> list[str]:
    """Read the lines of a source file; none if it cannot be read, or not within half a second, as from a hung NFS."""

    def read() -> list[str]:
        with tokenize.open(path) as file:
            return file.readlines()

    try:
        return [] if path in _silent else within(_READ_WITHIN_S, read)
    except TimeoutError:
        _silent.add(path)
    except (OSError, SyntaxError, ValueError):
        pass
    return []


# -- as people write them ------------------------------------------------------------------------------


def own_folder() -> str:
    """Return the working directory; empty if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def jobs_folder() -> str:
    """Return the folder in which ``phalanx run`` was called that started this process; empty without one."""
    return os.environ.get(settings.DIRECTORY, "")


def beside(place: str, folder: str) -> str:
    """Shorten a path that is below a folder to what follows the folder; leave any other unchanged.

    Args:
        place: ``/home/user/train.py:42``, or without the line.
        folder: an absolute path; empty if there is none.
    """
    start = folder.rstrip(os.sep) + os.sep
    # Without "//", after which the rest would name another file, and "..", which behind a link leads elsewhere.
    is_below = bool(folder) and place.startswith(start) and os.path.normpath(place) == place
    return place[len(start) :] if is_below else place


# -- of MPI --------------------------------------------------------------------------------------------

_MPI_FOLDER = "/dev/shm"
# How the names begin of files that MPI libraries leave there if their processes do not end in order. libfabric's have a
# process id, with Intel MPI.
_MPI_NAMES = re.compile(
    "|".join(
        (
            *("mpich_shm_", "mpich_shar_"),
            *(r"sm_segment\.", r"vader_segment\.", "pmix-", "prte", "ucx_"),  # Open MPI
            *(r"\d+:\d+:\d+$", "fi_shm", "efa_shm", "psm2_shm", "psm3_shm", "Intel_MPI", "shm_impi", "impi_"),
        )
    )
)


def remove_unused_mpi_files() -> None:
    """Remove what MPI libraries of this user have left in /dev/shm, if no process has it open or mapped.

    A process that is ended before it finalises, also by MPI_Abort, leaves some MB a rank there, until /dev/shm is full.
    A rank removes them before it starts MPI, and an agent when it comes and when it leaves. So the next job also
    removes what one has left that was killed as a whole.
    The kernel grants a read lease on a file only if nobody has it open for writing, in whatever container, and MPI
    libraries open theirs so. Until the lease is given back here, who opens the file waits.
    """
    with contextlib.suppress(OSError), os.scandir(_MPI_FOLDER) as entries:
        for entry in entries:
            if _MPI_NAMES.match(entry.name):
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
