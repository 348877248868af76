"""Files that appear whole or not at all, and of which nothing stays if their writer is killed.

Where the file system can, the file has no name while it is written (O_TMPFILE), so the kernel removes it with its
writer. Elsewhere, as on NFS, it bears another name beside its own. Then, and in the moment between its first name and
its last, a killed writer leaves it; whoever writes the same file next removes it. Folders in which several files are
made ready are removed in the same way.

What is not ready is told from what is left by a lock (flock), which the kernel frees when its holder ends, however that
is: its writer holds it as long as the other name is there. A writer that dies before it has the lock leaves an empty
file, which anybody may remove. One that finds its lock taken, or its file removed, by one who looks just then, takes
another name. On a file system without locks nothing is removed, as nobody can know whether it is still written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["check_creatable", "folder_for_a_while", "remove_unfinished", "whole_file"]

_SUFFIX = ".part"
_MODE = 0o666  # the umask takes off what it takes off files that open() makes


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write, and to read again, which takes the place of ``target`` at the end of the block.

    It is on the disk before it does. After an exception, ``target`` is as it was.

    Args:
        target: the file; a symbolic link itself would be replaced.

    Raises:
        OSError: it cannot be written.
    """
    remove_unfinished(target)
    name: Path | None = None
    with contextlib.ExitStack() as held:
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, folder)
        file = _unnamed(target.parent)
        if file is None:
            file, name = _named(target)
        held.enter_context(file)
        try:
            yield file
            _flush(file)
            if name is None:
                name = _linked(file, folder, target)
            if name is None:
                copy, name = _named(target)
                held.enter_context(copy)
                file.seek(0)
                shutil.copyfileobj(file, copy)
                _flush(copy)
            name.replace(target)
            os.fsync(folder)
        finally:  # after the replacement there is none
            if name is not None:
                name.unlink(missing_ok=True)


def check_creatable(target: Path) -> None:
    """Find out whether a file can be made beside ``target``.

    Raises:
        OSError: no.
    """
    remove_unfinished(target)
    file, name = _named(target)
    with file:
        name.unlink()


def remove_unfinished(target: Path) -> None:
    """Remove what writers of ``target`` have left that were killed. Whatever cannot be removed stays."""
    _remove_left(target.parent, f".{target.name}.")


@contextlib.contextmanager
def folder_for_a_while(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder, which is removed at the end of the block with all that is in it.

    Those of processes that were killed are removed first.

    Args:
        parent: where it is made.
        prefix: how its name begins, by which those that are left are known.

    Raises:
        OSError: it cannot be made.
    """
    _remove_left(parent, prefix)
    with contextlib.ExitStack() as held:
        while True:
            folder = parent / f"{prefix}{secrets.token_hex(8)}{_SUFFIX}"
            folder.mkdir(0o700)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, descriptor)
            if _is_ours(descriptor, folder):
                break
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _unnamed(folder: Path) -> BinaryIO | None:
    """A file without a name, locked for when it gets one; None if the file system has none."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.fdopen(descriptor, "w+b")


def _named(target: Path) -> tuple[BinaryIO, Path]:
    """A locked file beside ``target``, and its name."""
    while True:
        name = _name_beside(target)
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, _MODE)
        if _is_ours(descriptor, name):
            return os.fdopen(descriptor, "w+b"), name
        os.close(descriptor)


def _linked(file: BinaryIO, folder: int, target: Path) -> Path | None:
    """Give a file without a name one beside ``target``; None if the file system cannot."""
    name = _name_beside(target)
    try:
        # With a folder's descriptor Python follows the link to the file; without one it does not.
        os.link(f"/proc/self/fd/{file.fileno()}", name.name, dst_dir_fd=folder, follow_symlinks=True)
    except OSError:
        return None
    return name


def _name_beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}{_SUFFIX}")


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _is_ours(descriptor: int, path: Path) -> bool:
    """Lock what was just made; False if somebody has taken it for what a killed writer left."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # nobody has locks here, so nobody removes it
    return _is_at(descriptor, path)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove_left(folder: Path, prefix: str) -> None:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(prefix) and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    _remove_if_left(Path(entry.path))


def _remove_if_left(path: Path) -> None:
    kind = path.lstat()
    if kind.st_uid != os.geteuid() or not (stat.S_ISREG(kind.st_mode) or stat.S_ISDIR(kind.st_mode)):
        return
    # NFS locks for writing only what is open for it.
    is_folder = stat.S_ISDIR(kind.st_mode)
    descriptor = os.open(path, (os.O_RDONLY if is_folder else os.O_RDWR) | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, path):
            if is_folder:
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
    finally:
        os.close(descriptor)
