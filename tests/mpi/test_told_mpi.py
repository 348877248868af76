"""What every rank says of a mistake or a fault over MPI, held word for word against golden texts."""

from __future__ import annotations

import platform

import pytest
from tests.launch_support import Launcher
from tests.support.faults import ENDS, MISTAKES, MISTAKES_FOR_ALL, known_of, told_by
from tests.support.golden import block_of, check_told

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


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_launcher_names_the_rank_that_ended(launcher: Launcher, how: str) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", script, str(launcher.directory), "mpi", how)
    assert done.code != 0
    facts = {**known_of(launcher.directory, script, ENDS, 3), "host": platform.node()}
    check_told(f"{how}.mpi.launcher", block_of(done.err_text), facts)
