"""A training job whose ranks are killed at random moments ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("snownlp")
pytestmark = pytest.mark.fault

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_classification.py"
SETTINGS = ("--limit", "512", "--batch-size", "72", "--epochs", "4", "--save-every", "3")
KILLS_OF_A_JOB = 10
# The moment of each kill is drawn from this share of the time of a run that nobody disturbs: from the start of the
# script on, so a rank may be importing, meeting the others, computing, evaluating or saving.
LATEST = 0.25

# Runs the example, and has a thread kill the rank whose turn it is in this attempt.
DYING = f"""
import json, os, runpy, signal, sys, threading, time
rank, attempt, kills = int(os.environ["RANK"]), int(os.environ["PHALANX_ATTEMPT"]), json.loads(sys.argv.pop(1))
def die(after_s):
    time.sleep(after_s)
    with open("kills", "a") as file:
        file.write(f"{{attempt}}\\n")
    os.kill(os.getpid(), signal.SIGKILL)
if attempt < len(kills) and kills[attempt][0] == rank:
    threading.Thread(target=die, args=(kills[attempt][1],), daemon=True).start()
sys.argv[0] = {str(EXAMPLE)!r}
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder: Path, ranks: int, *arguments: str) -> dict[str, Any]:
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", "--no-prefix", "-n", str(ranks), *arguments, *SETTINGS],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ended.returncode == 0, ended.stderr
    results: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize(("ranks", "kills"), [(2, 40), (3, 40), (8, 20)])
def test_every_kill_is_survived_and_the_bits_are_the_same(tmp_path: Path, ranks: int, kills: int) -> None:
    began = time.monotonic()
    whole = run(tmp_path / "whole", ranks, str(EXAMPLE))
    latest_s = LATEST * (time.monotonic() - began)
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    chance, survived, jobs = random.Random(ranks), 0, 0
    while survived < kills:
        most = min(KILLS_OF_A_JOB, kills - survived)
        drawn = [(chance.randrange(ranks), chance.uniform(0, latest_s)) for _ in range(most)]
        folder = tmp_path / f"job-{jobs}"
        results = run(folder, ranks, "--restarts", str(most), str(script), json.dumps(drawn))
        assert [results[name] for name in ("parameters_sha256", "accuracy", "loss")] == [
            whole[name] for name in ("parameters_sha256", "accuracy", "loss")
        ], f"job {jobs}, {drawn}"
        happened = len((folder / "kills").read_text().splitlines()) if (folder / "kills").exists() else 0
        assert results["attempt"] == happened, f"job {jobs}, {drawn}"
        survived, jobs = survived + happened, jobs + 1
    assert survived == kills
