"""Notes on disk of the files that an MPI library has in /dev/shm, for when nobody of a job is left to remove them.

If every process of a job is killed at once, its keepers too, the files stay. So a keeper writes down each file that its
rank was seen to hold, and holds a lock (flock) on what it writes, which the kernel frees when the keeper ends, however
that is. The keeper that starts next as the same user on this host finds the notes without a lock. It removes the files
that are still the same ones (device, inode and name) and that no process holds. What is in no note is never touched: of
such a file nobody can know whose it is.

A note belongs to one keeper, which alone writes it, and deletes it when it has removed its files. A keeper that dies
before it has written leaves files that nobody removes. One that dies while it writes leaves a note that cannot be read,
which is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence

__all__ = ["PLACE", "Record", "remove_abandoned"]

# Not TMPDIR, which a batch system sets for each job.
PLACE = "/tmp"
_ENTRY = re.compile(r"/dev/shm/[^/\0]{1,255}")
_LONGEST = 1 << 20

Files = Mapping[str, Sequence[int]]
Remove = Callable[[dict[str, tuple[int, int]]], bool]


def _folder() -> str:
    return os.path.join(PLACE, f"phalanx-mpi-{os.geteuid()}")


def _scope() -> list[str]:
    """Where process ids and the files of /dev/shm mean the same: this start of this machine, and this namespace."""
    scope = [os.readlink("/proc/self/ns/pid")]
    with open("/proc/sys/kernel/random/boot_id") as file:
        scope.append(file.read().strip())
    return scope


class Record:
    """The note of one keeper. Without a place where it can be written, as on a full disk, there is none."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._path = ""

    def write(self, files: Files) -> None:
        """Write these down, in place of what was written before; nothing means to delete the note."""
        with contextlib.suppress(OSError):
            if not files:
                self.close()
                return
            if self._descriptor < 0:
                self._open()
            data = json.dumps({"scope": _scope(), "files": {path: [*key] for path, key in files.items()}}).encode()
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))

    def _open(self) -> None:
        for _ in range(10):
            with contextlib.suppress(FileExistsError):
                os.mkdir(_folder(), 0o700)
            if not _is_own(_folder()):
                raise PermissionError(_folder())
            path = os.path.join(_folder(), secrets.token_hex(8))
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # another keeper has deleted the folder, which was empty
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Somebody may have looked for abandoned notes between these two calls, and deleted this one.
            if os.fstat(descriptor).st_nlink:
                self._descriptor, self._path = descriptor, path
                return
            os.close(descriptor)
        raise FileNotFoundError(_folder())

    def close(self) -> None:
        """Delete the note."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = -1
            _leave_folder()


def remove_abandoned(remove: Remove) -> None:
    """Have the files removed that are in notes whose keepers have ended, and delete these notes.

    Args:
        remove: removes these files, by path with device and inode, if they are still the same and nobody holds them;
            whether nobody holds any.
    """
    folder = _folder()
    with contextlib.suppress(OSError):
        if not _is_own(folder):
            return
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                _take_over(os.path.join(folder, name), remove)
        _leave_folder()


def _take_over(path: str, remove: Remove) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the keeper is there
        scope, files = _read(os.pread(descriptor, _LONGEST, 0))
        if scope is None or scope == _scope():
            if remove(files):  # else a process of the job is still about to end, and the next launch sees to it
                os.unlink(path)
        elif scope[1:] != _scope()[1:]:
            os.unlink(path)  # from before the machine was started, or of another one, whose files these are not
    finally:
        os.close(descriptor)


def _read(data: bytes) -> tuple[list[str] | None, dict[str, tuple[int, int]]]:
    """What a note says; no scope and no files if it cannot be read."""
    try:
        said = json.loads(data)
        files = {path: (int(key[0]), int(key[1])) for path, key in said["files"].items() if _ENTRY.fullmatch(path)}
        return [str(part) for part in said["scope"]], files
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None, {}


def _is_own(folder: str) -> bool:
    """Whether the folder is this user's, and nobody else can write there."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _leave_folder() -> None:
    with contextlib.suppress(OSError):
        os.rmdir(_folder())  # fails if there is another note in it
