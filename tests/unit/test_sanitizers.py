"""The C core by itself (tests/native), most of it under AddressSanitizer, UBSan and ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src/phalanx/native/csrc"
SEED = os.environ.get("PHALANX_STRESS_SEED", "1")
SCALE = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))
# How often a peer writes anything to the memory.
PEERS = 10
Build = Callable[[str, str], Path]


def compile_c(*arguments: str | Path) -> None:
    command = ["cc", "-g", "-O1", "-std=gnu11", "-pthread", "-ffp-contract=off", "-fno-sanitize-recover=all"]
    done = subprocess.run([*command, f"-I{CORE}", *map(str, arguments)], capture_output=True, text=True)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("this compiler lacks the sanitizer's library")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Makes a test program with the whole core, which is compiled once under each sanitizer, and for make test once."""
    folders: dict[str, Path] = {}

    def make(sanitizer: str, source: str) -> Path:
        if sanitizer not in folders:
            folder = tmp_path_factory.mktemp("core")
            for each in sorted(CORE.rglob("*.c")):
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


# Ranks, turns and chunk bytes, which are so few that most calls take many chunks; or workers and turns.
PROGRAMS: dict[str, list[tuple[str | int, ...]]] = {
    "stress.c": [("3", 100, SEED, "512"), ("2", 400, SEED, "4096"), ("5", 200, SEED, "4096"), ("8", 100, SEED, "1024")],
    "rpc_stress.c": [("3", 40), ("2", 60), ("5", 20)],
    "rpc_ring.c": [()],
    "rpc_slab.c": [()],
    "rpc_damage.c": [(SEED, PEERS)],
}
RUNS = [
    pytest.param(sanitizer, source, given)
    for source, runs in PROGRAMS.items()
    for number, given in enumerate(runs)
    for sanitizer in ("address,undefined", "thread")
    if (number, sanitizer) == (0, "address,undefined") or source != "rpc_damage.c"
]


@pytest.mark.long
@pytest.mark.parametrize(("sanitizer", "source", "given"), RUNS)
def test_core_is_clean_under_sanitizers(
    sanitizer: str, source: str, given: tuple[str | int, ...], build: Build
) -> None:
    """Random collectives beside messages, messages of RPC, its ring and slab, and a peer that writes anything."""
    run(build(sanitizer, source), *(str(each * SCALE) if isinstance(each, int) else each for each in given))


@pytest.mark.long
def test_core_in_states_that_are_too_short_lived_to_be_met(tmp_path: Path) -> None:
    program = tmp_path / "breaks"
    compile_c("-Wall", "-Wextra", ROOT / "tests/native/breaks.c", *sorted(CORE.rglob("*.c")), "-o", program)
    run(program)


# As the package is built, and as a distributor might.
@pytest.mark.parametrize(
    "optimisation", ["-O1", *(pytest.param(each, marks=pytest.mark.long) for each in ("-O2", "-O3"))]
)
def test_kernels_of_all_instruction_sets_give_the_same_bits(optimisation: str, tmp_path: Path) -> None:
    program = tmp_path / "kernels_agree"
    flags = ["-std=gnu11", optimisation, "-ffp-contract=off", f"-I{CORE}"]
    subprocess.run(["cc", *flags, str(ROOT / "tests/native/kernels_agree.c"), "-o", str(program)], check=True)
    run(program)
