"""The C core under AddressSanitizer, UBSan and ThreadSanitizer, with ranks or workers as threads (tests/native)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src/phalanx/native/csrc"
# The core is compiled once for `make test`, which takes most of its time.
SANITIZERS = ["address,undefined", pytest.param("thread", marks=pytest.mark.long)]
# Ranks, turns, chunk bytes: two to eight ranks, and chunks so small that most calls take many.
RUNS = [("3", "300", "512"), *(pytest.param(*each, marks=pytest.mark.long) for each in
        (("2", "400", "4096"), ("5", "200", "4096"), ("8", "100", "1024")))]  # fmt: skip
# Workers and turns.
RPC_RUNS = [("3", "40"), *(pytest.param(*each, marks=pytest.mark.long) for each in (("2", "60"), ("5", "20")))]
PEERS = 40
SEED = os.environ.get("PHALANX_STRESS_SEED", "1")
SCALE = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))

Build = Callable[[str, str], Path]


def compile_c(*arguments: str | Path) -> None:
    command = ["cc", "-g", "-O1", "-std=gnu11", "-pthread", "-ffp-contract=off", "-fno-sanitize-recover=all"]
    done = subprocess.run([*command, f"-I{CORE}", *map(str, arguments)], capture_output=True, text=True)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("this compiler lacks the sanitizer's library")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Makes a test program with the whole core, which is compiled once under each sanitizer."""
    folders: dict[str, Path] = {}

    def make(sanitizer: str, source: str) -> Path:
        if sanitizer not in folders:
            folder = tmp_path_factory.mktemp("core")
            for each in sorted(CORE.glob("*.c")):
                compile_c(f"-fsanitize={sanitizer}", "-c", each, "-o", folder / f"{each.stem}.o")
            folders[sanitizer] = folder
        program = folders[sanitizer] / source.replace(".c", ".test")
        if program.exists():
            return program
        objects = sorted(folders[sanitizer].glob("*.o"))
        compile_c(f"-fsanitize={sanitizer}", ROOT / "tests/native" / source, *objects, "-o", program)
        return program

    return make


def run(program: Path, *arguments: str) -> None:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=600 * SCALE)
    assert done.returncode == 0, f"{program.name} {' '.join(arguments)}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize(("ranks", "turns", "chunk"), RUNS)
def test_random_collectives_beside_messages(sanitizer: str, ranks: str, turns: str, chunk: str, build: Build) -> None:
    run(build(sanitizer, "stress.c"), ranks, str(int(turns) * SCALE), SEED, chunk)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize(("workers", "turns"), RPC_RUNS)
def test_random_rpc_messages_within_calls_and_beside_them(
    sanitizer: str, workers: str, turns: str, build: Build
) -> None:
    run(build(sanitizer, "rpc_stress.c"), workers, str(int(turns) * SCALE))


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_a_ring_whose_counters_pass_two_to_the_32_and_64(sanitizer: str, build: Build) -> None:
    run(build(sanitizer, "rpc_ring.c"))


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_a_slab_from_which_several_threads_allocate(sanitizer: str, build: Build) -> None:
    run(build(sanitizer, "rpc_slab.c"))


def test_a_peer_that_writes_anything_to_the_shared_memory(build: Build) -> None:
    run(build("address,undefined", "rpc_damage.c"), SEED, str(PEERS * SCALE))
