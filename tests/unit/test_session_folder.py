"""The folder of an MPI launcher that was killed: who removes it, and which folders nobody removes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import wait_for

from phalanx.launch.mpi import departure, leftover_records
from phalanx.launch.mpi.leftover_records import Record
from phalanx.launch.mpi.leftovers import SharedMemoryWatch
from phalanx.launch.mpi.session_folder import SessionFolder


class Launcher:
    """An MPI launcher that runs until it is killed, and its keeper, which notes the launcher's folder and is killed.

    Args:
        temporary: where its folder is made.
    """

    def __init__(self, temporary: Path) -> None:
        ready, begun = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(ready)
                self._run(temporary / f"ompi.{os.getpid()}")
                os.close(begun)
                signal.pause()
            finally:
                os._exit(9)
        os.close(begun)
        os.read(ready, 1)
        os.close(ready)
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
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notes are; nobody else's are seen."""
    monkeypatch.setattr(leftover_records, "PLACE", str(tmp_path))
    return tmp_path / f"phalanx-mpi-{os.geteuid()}"


@pytest.fixture
def launcher(notes: Path, tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.kill()


def next_launch() -> None:
    SharedMemoryWatch().close()


def change(notes: Path, changed: Callable[[dict[str, Any]], object]) -> None:
    """Have the one note say something else."""
    (note,) = notes.iterdir()
    said = json.loads(note.read_text())
    changed(said)
    note.write_text(json.dumps(said))


def other_boot(said: dict[str, Any]) -> None:
    # Process ids are counted from the beginning then, in namespaces with other numbers, and devices may be too.
    said["scope"] = ["pid:[1]", "another start"]
    said["folder"]["device"] += 1
    said["folder"]["began"] += 1


def test_the_next_launch_removes_it(notes: Path, launcher: Launcher, tmp_path: Path) -> None:
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


def test_it_is_left_while_the_launcher_runs(notes: Path, launcher: Launcher) -> None:
    next_launch()
    assert (launcher.folder / "1" / "session").exists()
    launcher.kill()
    next_launch()
    assert not launcher.folder.exists()


def test_it_is_removed_after_the_machine_was_started_anew(notes: Path, launcher: Launcher) -> None:
    change(notes, other_boot)
    next_launch()
    assert (launcher.folder / "1" / "session").exists()  # a process of that id may be a launcher of today
    launcher.kill()
    next_launch()
    assert not launcher.folder.exists()
    assert not notes.exists()


def test_that_of_another_machine_is_left(notes: Path, launcher: Launcher) -> None:
    launcher.kill()
    change(notes, other_boot)
    change(notes, lambda said: said.update(host="another"))
    next_launch()
    assert (launcher.folder / "1" / "session").exists()


def test_that_of_another_container_is_left(notes: Path, launcher: Launcher) -> None:
    launcher.kill()
    change(notes, lambda said: said.update(scope=["pid:[1]", said["scope"][1]]))
    next_launch()
    assert (launcher.folder / "1" / "session").exists()
    assert len([*notes.iterdir()]) == 1


@pytest.mark.parametrize("changed", [lambda _: None, other_boot])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_has_come_in_its_place_is_left(
    notes: Path, launcher: Launcher, changed: Callable[[dict[str, Any]], None], is_link: bool
) -> None:
    launcher.kill()
    change(notes, changed)
    moved = launcher.folder.with_name("moved")
    launcher.folder.rename(moved)
    if is_link:
        launcher.folder.symlink_to(moved)
    else:
        launcher.folder.mkdir()
    next_launch()
    assert launcher.folder.is_symlink() == is_link
    assert launcher.folder.exists()
    assert (moved / "1" / "session").exists()
    assert not notes.exists()


def test_a_folder_on_another_device_is_another_one(notes: Path, launcher: Launcher) -> None:
    launcher.kill()
    change(notes, lambda said: said["folder"].update(device=said["folder"]["device"] + 1))
    next_launch()
    assert launcher.folder.exists()


def test_that_of_another_user_is_left(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.kill()
    status = launcher.folder.stat()
    folder = SessionFolder(str(launcher.folder), status.st_dev, status.st_ino, launcher.pid, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: status.st_uid + 1)
        assert folder.remove()
    assert (launcher.folder / "1" / "session").exists()
    assert folder.remove()
    assert not launcher.folder.exists()


@pytest.mark.parametrize(
    "said",
    [
        {"owner": 1},
        {"owner": -1, "path": "/tmp/ompi.-1"},
        {"owner": 1 << 40, "path": f"/tmp/ompi.{1 << 40}"},
        {"path": 3},
        {"path": "ompi.{}"},
        {"path": "/tmp/\0ompi.{}"},
        {"path": "/tmp/\ud800ompi.{}"},
        {"inode": "7"},
        {"more": 1},
    ],
)
def test_a_note_of_something_else_removes_nothing(notes: Path, launcher: Launcher, said: dict[str, Any]) -> None:
    launcher.kill()
    fitting = {key: value.format(launcher.pid) if isinstance(value, str) else value for key, value in said.items()}
    change(notes, lambda whole: whole["folder"].update(fitting))
    next_launch()
    assert (launcher.folder / "1" / "session").exists()
    assert not notes.exists()


def test_only_an_ancestor_of_this_process_is_known_to_own_one(launcher: Launcher, tmp_path: Path) -> None:
    own = tmp_path / f"ompi.{os.getppid()}"
    assert SessionFolder.of_launcher(str(own)) is None
    own.symlink_to(launcher.folder)
    assert SessionFolder.of_launcher(str(own)) is None
    own.unlink()
    own.mkdir()
    found = SessionFolder.of_launcher(str(own))
    assert found is not None
    assert (found.path, found.owner) == (str(own), os.getppid())
    assert not found.remove()
    assert own.exists()
    assert SessionFolder.of_launcher(str(launcher.folder)) is None
    assert SessionFolder.of_launcher("") is None


class _Relay:
    def finish(self, timeout_s: float) -> None:
        pass


@pytest.mark.parametrize("connected", [False, True])
def test_a_keeper_without_a_relay_sees_to_it_that_the_folder_goes(
    notes: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, connected: bool
) -> None:
    """The launcher waits for the end of the keeper, so the keeper cannot wait for the launcher's."""
    monkeypatch.setattr(departure, "_LAUNCHER_S", 200.0)
    (note,) = notes.iterdir()
    said = json.loads(note.read_text())["folder"]
    note.unlink()
    keeper = os.fork()
    if not keeper:
        try:
            record = Record(SessionFolder(**said))
            departure.leave(SharedMemoryWatch(record), record, _Relay(), connected=connected)  # type: ignore[arg-type]
        finally:
            os._exit(70)
    _, status = os.waitpid(keeper, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if connected else 1)
    assert (launcher.folder / "1" / "session").exists()
    assert notes.exists() == (not connected)  # a relay that is there has a note of its own by then
    launcher.kill()
    if not connected:
        wait_for(lambda: not launcher.folder.exists() and not notes.exists())


def test_several_keepers_may_remove_it_at_the_same_time(launcher: Launcher) -> None:
    for name in range(300):
        (launcher.folder / "1" / f"{name}").mkdir(exist_ok=True)
        (launcher.folder / "1" / f"{name}" / "file").touch()
    status = launcher.folder.stat()
    folder = SessionFolder(str(launcher.folder), status.st_dev, status.st_ino, launcher.pid, 1)
    keepers = []
    for _ in range(4):
        keepers.append(os.fork())
        if not keepers[-1]:
            os._exit(0 if folder.remove() else 1)
    assert [os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]) for keeper in keepers] == [0] * 4
    assert not launcher.folder.exists()
