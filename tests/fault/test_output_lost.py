"""The launcher's output goes away while ranks run: the disk is full, or the terminal has been closed."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher

__all__ = ["launcher"]

SOON_S = 100.0  # far below the time for which the ranks wait if nobody ends them
PLACES = [("-n", "2"), ("-n", "5"), ("-H", "localhost:2")]
UNWRITABLE = 74
# As a shell's job on a terminal: the leader of a session whose controlling terminal is its standard output.
ON_TERMINAL = f"""#!{sys.executable}
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Launcher]:
    """Starts launches that have a controlling terminal, if their standard output is one."""
    program = tmp_path / "on-terminal"
    program.write_text(ON_TERMINAL)
    program.chmod(0o755)
    with closing(Launcher(tmp_path, str(program))) as made:
        yield made
        made.check()


@pytest.mark.parametrize("place", PLACES, ids="".join)
def test_a_full_disk_ends_the_job(launcher: Launcher, place: tuple[str, str]) -> None:
    with open("/dev/full", "wb") as full:
        job = launcher.start(*place, "-q", "--grace", "250", "sh", "-c", "echo up; exec sleep 300", stdout=full)
        outcome = job.finish(SOON_S)
    assert outcome.code == UNWRITABLE
    assert outcome.err_text == (
        "phalanx: standard output cannot be written: No space left on device; the job was ended\n"
    )
    job.wait_until_gone(SOON_S)


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "printing"])
@pytest.mark.parametrize("place", PLACES, ids="".join)
def test_a_terminal_that_is_closed_ends_the_job(on_terminal: Launcher, place: tuple[str, str], quiet: bool) -> None:
    """As by the window's button: the kernel sends SIGHUP, and whatever is written then fails."""
    master, slave = pty.openpty()
    then = "exec sleep 300" if quiet else "while :; do echo on; sleep 0.01; done"
    command = ("sh", "-c", f"echo up; {then}")
    job = on_terminal.start(*place, "-q", "--grace", "250", *command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""
    while seen.count(b"up\r\n") < int(place[1][-1]):
        seen += os.read(master, 4096)
    os.close(master)
    assert job.process.wait(SOON_S) == 128 + signal.SIGHUP
    job.wait_until_gone(SOON_S)


@pytest.mark.parametrize("place", PLACES, ids="".join)
def test_a_terminal_of_another_session_that_is_closed_ends_the_job(launcher: Launcher, place: tuple[str, str]) -> None:
    """As of a launcher that was started with setsid: no signal comes, and it ends like any tool without a reader."""
    master, slave = pty.openpty()
    command = ("sh", "-c", "while :; do echo on; sleep 0.01; done")
    job = launcher.start(*place, "-q", "--grace", "250", *command, stdout=slave)
    os.close(slave)
    assert os.read(master, 4096)
    os.close(master)
    outcome = job.finish(SOON_S)
    assert (outcome.code, outcome.err) == (128 + signal.SIGPIPE, b"")
    job.wait_until_gone(SOON_S)
