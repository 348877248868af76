"""What every rank and the launcher say of a mistake or a fault over MPI."""

from __future__ import annotations

import os
import platform
import re
import signal

import pytest
from tests.launch_support import Launcher
from tests.support.faults import (
    ENDS,
    KILLED_WITHIN,
    LATE,
    MISSING,
    MISTAKES,
    PASSES,
    UNUSED,
    known_of,
    told_by,
)
from tests.support.golden import (
    await_facts,
    block_of,
    check_facts,
    check_mistakes,
    check_told,
    ending_of,
    warnings_of,
    without_frames,
)

GIVEN_UP_S = 20  # the ranks that come must have come by then
MISTAKES_OVER_MPI = MISTAKES.replace("phalanx.init()", 'phalanx.init(backend="mpi")')


def known(launcher: Launcher, script: str, text: str, size: int = 3) -> dict[str, object]:
    return {**known_of(launcher.directory, script, text, size), "host": platform.node()}


def test_every_rank_says_which_calls_differ_or_who_did_not_come(launcher: Launcher) -> None:
    script = launcher.script(MISTAKES_OVER_MPI)
    done = launcher.run("-n", "3", script, str(launcher.directory))
    assert done.code != 0, done.err_text  # MPI cannot end in order when a call was given up
    check_mistakes(launcher.directory, known(launcher, script, MISTAKES_OVER_MPI), 3)
    for told in told_by(launcher.directory, "late", [0, 2]):
        check_facts(
            told, r"which is at wait_for \(script\.py:\d+\), .* Its last operation was barrier #1 of group '\d+'"
        )


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("row", ["swapped", "skipped"])
def test_equal_calls_that_do_not_belong_together_are_told(launcher: Launcher, row: str, strict: bool) -> None:
    """A rank warns of it; with ``--strict`` the job fails."""
    script = launcher.script(PASSES)
    option = ("--strict",) if strict else ("--warn-after", "0")
    done = launcher.run("-n", "3", "-q", *option, script, str(launcher.directory), "mpi", row)
    assert done.code == strict, done.err_text
    facts = known(launcher, script, PASSES)
    first, second = ("line first", "line second") if row == "swapped" else ("line often", "line always")
    pairs = [rf"script\.py:{facts[line]} was call #\d of rank \d and #\d of rank \d" for line in (first, second)]
    if strict:
        begin = "^phalanx: rank [012] of 3 failed: phalanx.errors.CollectiveMismatch: "
        check_facts(without_frames(block_of(done.err_text)), begin, *pairs)
    else:
        (warning,) = warnings_of(done.err_text).values()
        check_facts(warning, "^phalanx: warning: ranks (0 and 1|1 and 2) of a group make the same calls", *pairs)


def test_parameters_that_a_rank_leaves_unused_are_named(launcher: Launcher) -> None:
    script = launcher.script(UNUSED)
    done = launcher.run("-n", "3", script, str(launcher.directory), "mpi")
    assert done.code == 1
    unused = r"rank 1 of the group: no gradient came .* for other_head\.weight, other_head\.bias$"
    check_facts(told_by(launcher.directory, "unused", [1])[0], rf"^phalanx\.errors\.UnusedParameters: {unused}")


def test_a_rank_that_computes_or_is_stopped_is_named_while_the_others_wait(launcher: Launcher) -> None:
    script = launcher.script(LATE)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        arguments = ("--warn-after", "0.5", script, str(launcher.directory), "mpi")
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)
    computes = r"^phalanx: rank 1 is at script\.py:\d+ .*, in no operation; ranks 0, 2 wait for it in all_reduce #2 at "
    await_facts(said.read_text, lambda: job.process.poll() is not None, lambda: computes)
    (launcher.directory / "go").touch()
    stopped = (
        r"^phalanx: rank 1 is stopped \(state T\), after all_reduce #2 .*; ranks 0, 2 wait for it in all_reduce #3 at "
    )
    await_facts(said.read_text, lambda: job.process.poll() is not None, lambda: stopped)
    os.kill(int((launcher.directory / "pid-1").read_text()), signal.SIGCONT)
    assert job.finish().code == 0, said.read_text()


@pytest.mark.parametrize("way", ["init", "mpi"])
def test_a_rank_that_does_not_join_is_named_while_the_others_wait(launcher: Launcher, way: str) -> None:
    script = launcher.script(MISSING)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        arguments = ("--warn-after", "0.5", script, str(launcher.directory), way, "300")
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)
    line = r"^phalanx: rank 2 is at script\.py:\d+ .*, in no operation yet; ranks 0-1 wait for it in init at "
    await_facts(said.read_text, lambda: job.process.poll() is not None, lambda: line)
    (launcher.directory / "go").touch()
    assert job.finish().code == 0, said.read_text()


def test_at_the_timeout_every_rank_that_came_names_one_that_did_not(launcher: Launcher) -> None:
    script = launcher.script(MISSING)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "mpi", str(GIVEN_UP_S))
    assert done.code == 1, done.err_text
    who = rf"after {GIVEN_UP_S} s rank 2 of 3 \({re.escape(platform.node())}, local rank 2\) had not come; "
    for told in told_by(launcher.directory, "missing", [0, 1]):
        check_facts(told, rf"^phalanx\.errors\.InitializationError: (rank 1 had joined, but )?{who}")
    check_facts(
        block_of(done.err_text), f"^phalanx: rank [01] of 3 failed: .*{who}", "^  rank 2 ended by the launcher$"
    )


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_launcher_names_the_rank_that_ended(launcher: Launcher, how: str) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", script, str(launcher.directory), "mpi", how)
    assert done.code != 0
    check_told(f"{how}.mpi.launcher", block_of(done.err_text), known(launcher, script, ENDS))


def test_the_launcher_says_what_a_rank_was_in_when_it_was_killed(launcher: Launcher) -> None:
    script = launcher.script(KILLED_WITHIN)
    done = launcher.run("-n", "3", script, str(launcher.directory), "mpi")
    assert done.code != 0
    facts = known(launcher, script, KILLED_WITHIN)
    call = rf"^  it was in all_reduce #2 \(float32, 16\.0 MiB, sum\) at script\.py:{facts['line call']}, for [\d.]+ s$"
    check_facts(block_of(done.err_text), "^phalanx: rank 1 of 3 failed$", ending_of(facts), call)


def test_every_survivor_says_at_the_timeout_that_a_rank_is_stopped(launcher: Launcher) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", script, str(launcher.directory), "mpi", "stopped")
    assert done.code == 1, done.err_text
    facts = known(launcher, script, ENDS)
    stopped = rf"CollectiveTimeout: rank 1 of the group \(pid {facts['pid 1']} on .*\), which was stopped \(state T\), "
    told = [text for text in told_by(launcher.directory, "stopped", [0, 2]) if text]
    assert told  # the first to fail ends the job, in which the other may have said nothing yet
    for text in told:
        check_facts(text, stopped, rf"kill -CONT {facts['pid 1']}\)")
    check_facts(block_of(done.err_text), f"^phalanx: rank [02] of 3 failed: .*{stopped}", "^  rank 1 ended by the ")
