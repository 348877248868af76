"""``phalanx run --restarts`` between two attempts: the descriptors of the launcher."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from phalanx.system.limits import FILES_BESIDE, FILES_PER_RANK

RANKS = 2 * FILES_BESIDE  # so that a file more for each rank is more than there is room for


def test_a_restart_needs_no_more_descriptors_than_a_start(tmp_path: Path) -> None:
    """With as many as a job of so many ranks is let start with."""
    files = RANKS * (FILES_PER_RANK + 1) + FILES_BESIDE

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    fails_once = 'test "$PHALANX_ATTEMPT" != 0 || exit 3'
    options = ["-n", str(RANKS), "-q", "--restarts", "1", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *options, "sh", "-c", fails_once],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "attempt 2 of 2 starts now" in done.stderr
