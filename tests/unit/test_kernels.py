"""The reduction kernels of all instruction sets agree bit for bit (tests/native/kernels_agree.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# As the package is built, and as a distributor might.
@pytest.mark.parametrize("optimisation", ["-O3", pytest.param("-O2", marks=pytest.mark.long)])
def test_wide_and_baseline_kernels_give_the_same_bits(optimisation: str, tmp_path: Path) -> None:
    program = tmp_path / "kernels_agree"
    flags = ["-std=gnu11", optimisation, "-ffp-contract=off", f"-I{ROOT / 'src/phalanx/native/csrc'}"]
    subprocess.run(["cc", *flags, str(ROOT / "tests/native/kernels_agree.c"), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
