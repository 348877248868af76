"""A rank that says only late where it is, as on a busy machine: the report does not wait, and is completed by it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.launch_support import Launcher, launcher, wait_for

__all__ = ["launcher"]  # fixture

# No thread of rank 1 takes the signal by which it is asked, until it may.
SCRIPT = """
    import os, signal, sys, time
    asked = {signal.SIGRTMAX - 3}
    if os.environ["RANK"] == "1":
        signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    import phalanx
    world = phalanx.init()
    if world.rank == 1:
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
        time.sleep(600)  # HERE
    world.barrier()
"""


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("hang-*.json"))]


def test_a_report_without_a_late_rank_is_written_again_with_it(launcher: Launcher) -> None:
    folder, go, errors = (launcher.directory / name for name in ("reports", "go", "errors"))
    path = launcher.script(SCRIPT)
    options = ("--no-preload", "--warn-after", "0.8", "--report-after", "2", "--report-dir", str(folder))
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", *options, path, str(go), stderr=file)
    wait_for(lambda: folder.exists() and read(folder), complaint=errors.read_text)
    assert [bool(rank["stack"]) for rank in read(folder)[0]["ranks"]][1] is False
    wait_for(
        lambda: "has every rank's stack and operations (rank 1 did not answer); read it with" in errors.read_text()
    )
    go.touch()
    # In the place of the first one: a slow machine may write another one of what came then.
    wait_for(lambda: all(rank["stack"] for rank in read(folder)[0]["ranks"]), complaint=errors.read_text)
    line = next(number for number, text in enumerate(Path(path).read_text().splitlines(), 1) if "# HERE" in text)
    assert read(folder)[0]["verdict"].startswith(f"rank 1 is at {Path(path).name}:{line} ")
    wait_for(lambda: "has every rank's stack and operations; read it with" in errors.read_text())
    job.process.send_signal(signal.SIGINT)
    job.finish()
