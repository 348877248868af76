"""A job of more ranks than a thousand: started, looked at, stopped, and ended by the failure of one of them.

The ranks are shells, since as many that use torch would need more memory than most machines have.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.launch_support import PATIENCE_S, Launcher, launcher

__all__ = ["launcher"]

RANKS = 1100
pytestmark = pytest.mark.long


def test_each_of_very_many_ranks_has_its_own_place(launcher: Launcher) -> None:
    outcome = launcher.run("-q", "-n", str(RANKS), "--no-prefix", "sh", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE"')
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == sorted(f"{rank} {rank} {RANKS}" for rank in range(RANKS))
    assert outcome.err_text == ""


def test_of_very_many_ranks_the_one_that_fails_is_named(launcher: Launcher) -> None:
    outcome = launcher.run("-q", "-n", str(RANKS), "sh", "-c", "[ $RANK = 777 ] && exit 5; exec sleep 3000")
    assert outcome.code == 5
    assert f"rank 777 of {RANKS} failed" in outcome.err_text
    assert f"ranks 0-776, 778-{RANKS - 1} ended by the launcher" in outcome.err_text


def test_very_many_ranks_are_shown_and_stopped(launcher: Launcher) -> None:
    job = launcher.start("-q", "-n", str(RANKS), "sh", "-c", 'echo "$RANK"; exec sleep 3000')
    job.read_lines(RANKS)
    shown = phalanx("top", "--once", "--json", str(job.pid))
    assert [rank["rank"] for rank in json.loads(shown)["ranks"]] == list(range(RANKS))
    assert f"{RANKS} ranks" in phalanx("stop", str(job.pid))
    assert "all 1100 ranks have been ended" in job.finish().err_text


def phalanx(*words: str) -> str:
    """What another command of Phalanx prints."""
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
