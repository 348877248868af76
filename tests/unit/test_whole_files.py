"""Files that appear whole or not at all; what is left of a killed writer goes with the next."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.system.files import check_creatable, remove_unfinished, whole_file


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "run.pt"


def write(target: Path, content: bytes) -> None:
    with whole_file(target) as file:
        file.write(content)


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOLCK, "no")


def test_file_takes_the_place_of_the_earlier_one_when_it_is_whole(target: Path) -> None:
    (target.parent / "usual").write_bytes(b"")
    write(target, b"first")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), whole_file(target) as file:
            file.write(b"second")
            raise error
    with whole_file(target) as file:
        file.write(b"sec")
        file.flush()
        assert target.read_bytes() == b"first"
        file.write(b"ond")
        file.seek(0)
        assert file.read() == b"second"
    assert target.read_bytes() == b"second"
    assert target.stat().st_mode == (target.parent / "usual").stat().st_mode
    assert names(target.parent) == ["run.pt", "usual"]


def test_what_a_killed_writer_left_goes_when_the_file_is_written_again(target: Path) -> None:
    def dies() -> None:
        with whole_file(target) as file:
            file.write(bytes(1 << 16))
            file.flush()
            kill()

    for _ in range(2):
        killed_in(dies)
        assert len(names(target.parent)) == 1
    write(target, b"whole")
    assert names(target.parent) == ["run.pt"]


def test_killed_before_the_file_has_its_name_the_earlier_stays(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(target, b"first")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", kill)
        killed_in(lambda: write(target, b"second"))
    assert len(names(target.parent)) == 2
    assert target.read_bytes() == b"first"
    check_creatable(target)
    assert names(target.parent) == ["run.pt"]


def test_writers_and_those_who_tidy_take_nothing_from_each_other(target: Path) -> None:
    with whole_file(target) as first:
        first.write(b"first")
        write(target, b"second")
        check_creatable(target)
        assert target.read_bytes() == b"second"
    assert target.read_bytes() == b"first"
    tidies = os.fork()
    if not tidies:
        while True:
            remove_unfinished(target)
    try:
        for number in range(100):
            write(target, b"%d" % number)
            assert target.read_bytes() == b"%d" % number
    finally:
        os.kill(tidies, signal.SIGKILL)
        os.waitpid(tidies, 0)
    assert names(target.parent) == ["run.pt"]


def test_file_system_without_locks_has_the_file_and_nothing_is_removed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = target.parent / ".run.pt.0123.part"
    left.write_bytes(b"")
    monkeypatch.setattr(fcntl, "flock", refuse)
    write(target, b"whole")
    assert names(target.parent) == [left.name, "run.pt"]


def test_what_is_not_its_own_stays(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [".run.pt.old", "run.pt.part", ".other.pt.0123.part", ".run.pt.link.part"]
    for name in others[:3]:
        (target.parent / name).write_bytes(b"")
    (target.parent / others[3]).symlink_to(target.parent / "run.pt.part")
    remove_unfinished(target)
    assert names(target.parent) == sorted(others)
    (target.parent / ".run.pt.0123.part").write_bytes(b"")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    remove_unfinished(target)
    assert len(names(target.parent)) == 5
