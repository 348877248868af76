"""Files that appear whole or not at all, and of which nothing stays if their writer is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.system import whole_files
from phalanx.system.whole_files import check_creatable, folder_for_a_while, remove_unfinished, whole_file


@pytest.fixture(params=["without a name", "with another name"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the file is held while it is written; NFS has no files without a name."""
    if request.param == "with another name":
        monkeypatch.setattr(whole_files, "_unnamed", lambda folder: None)
    return str(request.param)


def write(target: Path, content: bytes) -> None:
    with whole_file(target) as file:
        file.write(content)


def killed_in(body: Callable[[], object]) -> None:
    """Run it in a process of its own, which kills itself in there."""
    pid = os.fork()
    if not pid:
        try:
            body()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def has_files_without_a_name(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR))
    except OSError:
        return False
    return True


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.usefixtures("way")
def test_it_takes_the_place_of_the_earlier_one_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "run.pt"
    for content in (b"first", b"second"):
        before = target.read_bytes() if target.exists() else None
        with whole_file(target) as file:
            file.write(content[:3])
            file.flush()
            assert (target.read_bytes() if target.exists() else None) == before
            file.write(content[3:])
            file.seek(0)
            assert file.read() == content
        assert target.read_bytes() == content
        assert names(tmp_path) == ["run.pt"]


@pytest.mark.usefixtures("way")
def test_it_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "usual").write_bytes(b"")
    write(tmp_path / "whole", b"")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_the_earlier_one_is_there_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    write(tmp_path / "run.pt", b"first")
    with pytest.raises(error), whole_file(tmp_path / "run.pt") as file:
        file.write(b"second")
        raise error
    assert (tmp_path / "run.pt").read_bytes() == b"first"
    assert names(tmp_path) == ["run.pt"]


def test_nothing_stays_of_one_whose_writer_is_killed(tmp_path: Path, way: str) -> None:
    """Where the file system makes files without a name at once, elsewhere as soon as it is written again."""
    target = tmp_path / "run.pt"

    def dies() -> None:
        with whole_file(target) as file:
            file.write(bytes(1 << 16))
            file.flush()
            kill()

    stays = way == "with another name" or not has_files_without_a_name(tmp_path)
    for _ in range(3):
        killed_in(dies)
        assert len(names(tmp_path)) == int(stays)
    write(target, b"whole")
    assert names(tmp_path) == ["run.pt"]


@pytest.mark.usefixtures("way")
def test_nothing_stays_if_it_is_killed_between_its_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run.pt"
    write(target, b"first")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", kill)
        killed_in(lambda: write(target, b"second"))
    assert len(names(tmp_path)) == 2
    assert target.read_bytes() == b"first"
    check_creatable(target)
    assert names(tmp_path) == ["run.pt"]


@pytest.mark.usefixtures("way")
def test_writers_of_one_file_take_nothing_from_each_other(tmp_path: Path) -> None:
    target = tmp_path / "run.pt"
    with whole_file(target) as first:
        first.write(b"first")
        write(target, b"second")
        check_creatable(target)
        assert target.read_bytes() == b"second"
    assert target.read_bytes() == b"first"
    assert names(tmp_path) == ["run.pt"]


@pytest.mark.usefixtures("way")
def test_one_that_looks_for_what_is_left_disturbs_no_writer_at_any_moment(tmp_path: Path) -> None:
    target = tmp_path / "run.pt"
    looking = os.fork()
    if not looking:
        while True:
            remove_unfinished(target)
    try:
        for number in range(300):
            write(target, b"%d" % number)
            assert target.read_bytes() == b"%d" % number
    finally:
        os.kill(looking, signal.SIGKILL)
        os.waitpid(looking, 0)
    assert names(tmp_path) == ["run.pt"]


def test_a_file_system_that_cannot_name_a_file_afterwards_has_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path / "run.pt", b"whole" * 1000)
    assert (tmp_path / "run.pt").read_bytes() == b"whole" * 1000
    assert names(tmp_path) == ["run.pt"]


@pytest.mark.usefixtures("way")
def test_without_locks_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no")

    left = tmp_path / ".run.pt.0123.part"
    left.write_bytes(b"")
    monkeypatch.setattr(fcntl, "flock", refuse)
    write(tmp_path / "run.pt", b"whole")
    assert names(tmp_path) == [left.name, "run.pt"]


def test_what_is_not_its_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [".run.pt.old", "run.pt.part", ".other.pt.0123.part", ".run.pt.link.part"]
    for name in others[:3]:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / others[3]).symlink_to(tmp_path / "run.pt.part")
    remove_unfinished(tmp_path / "run.pt")
    assert names(tmp_path) == sorted(others)
    (tmp_path / ".run.pt.0123.part").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_unfinished(tmp_path / "run.pt")
    assert len(names(tmp_path)) == 5


@pytest.mark.parametrize("killed", [True, False])
def test_a_folder_for_a_while_goes_with_its_process(tmp_path: Path, killed: bool) -> None:
    def use() -> None:
        with folder_for_a_while(tmp_path, "phx-") as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_bytes(b"1")
            if killed:
                kill()

    (killed_in if killed else lambda body: body())(use)
    assert len(names(tmp_path)) == (1 if killed else 0)
    with folder_for_a_while(tmp_path, "phx-") as first, folder_for_a_while(tmp_path, "phx-") as second:
        assert names(tmp_path) == sorted([first.name, second.name])
    assert names(tmp_path) == []
