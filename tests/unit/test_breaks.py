"""The C core in states that are too short-lived to be met on purpose (tests/native/breaks.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src/phalanx/native/csrc"


def test_a_reason_that_is_late_a_text_half_written_and_a_proc_that_cannot_be_read(tmp_path: Path) -> None:
    program = tmp_path / "breaks"
    sources = [str(ROOT / "tests/native/breaks.c"), *map(str, sorted(CORE.glob("*.c")))]
    flags = ["-std=gnu11", "-O1", "-g", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra"]
    subprocess.run(["cc", *flags, f"-I{CORE}", *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
