"""The folder that an MPI launcher makes in TMPDIR for its processes on a host, and what makes its removal safe.

Of the launchers that Phalanx knows, Open MPI's has one (``/tmp/ompi.2857``), whose name ends in the id of the process
that made it: mpirun, or its daemon on another host. That process removes the folder, unless it is killed. Others remove
it if three things hold together: the path leads to the same folder of the same user, not to a symbolic link or to a
folder that has come in its place; the name still fits its owner; and the owner has ended, so nobody uses the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass

from phalanx.system import processes
from phalanx.system.process_use import has_ended, process_use, start_of

__all__ = ["SessionFolder"]

# An absolute path whose last part ends in a process id.
_PATH = re.compile(r"/[^\0]*\.([1-9]\d{0,6})")


@dataclass(frozen=True)
class SessionFolder:
    """A session folder, as it was seen while its owner ran.

    Attributes:
        path: where it is.
        device, inode: which folder it is.
        owner: the id of the process that made it.
        began: when that process was started, in clock ticks after the boot.

    Raises:
        ValueError: the path does not fit the owner.
    """

    path: str
    device: int
    inode: int
    owner: int
    began: int

    def __post_init__(self) -> None:
        os.fsencode(self.path)  # raises a ValueError if no file can have this name
        if _owner_in(self.path) != self.owner:
            raise ValueError(f"the path {self.path} does not end in the process id {self.owner}")

    @staticmethod
    def of_launcher(path: str) -> SessionFolder | None:
        """The folder of the MPI launcher that has started this process.

        Args:
            path: the folder, as the launcher says; empty if it says nothing.

        Returns:
            None if this user has no such folder, or if this process does not descend from the one that made it.
        """
        owner = _owner_in(path)
        if owner not in _ancestors():
            return None
        began = start_of(owner)
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if began and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                return SessionFolder(path, status.st_dev, status.st_ino, owner, began)
        return None

    def owner_has_ended(self, *, rebooted: bool = False) -> bool:
        """Whether the process that made it has ended.

        Args:
            rebooted: whether the machine has been started anew since the folder was seen.
        """
        if rebooted:
            # A process of that id is another one, but perhaps a launcher too: its folder would have the same name, and
            # in a file system that was made anew even the same inode.
            return process_use(self.owner) is None
        return has_ended(self.owner, self.began)

    def remove(self, *, rebooted: bool = False) -> bool:
        """Remove it, if it is still the same folder and its owner has ended.

        Args:
            rebooted: as above.

        Returns:
            Whether it is gone. False if its owner runs, or if it cannot be removed.
        """
        parent, name = os.path.split(self.path)
        with contextlib.ExitStack() as opened:
            try:
                above = _open_folder(opened, parent)
                folder = _open_folder(opened, name, above)
            except (FileNotFoundError, NotADirectoryError):
                return True  # a symbolic link in its place is one of these, too
            except OSError:
                return False
            if not self._is(os.fstat(folder), rebooted):
                return True
            if not self.owner_has_ended(rebooted=rebooted):
                return False
            # By descriptors, so that nothing is removed elsewhere, whatever is renamed meanwhile.
            with contextlib.suppress(OSError):
                _empty(folder)
                os.rmdir(name, dir_fd=above)
                return True
            with contextlib.suppress(FileNotFoundError):
                return not self._is(os.lstat(self.path), rebooted)
            return True  # another process was quicker

    def _is(self, status: os.stat_result, rebooted: bool) -> bool:
        # The numbers of devices are given anew at every start of a machine.
        same = status.st_ino == self.inode and (rebooted or status.st_dev == self.device)
        return same and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _owner_in(path: str) -> int:
    """The process id in which the path of a session folder ends; 0 if it does not."""
    found = _PATH.fullmatch(path)
    return int(found[1]) if found is not None else 0


def _ancestors() -> set[int]:
    found: set[int] = set()
    pid = os.getppid()
    while pid and pid not in found:
        found.add(pid)
        pid = processes.parent_of(pid)
    return found


def _open_folder(opened: contextlib.ExitStack, path: str, above: int | None = None) -> int:
    """Open a folder. A symbolic link is refused if the folder is named within an open one (``above``)."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if above is not None else 0)
    descriptor = os.open(path, flags, dir_fd=above)
    opened.callback(os.close, descriptor)
    return descriptor


def _empty(folder: int) -> None:
    """Remove what is in an open folder, as far as that is possible; symbolic links themselves, not what they name.

    Other processes may do the same at the same time. So each entry is tried, whatever has become of the one before.
    """
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            _empty(_open_folder(opened, name, folder))
            os.rmdir(name, dir_fd=folder)
