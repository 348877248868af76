"""What every rank says of a mistake or a fault over MPI, held word for word against golden texts."""

from __future__ import annotations

import os
import platform
import signal

import pytest
from tests.launch_support import Launcher
from tests.support.faults import (
    ENDS,
    KILLED_WITHIN,
    LATE,
    MISSING,
    MISTAKES,
    MISTAKES_FOR_ALL,
    PASSES,
    UNUSED,
    known_of,
    told_by,
)
from tests.support.golden import await_told, block_of, check_told, warnings_of, without_frames

GIVEN_UP_S = 20  # the ranks that come must have come by then
MISTAKES_OVER_MPI = MISTAKES.replace("phalanx.init()", 'phalanx.init(backend="mpi")')


def test_every_rank_says_which_calls_differ_or_who_did_not_come(launcher: Launcher) -> None:
    script = launcher.script(MISTAKES_OVER_MPI)
    done = launcher.run("-n", "3", script, str(launcher.directory))
    assert done.code != 0, done.err_text  # MPI cannot end in order when a call was given up
    facts = {**known_of(launcher.directory, script, MISTAKES_OVER_MPI, 3), "host": platform.node()}
    for row in MISTAKES_FOR_ALL:
        for told in told_by(launcher.directory, row, [0, 1, 2]):
            check_told(row, told, facts)
    for told in told_by(launcher.directory, "late", [0, 2]):
        check_told("late.mpi", told, facts)


@pytest.mark.parametrize("row", ["swapped", "skipped"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_warns_of_equal_calls_that_do_not_belong_together(launcher: Launcher, row: str, size: int) -> None:
    script = launcher.script(PASSES)
    done = launcher.run("-n", str(size), "-q", "--warn-after", "0", script, str(launcher.directory), "mpi", row)
    assert done.code == 0, done.err_text
    (warning,) = warnings_of(done.err_text).values()
    check_told(f"{row}.run.warning", warning, known_of(launcher.directory, script, PASSES, size))


@pytest.mark.parametrize("row", ["swapped", "skipped"])
def test_with_strict_the_job_fails_with_both_calls(launcher: Launcher, row: str) -> None:
    script = launcher.script(PASSES)
    done = launcher.run("-n", "3", "-q", "--strict", script, str(launcher.directory), "mpi", row)
    assert done.code == 1, done.err_text
    facts = {**known_of(launcher.directory, script, PASSES, 3), "host": platform.node()}
    check_told(f"{row}.strict.launcher", without_frames(block_of(done.err_text)), facts)


def test_parameters_that_a_rank_leaves_unused_are_named(launcher: Launcher) -> None:
    script = launcher.script(UNUSED)
    done = launcher.run("-n", "3", script, str(launcher.directory), "mpi")
    assert done.code == 1
    facts = {**known_of(launcher.directory, script, UNUSED, 3), "host": platform.node()}
    check_told("unused.rank-1", told_by(launcher.directory, "unused", [1])[0], facts)


def test_a_rank_that_computes_or_is_stopped_is_named_while_the_others_wait(launcher: Launcher) -> None:
    script = launcher.script(LATE)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        arguments = ("--warn-after", "0.5", script, str(launcher.directory), "mpi")
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)

    def await_line(golden: str) -> None:
        facts = lambda: {**known_of(launcher.directory, script, LATE, 3), "on host": ""}  # noqa: E731
        await_told(golden, said.read_text, facts, lambda: job.process.poll() is not None)

    await_line("waits-computes")
    (launcher.directory / "go").touch()
    await_line("waits-stopped")
    os.kill(int((launcher.directory / "pid-1").read_text()), signal.SIGCONT)
    assert job.finish().code == 0, said.read_text()


@pytest.mark.parametrize("way", ["init", "mpi"])
def test_a_rank_that_does_not_join_is_named_while_the_others_wait(launcher: Launcher, way: str) -> None:
    script = launcher.script(MISSING)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        arguments = ("--warn-after", "0.5", script, str(launcher.directory), way, "300")
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)
    await_told(
        "waits-join",
        said.read_text,
        lambda: {**known_of(launcher.directory, script, MISSING, 3), "on host": ""},
        lambda: job.process.poll() is not None,
    )
    (launcher.directory / "go").touch()
    assert job.finish().code == 0, said.read_text()


@pytest.mark.parametrize("way", ["init", "mpi"])
def test_at_the_timeout_every_rank_that_came_names_one_that_did_not(launcher: Launcher, way: str) -> None:
    script = launcher.script(MISSING)
    arguments = ("--grace", "60", script, str(launcher.directory), way, str(GIVEN_UP_S))
    done = launcher.run("-n", "3", *arguments)
    assert done.code == 1, done.err_text
    host = platform.node()
    where = {"host": host, "where": f" ({host}, local rank 2)", "timeout": GIVEN_UP_S}
    facts = {**known_of(launcher.directory, script, MISSING, 3), **where}
    for told in told_by(launcher.directory, "missing", [0, 1]):
        check_told("missing.run", told, facts)
    check_told("missing.run.launcher", block_of(done.err_text), facts)


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_launcher_names_the_rank_that_ended(launcher: Launcher, how: str) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", script, str(launcher.directory), "mpi", how)
    assert done.code != 0
    facts = {**known_of(launcher.directory, script, ENDS, 3), "host": platform.node()}
    check_told(f"{how}.mpi.launcher", block_of(done.err_text), facts)


@pytest.mark.parametrize("size", [2, 3])
def test_the_launcher_says_what_a_rank_was_in_when_it_was_killed(launcher: Launcher, size: int) -> None:
    script = launcher.script(KILLED_WITHIN)
    done = launcher.run("-n", str(size), script, str(launcher.directory), "mpi")
    assert done.code != 0
    facts = {**known_of(launcher.directory, script, KILLED_WITHIN, size), "host": platform.node()}
    check_told("within.mpi.launcher", block_of(done.err_text), facts)


def test_every_survivor_says_at_the_timeout_that_a_rank_is_stopped(launcher: Launcher) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", script, str(launcher.directory), "mpi", "stopped")
    assert done.code == 1, done.err_text
    facts = {**known_of(launcher.directory, script, ENDS, 3), "host": platform.node()}
    told = [text for text in told_by(launcher.directory, "stopped", [0, 2]) if text]
    assert told  # the first to fail ends the job, in which the other may have said nothing yet
    for text in told:
        check_told("stopped.mpi", text, facts)
    check_told("stopped.mpi.launcher", block_of(done.err_text), facts)
