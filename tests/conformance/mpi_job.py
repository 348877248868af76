"""The ranks of torch's suite under mpiexec, seen from the suite's process: ``mpi_ranks.py`` is the other side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import unittest
from pathlib import Path

from tests.mpi.environments import SETTINGS

POLL_S = 0.01
ROOT = Path(__file__).parents[2]


class MpiJob:
    """Ranks that do tests one after another; new ones after a failure.

    Args:
        mpiexec: the program that starts them. The Python beside it runs them, else this one.
        size: the number of ranks.
        folder: where tests and results are left.
        timeout_s: for each test.
    """

    def __init__(self, mpiexec: str, size: int, folder: Path, timeout_s: float) -> None:
        beside = Path(mpiexec).with_name("python")
        self._command = [mpiexec, "-n", str(size), str(beside) if beside.exists() else sys.executable, "-W", "ignore"]
        self._size, self._folder, self._timeout_s = size, folder, timeout_s
        self._number = 0
        self._ranks: subprocess.Popen[bytes] | None = None
        for name in ("jobs", "results"):
            (folder / name).mkdir()

    def do(self, test: str) -> None:
        """Run one test on all ranks.

        Raises:
            unittest.SkipTest: the ranks skipped it.
            RuntimeError: a rank failed, or the job ended or did not answer; with the ranks' tracebacks.
        """
        if self._ranks is None:
            self._ranks = subprocess.Popen(
                [*self._command, "-m", "tests.conformance.mpi_ranks", str(self._number)],
                cwd=ROOT,
                env={
                    **os.environ,
                    **SETTINGS,
                    "PHALANX_SUITE_FOLDER": str(self._folder),
                    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._put(test)
        files = [self._folder / "results" / f"{self._number}.{rank}" for rank in range(self._size)]
        self._number += 1
        deadline = time.monotonic() + self._timeout_s
        why = ""
        while not all(file.exists() for file in files):
            if self._ranks.poll() is not None:
                why = f"the job ended with code {self._ranks.returncode}"
            elif time.monotonic() > deadline:
                why = f"RuntimeError: not done after {self._timeout_s:.0f} s"
            if why:
                break
            time.sleep(POLL_S)
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        failures = [text for status, text in results if status == "fail"]
        if why or failures:
            self._end(0)
            raise RuntimeError("\n".join(failures) or why)
        skips = [text for status, text in results if status == "skip"]
        if skips:
            raise unittest.SkipTest(skips[0])

    def close(self) -> None:
        """Let the ranks end."""
        if self._ranks is not None:
            self._put("")
            self._end(30)

    def _put(self, test: str) -> None:
        partial = self._folder / "jobs" / "part"
        partial.write_text(json.dumps([test, os.environ["TEMP_DIR"]]))
        partial.rename(self._folder / "jobs" / str(self._number))

    def _end(self, patience_s: float) -> None:
        assert self._ranks is not None
        ranks, self._ranks = self._ranks, None
        try:
            ranks.wait(patience_s or 5)
        except subprocess.TimeoutExpired:
            ranks.terminate()
            ranks.wait()
