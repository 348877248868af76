"""The C core under AddressSanitizer, UBSan and ThreadSanitizer, with ranks as threads (tests/native/stress.c)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src/phalanx/native/csrc"
# Ranks, turns, chunk bytes: two to eight ranks, and chunks so small that most calls take many.
RUNS = (("2", "400", "4096"), ("3", "300", "512"), ("5", "200", "4096"), ("8", "100", "1024"))


# Workers and turns.
RPC_RUNS = (("2", "60"), ("3", "40"), ("5", "20"))


def built(sanitizer: str, source: str, program: Path) -> Path:
    """A test program in C with the whole core, under a sanitizer."""
    sources = [str(ROOT / "tests/native" / source), *map(str, sorted(CORE.glob("*.c")))]
    command = ["cc", "-g", "-O1", "-std=gnu11", "-pthread", "-ffp-contract=off", f"-fsanitize={sanitizer}"]
    done = subprocess.run(
        [*command, "-fno-sanitize-recover=all", f"-I{CORE}", *sources, "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer library")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_random_collectives_beside_messages(sanitizer: str, tmp_path: Path) -> None:
    program = built(sanitizer, "stress.c", tmp_path / "stress")
    seed = os.environ.get("PHALANX_STRESS_SEED", "1")
    scale = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))
    for ranks, turns, chunk in RUNS:
        done = subprocess.run(
            [str(program), ranks, str(int(turns) * scale), seed, chunk],
            capture_output=True,
            text=True,
            timeout=600 * scale,
        )
        assert done.returncode == 0, f"{ranks} ranks, seed {seed}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_random_rpc_messages_within_calls_and_beside_them(sanitizer: str, tmp_path: Path) -> None:
    program = built(sanitizer, "rpc_stress.c", tmp_path / "stress")
    scale = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))
    for workers, turns in RPC_RUNS:
        done = subprocess.run(
            [str(program), workers, str(int(turns) * scale)], capture_output=True, text=True, timeout=600 * scale
        )
        assert done.returncode == 0, f"{workers} workers:\n{done.stdout}{done.stderr}"
