"""Jobs that an MPI launcher starts and that hang: the line and the report name the rank as without it."""

from __future__ import annotations

import json
import re
import signal

import pytest
from tests.launch_support import Launcher, wait_for

FRAME = """\
import os, signal, time
import torch
import phalanx

world = phalanx.init({backend})
rank, size, x = world.rank, world.world_size, torch.ones(4)
for step in range(2):
    world.step(step)
    world.all_reduce(x)
"""
SLEEPS = "if rank == size - 1:\n    time.sleep(600)  # HERE\nworld.all_reduce(x)  # WAIT\n"
STOPS = "if rank == size - 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\nworld.all_reduce(x)  # WAIT\n"


def with_places(script: str, pattern: str) -> str:
    """The pattern with the places of the comments."""
    for number, line in enumerate(script.splitlines(), 1):
        mark = line.rpartition("# ")[2]
        if mark in ("HERE", "WAIT"):
            pattern = re.sub(rf"\b{mark}\b", rf"script\\.py:{number}", pattern)
    return pattern


@pytest.mark.parametrize(
    ("ranks", "backend", "body", "does"),
    [
        (3, "backend='mpi'", SLEEPS, "is at HERE .*, in no operation"),
        (4, "", STOPS, r"is stopped \(state T\), after all_reduce #2 at \S+"),
    ],
)
def test_the_line_and_the_report_name_the_rank(
    launcher: Launcher, ranks: int, backend: str, body: str, does: str
) -> None:
    script = FRAME.format(backend=backend) + body
    expected = with_places(
        script, rf"rank {ranks - 1} {does}; ranks 0-{ranks - 2} wait for it in all_reduce #3 at WAIT"
    )
    folder = launcher.directory / "reports"
    options = ("--warn-after", "0.8", "--report-after", "1.5", "--report-dir", str(folder))
    job = launcher.start("-n", str(ranks), *options, launcher.script(script))

    def reports() -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted(folder.glob("hang-*.json"))]

    def is_there() -> bool:
        return any(re.fullmatch(expected, str(report["verdict"])) for report in reports())

    wait_for(
        lambda: is_there() or job.process.poll() is not None,
        complaint=lambda: str([report["verdict"] for report in reports()]),
    )
    job.process.send_signal(signal.SIGINT)
    done = job.finish()
    branch = script.splitlines().index("if rank == size - 1:") + 1
    advice = "" if body == STOPS else f"; look at the `if` in line {branch}"  # a stopped rank may just be slow
    assert re.search(rf"phalanx: {expected}, for \d+ s now{advice}\n", done.err_text), done.err_text
    report = next(report for report in reports() if re.fullmatch(expected, str(report["verdict"])))
    assert report["awaited"] == [ranks - 1]
    assert report["waiting"] == list(range(ranks - 1))
