"""What every rank and the launcher say when something breaks on one host, held word for word against golden texts."""

from __future__ import annotations

import os
import platform
import signal

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.faults import ENDS, KILLED_WITHIN, LATE, MISTAKES, MISTAKES_FOR_ALL, UNUSED, known_of, told_by
from tests.support.golden import FOLDER, MOST_LINES, await_told, block_of, check_told

__all__ = ["launcher"]  # a fixture


def known(launcher: Launcher, script: str, text: str, size: int) -> dict[str, object]:
    return {**known_of(launcher.directory, script, text, size), "host": platform.node()}


def test_no_error_is_longer_than_a_user_reads() -> None:
    texts = {path.name: path.read_text() for path in FOLDER.glob("*.txt")}
    assert {name: text for name, text in texts.items() if len(text.splitlines()) > MOST_LINES} == {}


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 5))])
def test_every_rank_says_which_calls_differ_or_who_did_not_come(launcher: Launcher, size: int) -> None:
    script = launcher.script(MISTAKES)
    done = launcher.run("-n", str(size), script, str(launcher.directory))
    assert done.code == 0, done.err_text
    facts = known(launcher, script, MISTAKES, size)
    for row in MISTAKES_FOR_ALL:
        for told in told_by(launcher.directory, row, [*range(size)]):
            check_told(row, told, facts)
    survivors = [rank for rank in range(size) if rank != 1]
    for told in told_by(launcher.directory, "late", survivors):
        check_told("late", told, facts)


@pytest.mark.parametrize(
    ("how", "size"), [("killed", 3), ("raises", 3), pytest.param("killed", 2, marks=pytest.mark.long)]
)
def test_every_survivor_names_the_rank_that_ended(launcher: Launcher, how: str, size: int) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", str(size), "--grace", "60", script, str(launcher.directory), "phalanx", how)
    assert done.code != 0
    facts = known(launcher, script, ENDS, size)
    for told in told_by(launcher.directory, how, [rank for rank in range(size) if rank != 1]):
        check_told(how, told, facts)
    check_told(f"{how}.launcher", block_of(done.err_text), facts)


@pytest.mark.parametrize("size", [2, 3])
def test_every_survivor_names_a_rank_that_was_killed_within_their_call(launcher: Launcher, size: int) -> None:
    script = launcher.script(KILLED_WITHIN)
    done = launcher.run("-n", str(size), "--grace", "60", script, str(launcher.directory), "phalanx")
    assert done.code != 0
    facts = known(launcher, script, KILLED_WITHIN, size)
    for told in told_by(launcher.directory, "within", [rank for rank in range(size) if rank != 1]):
        check_told("within", told, facts)
    check_told("within.launcher", block_of(done.err_text), facts)


def test_the_launcher_says_what_a_rank_over_gloo_was_in_when_it_was_killed(launcher: Launcher) -> None:
    script = launcher.script(KILLED_WITHIN)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "gloo")
    assert done.code != 0
    check_told("within.gloo.launcher", block_of(done.err_text), known(launcher, script, KILLED_WITHIN, 3))


def test_every_survivor_says_at_the_timeout_that_a_rank_is_stopped(launcher: Launcher) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "phalanx", "stopped")
    assert done.code == 1
    for told in told_by(launcher.directory, "stopped", [0, 2]):
        check_told("stopped", told, known(launcher, script, ENDS, 3))


def test_the_launcher_says_of_a_job_over_gloo_that_the_rank_that_had_not_come_was_stopped(launcher: Launcher) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "gloo", "stopped")
    assert done.code == 1
    check_told("stopped.gloo.launcher", block_of(done.err_text), known(launcher, script, ENDS, 3))


def test_parameters_that_a_rank_leaves_unused_are_named_on_every_rank(launcher: Launcher) -> None:
    script = launcher.script(UNUSED)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "phalanx")
    assert done.code == 1
    facts = known(launcher, script, UNUSED, 3)
    first, of_rank_1, last = told_by(launcher.directory, "unused", [0, 1, 2])
    for told in (first, last):
        check_told("unused", told, facts)
    check_told("unused.rank-1", of_rank_1, facts)


def test_the_launcher_shows_calls_that_differ_once(launcher: Launcher) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "phalanx", "size")
    assert done.code == 1
    facts = known(launcher, script, ENDS, 3)
    check_told("size.launcher", block_of(done.err_text), facts)


@pytest.mark.parametrize("how", ["killed", "raises", "size", "late"])
def test_the_launcher_says_of_a_job_over_gloo_what_can_be_seen_from_outside(launcher: Launcher, how: str) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "gloo", how)
    assert done.code != 0
    facts = known(launcher, script, ENDS, 3)
    check_told(f"{how}.gloo.launcher", block_of(done.err_text), facts)


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_rank_that_does_not_come_is_named_while_the_others_wait(launcher: Launcher, backend: str) -> None:
    script = launcher.script(LATE)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        job = launcher.start(
            "-n", "3", "-q", "--warn-after", "0.5", script, str(launcher.directory), backend, stderr=err
        )

    def await_line(golden: str) -> None:
        facts = lambda: {**known(launcher, script, LATE, 3), "on host": ""}  # noqa: E731
        await_told(golden, said.read_text, facts, lambda: job.process.poll() is not None)

    await_line("waits-computes")
    (launcher.directory / "go").touch()
    await_line("waits-stopped")
    os.kill(int(str(known(launcher, script, LATE, 3)["pid 1"])), signal.SIGCONT)
    assert job.finish().code == 0, said.read_text()
