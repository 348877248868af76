"""Files that appear whole or not at all; what is left of a killed writer goes with the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.system.files import check_creatable, whole_file


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
    assert len(names(target.parent)) == 2


def test_second_writer_of_a_file_gets_it_and_the_first_an_error(target: Path) -> None:
    with pytest.raises(FileExistsError, match="another process writes it"), whole_file(target) as first:
        first.write(b"first")
        write(target, b"second")
    assert target.read_bytes() == b"second"
    assert names(target.parent) == ["run.pt"]
