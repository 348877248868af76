"""Files: written whole or not at all, source text, names for people, and what MPI libraries leave in /dev/shm.

A file that is being written bears another name beside its own, and a lock (flock), which the kernel frees when its
holder ends, however that is. So whoever writes the same file next can remove what a killed writer has left. A writer
that finds its own lock taken, or its file removed, by one who looks just then, takes another name. On a file system
without locks nothing is removed, as nobody can know whether it is still written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import threading
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from phalanx import settings

_SUFFIX = ".part"

# -- written whole -------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """Open a file to write, and to read again, which takes the place of ``target`` at the end of the block.

    It is on the disk before it does. After an exception, ``target`` is as it was.

    Args:
        target: the file; a symbolic link itself would be replaced.

    Raises:
        OSError: it cannot be written.
    """
    remove_unfinished(target)
    with contextlib.ExitStack() as held:
        folder = os.open(target.parent, os.O_RDONLY)
        held.callback(os.close, folder)
        descriptor, name = _locked_beside(target)
        held.callback(name.unlink, missing_ok=True)  # after the replacement there is none
        file = held.enter_context(os.fdopen(descriptor, "w+b"))
        yield file
        file.flush()
        os.fsync(descriptor)
        name.replace(target)
        os.fsync(folder)


def check_creatable(target: Path) -> None:
    """Find out whether a file can be made beside ``target``.

    Raises:
        OSError: no.
    """
    remove_unfinished(target)
    descriptor, name = _locked_beside(target)
    name.unlink()
    os.close(descriptor)


def remove_unfinished(target: Path) -> None:
    """Remove what writers of ``target`` have left that were killed. Whatever cannot be removed stays."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(target.parent):
            if entry.name.startswith(f".{target.name}.") and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    _remove_if_left(Path(entry.path))


def _locked_beside(target: Path) -> tuple[int, Path]:
    """Make a file beside ``target``, with a name of its own, and lock it."""
    while True:
        name = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_SUFFIX}")
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)  # less the umask, as by open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, name):
                return descriptor, name
        except BlockingIOError:
            pass
        except OSError:
            return descriptor, name  # nobody has locks here, so nobody removes it
        os.close(descriptor)


def _remove_if_left(path: Path) -> None:
    kind = path.lstat()
    if kind.st_uid != os.geteuid() or not stat.S_ISREG(kind.st_mode):
        return
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # NFS locks for writing only what is open for it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, path):  # it has not got its own name meanwhile
            path.unlink()
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


# -- source text ---------------------------------------------------------------------------------------

_READ_WITHIN_S = 0.5
_silent: set[str] = set()  # files that did not come in time


def source_lines(path: str) -> list[str]:
    """Read the lines of a source file; none if it cannot be read, or not within half a second.

    A file system may not answer (a hung NFS), so a thread reads, and such a file is not asked for again.
    """
    lines: list[str] = []

    def read() -> None:
        with contextlib.suppress(OSError, SyntaxError, ValueError), tokenize.open(path) as file:
            lines.extend(file.readlines())

    if path not in _silent:
        reader = threading.Thread(target=read, name="phalanx-source", daemon=True)
        reader.start()
        reader.join(_READ_WITHIN_S)
        if reader.is_alive():
            _silent.add(path)
            return []
    return lines


# -- as people write them ------------------------------------------------------------------------------


def own_folder() -> str:
    """Return the working directory; empty if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def jobs_folder() -> str:
    """Return the folder in which ``phalanx run`` was called that started this process; empty without one.

    All ranks of a job have been started there, and a script that changes its working directory does not change it.
    """
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

MPI_FOLDER = "/dev/shm"
# How the names begin of files that MPI libraries leave there if their processes do not end in order. libfabric's have a
# process id, with Intel MPI.
MPI_NAMES = re.compile(
    "|".join(
        (
            *("mpich_shm_", "mpich_shar_"),
            *(r"sm_segment\.", r"vader_segment\.", "pmix-", "prte", "ucx_"),  # Open MPI
            *(r"\d+:\d+:\d+$", "fi_shm", "efa_shm", "psm2_shm", "psm3_shm", "Intel_MPI", "shm_impi", "impi_"),
        )
    )
)


def own_mpi_files() -> list[str]:
    """Return the paths of those that this process has mapped."""
    found = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            _, is_there, name = line.rstrip("\n").partition(f" {MPI_FOLDER}/")
            if is_there and MPI_NAMES.match(name) and not name.endswith(" (deleted)"):
                found.add(f"{MPI_FOLDER}/{name}")
    return sorted(found)


def remove_all(paths: list[str]) -> None:
    """Remove these files. Processes that have them mapped keep their memory."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
