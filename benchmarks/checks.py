"""What the flight recorder and the comparison of calls cost together: all_reduces with both, and with neither.

    python benchmarks/checks.py --rounds 10
    python benchmarks/checks.py --rounds 10 --ranks 4 --sizes 4 65536 1048576

Jobs run in turns, one of this Phalanx and one of a copy whose core is built without the comparison
(``-DPHX_UNCHECKED``; it still writes down each call) and whose group has no recorder. Each job gives the 2 % quantile
of many short turns of each size. The table has the least of those over the rounds, as a shared machine is at times half
as fast, and of the ratios within a round the median and the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

SIZES = (4, 1024, 16384, 65536, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
TURNS = 400  # of a size up to 1 MiB; fewer of a larger one, so that none takes much longer than that
FEWEST_TURNS = 100
OWN = Path(__file__).resolve()
PACKAGE = OWN.parents[1] / "src" / "phalanx"


def main() -> None:
    """Print the table, or measure as one rank of a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="jobs of each kind")
    parser.add_argument("--ranks", type=int, default=2, help="of each job [%(default)s]")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of the tensors, in bytes")
    parser.add_argument("--measure", choices=["with", "without"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.sizes, recorded=arguments.measure == "with")
        return
    with tempfile.TemporaryDirectory() as folder:
        build_unchecked(Path(folder))
        places = {"with": PACKAGE.parent, "without": Path(folder)}
        rounds = []
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            order = ("with", "without") if number % 2 else ("without", "with")
            rounds.append({kind: run(places[kind], kind, arguments.ranks, arguments.sizes) for kind in order})
    print(f"all_reduce, {arguments.ranks} ranks    bytes   without µs   with µs   ratio   its quartiles")
    for size in map(str, arguments.sizes):
        ratios = sorted(each["with"][size] / each["without"][size] for each in rounds)
        least = [min(each[kind][size] for each in rounds) for kind in ("without", "with")]
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{int(size):28,} {least[0]:12.2f} {least[1]:9.2f}   {statistics.median(ratios):.3f}   {low:.3f}-{high:.3f}"
        )


def build_unchecked(folder: Path) -> None:
    """Put a copy of the package there whose core compares nothing."""
    shutil.copytree(PACKAGE, folder / "phalanx", ignore=shutil.ignore_patterns("__pycache__"))
    native = folder / "phalanx" / "native"
    flags = "-std=gnu11 -O3 -ffp-contract=off -fvisibility=hidden -pthread -fPIC -shared -DPHX_UNCHECKED"
    sources = sorted(str(path) for path in (native / "csrc").glob("*.c"))
    (native / "libphalanx.so").unlink(missing_ok=True)
    subprocess.run(
        [*os.environ.get("CC", "cc").split(), *flags.split(), *sources, "-o", native / "libphalanx.so"], check=True
    )


def run(place: Path, kind: str, ranks: int, sizes: Sequence[int]) -> dict[str, float]:
    """The 2 % quantiles of a job, in microseconds, by size."""
    starting = [sys.executable, "-m", "phalanx", "run", "-n", str(ranks), "-q", "--no-prefix"]
    command = [*starting, str(OWN), "--measure", kind, "--sizes", *map(str, sizes)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(place)}, check=True, stdout=subprocess.PIPE, text=True
    )
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    if Path(said.pop("package")) != place / "phalanx":
        raise SystemExit(f"the job has imported another Phalanx than that in {place}")
    return {size: float(value) for size, value in said.items()}


def measure(sizes: Sequence[int], *, recorded: bool) -> None:
    """As one rank of a job: measure every size, and print the quantiles on rank 0."""
    import torch
    import torch.distributed as dist

    import phalanx
    from phalanx.watch import recorder

    world = phalanx.init()
    with nullcontext() if recorded else mock.patch.object(recorder, "group", return_value=None):
        group = dist.new_group()
    found: dict[str, str | float] = {"package": str(Path(phalanx.__file__).parent)}
    for size in sizes:
        tensor, calls = torch.zeros(size // 4), max(1, min(200, (4 << 20) // size))
        times, turns = [], max(FEWEST_TURNS, min(TURNS, (TURNS << 20) // size))
        for _ in range(turns):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor, group=group)
            times.append((time.perf_counter() - start) / calls * 1e6)
        found[str(size)] = sorted(times)[round(0.02 * turns)]
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    phalanx.close()


if __name__ == "__main__":
    main()
