"""What a keeper notes of an MPI library's files, and what the next launch makes of the notes that have no keeper."""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.strangers import NOBODY, needs_another_user

from phalanx.launch.mpi import leftover_records
from phalanx.launch.mpi.leftovers import SharedMemoryWatch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notes are; nobody else's are seen."""
    monkeypatch.setattr(leftover_records, "PLACE", str(tmp_path))
    return tmp_path / f"phalanx-mpi-{os.geteuid()}"


@pytest.fixture
def file() -> Iterator[Path]:
    """A file with a name of MPICH's."""
    path = Path(f"/dev/shm/mpich_shm_test{secrets.token_hex(4)}")
    yield path
    path.unlink(missing_ok=True)


def killed_keeper(file: Path, *, noted: bool = True, of_another: bool = False) -> None:
    """A keeper, and a rank that makes a file, which are both killed at once."""
    pid = os.fork()
    if not pid:
        watch = SharedMemoryWatch()
        with open(file, "xb+") as made:
            made.truncate(4096)
            if of_another:
                os.fchown(made.fileno(), NOBODY, NOBODY)
            if noted:
                watch.poll([os.getpid()])
        os._exit(9)  # without anything that it would do at its end
    os.waitpid(pid, 0)


def test_the_next_launch_removes_the_files_of_a_killed_one(folder: Path, file: Path) -> None:
    killed_keeper(file)
    assert file.exists()
    assert len(list(folder.iterdir())) == 1
    SharedMemoryWatch().close()
    assert not file.exists()
    assert not folder.exists()


@needs_another_user
def test_a_file_of_another_user_is_left(folder: Path, file: Path) -> None:
    killed_keeper(file, of_another=True)
    assert not folder.exists()
    SharedMemoryWatch().close()
    assert file.exists()


def test_a_file_that_a_process_holds_is_left_until_it_does_not(folder: Path, file: Path) -> None:
    killed_keeper(file)
    with open(file, "rb+") as opened, mmap.mmap(opened.fileno(), 4096):
        opened.close()
        SharedMemoryWatch().close()
        assert file.exists()
    SharedMemoryWatch().close()
    assert not file.exists()


def test_a_file_that_was_not_noted_or_is_another_one_by_now_is_left(folder: Path, file: Path) -> None:
    killed_keeper(file, noted=False)
    SharedMemoryWatch().close()
    assert file.exists()
    file.unlink()
    killed_keeper(file)
    other = file.with_name(f"{file.name}x")
    other.touch()
    other.rename(file)
    SharedMemoryWatch().close()
    assert file.exists()


def test_the_files_of_a_keeper_that_is_there_are_left(folder: Path, file: Path) -> None:
    watch = SharedMemoryWatch()
    with open(file, "xb"):
        watch.poll([os.getpid()])
    SharedMemoryWatch().close()
    assert file.exists()
    assert watch.remove() == [str(file)]
    assert not folder.exists()
    watch.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda said: {**said, "scope": ["pid:[1]", said["scope"][1]]},  # of another container: it may be in use there
        lambda said: {**said, "scope": [said["scope"][0], "another start"]},
        lambda said: {**said, "files": {"/dev/shm/../../etc/hosts": [0, 0], "/etc/hosts": [0, 0]}},
        lambda said: [said],
        lambda said: {"files": 3},
    ],
)
def test_a_note_of_something_else_removes_nothing(folder: Path, file: Path, change: object) -> None:
    killed_keeper(file)
    (note,) = folder.iterdir()
    note.write_text(json.dumps(change(json.loads(note.read_text()))))  # type: ignore[operator]
    SharedMemoryWatch().close()
    assert file.exists()
    assert Path("/etc/hosts").exists()


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, file: Path) -> None:
    killed_keeper(file)
    folder.chmod(0o777)
    SharedMemoryWatch().close()
    assert file.exists()
    record = leftover_records.Record()
    record.write({str(file): (1, 2)})
    assert len(list(folder.iterdir())) == 1
