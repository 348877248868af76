"""The slab of a link over shared memory, alone (tests/native/rpc_slab.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src/phalanx/native/csrc"


def test_blocks_keep_apart_and_idle_memory_goes_back(tmp_path: Path) -> None:
    program = tmp_path / "slab"
    sources = [ROOT / "tests/native/rpc_slab.c", *(CORE / name for name in ("rpc_slab.c", "rpc_memory.c", "futex.c"))]
    flags = ["-std=gnu11", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, f"-I{CORE}", *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
