"""A rank dies at every store, exchange and copy of the C core in turn (tests/native/deaths.c)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src/phalanx/native/csrc"
SCALE = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("deaths") / "deaths"
    native = ROOT / "tests/native"
    flags = ["-std=gnu11", "-O1", "-g", "-ffp-contract=off", "-pthread", "-include", str(native / "deaths.h")]
    sources = [str(native / "deaths.c"), *map(str, sorted(CORE.rglob("*.c")))]
    subprocess.run(["cc", *flags, f"-I{CORE}", *sources, "-o", str(built)], check=True)
    return built


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "stride"),
    [(3, 16), *(pytest.param(ranks, 1, marks=pytest.mark.long) for ranks in ((3,) if SCALE == 1 else (2, 3, 5, 8)))],
)
def test_others_have_whole_results_or_learn_who_died_wherever_a_rank_dies(
    program: Path, ranks: int, stride: int
) -> None:
    done = subprocess.run([str(program), str(ranks), str(stride)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
