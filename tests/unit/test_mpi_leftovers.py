"""What an MPI library has left of a job whose processes were all killed: the next launch removes that, and no more."""

from __future__ import annotations

import mmap
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.strangers import NOBODY, needs_another_user

from phalanx.launch.mpi import leftover_records
from phalanx.launch.mpi.leftover_records import Record
from phalanx.launch.mpi.leftovers import SharedMemoryWatch
from phalanx.launch.mpi.session_folder import SessionFolder
from phalanx.system.processes import is_ending


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notes are; nobody else's are seen."""
    monkeypatch.setattr(leftover_records, "PLACE", str(tmp_path))
    return tmp_path / f"phalanx-mpi-{os.geteuid()}"


@pytest.fixture
def file() -> Iterator[Path]:
    """A file with a name of MPICH's."""
    path = Path(f"/dev/shm/mpich_shm_test{secrets.token_hex(4)}")
    yield path
    path.unlink(missing_ok=True)


def next_launch() -> None:
    SharedMemoryWatch().close()


def killed_keeper(file: Path, *, of_another: bool = False) -> None:
    """A keeper, and a rank that makes a file, which are both killed at once."""
    pid = os.fork()
    if not pid:
        watch = SharedMemoryWatch()
        with open(file, "xb+") as made:
            made.truncate(4096)
            if of_another:
                os.fchown(made.fileno(), NOBODY, NOBODY)
            watch.poll([os.getpid()])
        os._exit(9)  # without anything that it would do at its end
    os.waitpid(pid, 0)


def test_file_of_a_killed_job_is_removed_once_nobody_holds_it(notes: Path, file: Path) -> None:
    killed_keeper(file)
    with open(file, "rb+") as opened, mmap.mmap(opened.fileno(), 4096):
        opened.close()
        next_launch()
        assert file.exists()
        assert len(list(notes.iterdir())) == 1
    next_launch()
    assert not file.exists()
    assert not notes.exists()


@pytest.mark.parametrize("of_another", [False, pytest.param(True, marks=needs_another_user)])
def test_file_of_another_user_or_another_file_of_the_name_is_left(notes: Path, file: Path, of_another: bool) -> None:
    killed_keeper(file, of_another=of_another)
    if not of_another:
        other = file.with_name(f"{file.name}x")
        other.touch()
        other.rename(file)
    next_launch()
    assert file.exists()
    assert not notes.exists()


@pytest.mark.usefixtures("notes")
def test_only_what_the_rank_has_made_is_removed_and_only_by_its_keeper(file: Path) -> None:
    before, other, precious = (file.with_name(f"{file.name}{end}") for end in ("_before", "_other", ".npy"))
    precious = precious.with_name(f"phx-{precious.name}")
    before.write_bytes(b"x")
    watch = SharedMemoryWatch()
    for path in (file, other, precious):
        path.write_bytes(b"x")
    with before.open(), file.open() as opened, precious.open():
        watch.poll([os.getpid()])
        assert watch.remove() == []  # this process holds it
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[opened.fileno()])  # until its input ends
    try:
        next_launch()
        assert watch.remove(0.1) == []
        assert file.exists()
        threading.Thread(target=holder.communicate).start()
        assert watch.remove(200) == [str(file)]
        assert is_ending(holder.pid)
        assert not watch.left()
        watch.close()
        assert all(path.exists() for path in (before, other, precious))
    finally:
        holder.kill()
        holder.wait()
        for path in (before, other, precious):
            path.unlink(missing_ok=True)


class Launcher:
    """An MPI launcher that runs until it is killed, and its keeper, which notes the launcher's folder and is killed."""

    def __init__(self, temporary: Path) -> None:
        ready, begun = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                self._run(temporary / f"ompi.{os.getpid()}")
                os.write(begun, b"x")
                signal.pause()
            finally:
                os._exit(9)
        os.read(ready, 1)
        for end in (ready, begun):
            os.close(end)
        self.folder = temporary / f"ompi.{self.pid}"
        self._killed = False

    def _run(self, folder: Path) -> None:
        (folder / "1" / "0").mkdir(parents=True)
        (folder / "1" / "session").write_text("x")
        keeper = os.fork()
        if not keeper:
            Record(SessionFolder.of_launcher(str(folder)))
            os._exit(9)  # without anything that it would do at its end
        os.waitpid(keeper, 0)

    def kill(self) -> None:
        if not self._killed:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._killed = True


@pytest.fixture
def launcher(notes: Path, tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.kill()


def test_folder_of_a_launcher_is_removed_once_it_has_ended(notes: Path, launcher: Launcher, tmp_path: Path) -> None:
    """What its links lead to is left."""
    next_launch()
    assert (launcher.folder / "1" / "session").exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (launcher.folder / "1" / "link").symlink_to(precious)
    (launcher.folder / "file").symlink_to(precious / "file")
    launcher.kill()
    next_launch()
    assert not launcher.folder.exists()
    assert not notes.exists()
    assert (precious / "file").exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_folder_that_has_taken_the_place_or_is_anothers_is_left(
    notes: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    launcher.kill()
    status = launcher.folder.stat()
    folder = SessionFolder(str(launcher.folder), status.st_dev, status.st_ino, launcher.pid, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: status.st_uid + 1)
        assert folder.remove()
    moved = launcher.folder.with_name("moved")
    launcher.folder.rename(moved)
    if is_link:
        launcher.folder.symlink_to(moved)
    else:
        launcher.folder.mkdir()
    next_launch()
    assert launcher.folder.exists()
    assert (moved / "1" / "session").exists()
    assert not notes.exists()
