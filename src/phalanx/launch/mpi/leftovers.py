"""Shared memory that an MPI library leaves in /dev/shm when its process is ended before it finalises.

MPICH leaves 2 MB there each time, Open MPI and Intel MPI 16 MB a rank, until /dev/shm is full. Since people also put
files of their own there, a file is removed only if three things hold together: it was not there before the rank began;
a process of the rank was seen with it open or mapped (the same inode, not only the same name); and its name is one that
these libraries give. Files are recorded when inotify reports one, and again before the launcher ends the rank. So a
rank killed by somebody else is covered too, except for files it created in the instant before.

What is recorded is also written down for the next launch of this user (``leftover_records.py``), which finds it if the
whole job has been killed, keepers and all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence

from phalanx.launch.mpi.leftover_records import Record, remove_abandoned
from phalanx.system.mpi_files import FOLDER, NAMES
from phalanx.system.processes import await_ends_of

__all__ = ["SharedMemoryWatch"]

# Beside the libraries' names those of torch's workers and of POSIX semaphores.
_NAMES = re.compile(rf"{NAMES.pattern}|torch_\d+_|sem\.")
_IN_CREATE, _IN_MOVED_TO, _IN_NONBLOCK, _IN_CLOEXEC = 0x100, 0x80, 0o4000, 0o2000000
_libc = ctypes.CDLL(None, use_errno=True)

# Path, and the device and inode it had.
Files = dict[str, tuple[int, int]]


class SharedMemoryWatch:
    """Remembers which files of /dev/shm the processes of one rank have made and used.

    ``descriptor`` becomes readable when a file appears; it is None if the kernel has no more such descriptors.

    Args:
        record: where the files are written down; by default a note of its own.
    """

    def __init__(self, record: Record | None = None) -> None:
        remove_abandoned(_remove_abandoned)
        self._record = record or Record()
        self._before = {(entry.stat_device, entry.inode) for entry in _entries()}
        self._seen: Files = {}
        self.descriptor: int | None = None
        number = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if number >= 0 and _libc.inotify_add_watch(number, FOLDER.encode(), _IN_CREATE | _IN_MOVED_TO) < 0:
            os.close(number)
            number = -1
        if number >= 0:
            self.descriptor = number

    def drain(self) -> None:
        """Read and discard the kernel's notices; the caller calls :meth:`poll` next."""
        if self.descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.descriptor, 1 << 14):
                    pass

    def poll(self, pids: Iterable[int]) -> Files:
        """Note which of the new files these processes hold; return those that were not known yet."""
        new = {}
        for entry in _entries():
            key = entry.stat_device, entry.inode
            if key not in self._before and _NAMES.match(entry.name) and self._seen.get(entry.path) != key:
                new[key] = entry.path
        found: Files = {}
        for pid in pids if new else ():
            found |= {new[key]: key for key in _held(pid) & new.keys()}
        self._seen |= found
        if found:
            self._record.write(self._seen)
        return found

    def add(self, files: Mapping[str, Sequence[int]]) -> None:
        """Take over what another watch on this host has found, if its process cannot remove it any more."""
        for path, (device, inode) in files.items():
            self._seen.setdefault(path, (device, inode))
        self._record.write(self._seen)

    def remove(self, patience_s: float = 0.0) -> list[str]:
        """Remove the recorded files that no living process holds; return their paths.

        Args:
            patience_s: how long to wait for the ends of the processes that hold files.
        """
        until = time.monotonic() + patience_s
        removed, holders = _remove_unheld(self._seen)
        while holders and time.monotonic() < until:
            await_ends_of(holders, until - time.monotonic())
            more, holders = _remove_unheld(self._seen)
            removed += more
        # What others hold is theirs to remove: ranks of this host, whose keepers have written it down as well.
        self._record.write({})
        return removed

    def left(self) -> bool:
        """Whether a recorded file is still there."""
        return any(_identity(path) == key for path, key in self._seen.items())

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _remove_abandoned(files: Files) -> bool:
    """Remove files of a job of which nobody is left; whether nothing holds one of them back."""
    _, holders = _remove_unheld({path: key for path, key in files.items() if _NAMES.match(os.path.basename(path))})
    return not holders


def _remove_unheld(files: Files) -> tuple[list[str], list[int]]:
    """Remove those of these files that nobody holds now. Returns their paths, and the processes that hold others."""
    still = {path: key for path, key in files.items() if _identity(path) == key}
    if not still:
        return [], []
    wanted = set(still.values())
    held: set[tuple[int, int]] = set()
    holders = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        found = _held(pid) & wanted
        held |= found
        holders += [pid] if found else []
    removed = []
    for path, key in still.items():
        if key not in held and _identity(path) == key:
            with contextlib.suppress(OSError):
                os.unlink(path)
                removed.append(path)
    return removed, holders


class _Entry:
    def __init__(self, entry: os.DirEntry[str], found: os.stat_result) -> None:
        self.name = entry.name
        self.path = entry.path
        self.stat_device = found.st_dev
        self.inode = found.st_ino


def _entries() -> list[_Entry]:
    found = []
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid():
                    found.append(_Entry(entry, status))
    return found


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _held(pid: int) -> set[tuple[int, int]]:
    """Device and inode of everything in /dev/shm that a process has mapped or open."""
    held: set[tuple[int, int]] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        for line in file:
            if b" /dev/shm/" in line:
                _, _, _, device, inode, _ = line.split(maxsplit=5)
                major, _, minor = device.partition(b":")
                held.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = f"/proc/{pid}/fd/{name}"
                if os.readlink(path).startswith(FOLDER + "/"):
                    status = os.stat(path)
                    held.add((status.st_dev, status.st_ino))
    return held
