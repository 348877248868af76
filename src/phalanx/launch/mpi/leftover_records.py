"""Notes on disk of what an MPI library and its launcher have on a host, for when nobody of a job is left to remove it.

If every process of a job is killed at once, its keepers too, or the machine stops, files in /dev/shm and the launcher's
session folder stay. So a keeper writes down that folder, and each file that its rank was seen to hold, and holds a lock
(flock) on what it writes, which the kernel frees when the keeper ends, however that is. The keeper that starts next as
the same user on this host finds the notes without a lock. It removes the files that are still the same ones (device,
inode and name) and that no process holds, and the folder as ``session_folder.py`` says. What is in no note is never
touched: of such a file nobody can know whose it is.

A note belongs to one keeper, which alone writes it, and deletes it when it has removed its files. A keeper that dies
before it has written leaves files that nobody removes. One that dies while it writes leaves a note that cannot be read,
which is deleted. The relay has a note too, while the keepers have left and the launcher has not ended.

/dev/shm is empty when the machine has been started anew. TMPDIR need not be, so a note from before that still counts
for the folder, if the host bears the same name: a TMPDIR, and /tmp as well, may be shared with other machines.
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
from dataclasses import asdict, dataclass

from phalanx.launch.mpi.session_folder import SessionFolder
from phalanx.system.foreign_values import checked, read_json
from phalanx.system.host import machine_name

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
    """The note of one keeper, or of the relay. Without a place where it can be written, as on a full disk, it is none.

    Args:
        folder: the session folder of the MPI launcher, which is written down at once; None if there is none.

    Attributes:
        folder: as given.
        descriptor: the open note, whose lock says that its process is there; negative if there is none.
    """

    def __init__(self, folder: SessionFolder | None = None) -> None:
        self.folder = folder
        self.descriptor = -1
        self._path = ""
        self.write({})

    def write(self, files: Files) -> None:
        """Write these down, in place of those that were written before; the note is deleted if it has no folder too."""
        with contextlib.suppress(OSError):
            if not files and self.folder is None:
                self.close()
                return
            if self.descriptor < 0:
                self._open()
            said = {
                "scope": _scope(),
                "host": machine_name(),
                "files": {path: [*key] for path, key in files.items()},
                "folder": None if self.folder is None else asdict(self.folder),
            }
            data = json.dumps(said).encode()
            os.pwrite(self.descriptor, data, 0)
            os.ftruncate(self.descriptor, len(data))

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
                self.descriptor, self._path = descriptor, path
                return
            os.close(descriptor)
        raise FileNotFoundError(_folder())

    def close(self) -> None:
        """Delete the note."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self.descriptor)
            self.descriptor = -1
            _leave_folder()

    def abandon(self) -> None:
        """Keep the note, and let go of its lock: somebody else holds it, or is to do what is left to do."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def remove_abandoned(remove: Remove) -> None:
    """Remove what is in notes whose keepers have ended, and delete these notes.

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
        note = _read(os.pread(descriptor, _LONGEST, 0))
        # If not all can be removed, a process of the job is still about to end, and the next launch sees to it.
        if note is None or _remove_noted(note, remove):
            os.unlink(path)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Note:
    scope: list[str]
    host: str
    files: dict[str, tuple[int, int]]
    folder: SessionFolder | None


def _remove_noted(note: _Note, remove: Remove) -> bool:
    """Remove what a note names, as far as it is known to be abandoned; whether the note is of no use any more."""
    scope = _scope()
    if note.scope == scope:
        unheld = remove(note.files)
        return (note.folder is None or note.folder.remove()) and unheld
    if note.scope[1:] == scope[1:]:
        return False  # of another container of this machine: what it names may be in use there
    # From before the machine was started, or of another one, whose files and folders these are not.
    return note.folder is None or note.host != machine_name() or note.folder.remove(rebooted=True)


def _read(data: bytes) -> _Note | None:
    """What a note says; None if it cannot be read."""
    try:
        said = read_json(data)
        files = {path: (int(key[0]), int(key[1])) for path, key in said["files"].items() if _ENTRY.fullmatch(path)}
        folder = None if said["folder"] is None else checked(SessionFolder, said["folder"])
        return _Note([str(part) for part in said["scope"]], str(said["host"]), files, folder)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def _is_own(folder: str) -> bool:
    """Whether the folder is this user's, and nobody else can write there."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _leave_folder() -> None:
    with contextlib.suppress(OSError):
        os.rmdir(_folder())  # fails if there is another note in it
