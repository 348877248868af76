"""What the flight recorder and the comparison of calls cost together: all_reduces with both, and with neither.

    python benchmarks/checks.py
    python benchmarks/checks.py --ranks 4

The job runs a copy of Phalanx whose core can be told not to compare (``-DPHX_SWITCHED``). Its ranks make three groups
of all of them: one has no recorder, and while it is measured no calls are compared; the other two are as usual, and
equal. They take turns of a few milliseconds, in an order that changes, so what slows a shared machine down falls on
all.

How long a call takes depends also on where in memory a process happens to have its groups. So the job is started anew
many times, and what counts is the median of what the starts found, each of which is the median of the ratios of its
rounds. The interval contains the true median of the starts with 95 % certainty (by their order alone). The last columns
are the same for the two equal groups: what the method itself is wrong by.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

SIZES = (4, 1024, 16384, 65536, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
TURN_BYTES = 4 << 20  # a turn has as many calls as these bytes take, within the limits
MOST_CALLS = 200
WARM_ROUNDS = 5
GROUPS = ("neither", "both", "again")  # the last is what the second is
ORDERS = ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1), (0, 2, 1), (1, 2, 0))
OWN = Path(__file__).resolve()
PACKAGE = OWN.parents[1] / "src" / "phalanx"


def main() -> None:
    """Print the table, or measure as one rank of a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of the job [%(default)s]")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of the tensors, in bytes [%(default)s]")
    parser.add_argument("--starts", type=int, default=20, help="of the job [%(default)s]")
    parser.add_argument("--rounds", type=int, default=60, help="of turns, for each start and size [%(default)s]")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.sizes, arguments.rounds)
        return
    found: dict[int, list[list[list[float]]]] = {size: [] for size in arguments.sizes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_switched(folder)
        for number in range(arguments.starts):
            for size, times in started(folder, arguments).items():
                found[size].append(times)
            print(f"\rstart {number + 1} of {arguments.starts}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"all_reduce, {arguments.ranks} ranks    bytes   neither µs   both µs   ratio   95 % certain   equal groups")
    for size in arguments.sizes:
        print(row(size, found[size]))


def build_switched(folder: Path) -> None:
    """Put a copy of the package there whose core compares only while it is told to."""
    shutil.copytree(PACKAGE, folder / "phalanx", ignore=shutil.ignore_patterns("__pycache__"))
    native = folder / "phalanx" / "native"
    flags = "-std=gnu11 -O3 -ffp-contract=off -fvisibility=hidden -pthread -fPIC -shared -DPHX_SWITCHED"
    sources = [f"-I{native / 'csrc'}", *sorted(str(path) for path in (native / "csrc").rglob("*.c"))]
    (native / "libphalanx.so").unlink(missing_ok=True)
    subprocess.run(
        [*os.environ.get("CC", "cc").split(), *flags.split(), *sources, "-o", native / "libphalanx.so"], check=True
    )


def started(folder: Path, arguments: argparse.Namespace) -> dict[int, list[list[float]]]:
    """Start the job once: for each size, and each of the groups, the microseconds of a call in each round."""
    out = folder / "found.json"
    options = ["-n", str(arguments.ranks), "-q", "--no-prefix"]
    of_ranks = ["--rounds", str(arguments.rounds), "--sizes", *map(str, arguments.sizes), "--measure", str(out)]
    subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *options, str(OWN), *of_ranks],
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
    )
    found = json.loads(out.read_text())
    if Path(found["package"]) != folder / "phalanx":
        raise SystemExit(f"the job has imported the Phalanx in {found['package']}, not that in {folder}")
    return {int(size): times for size, times in found["times"].items()}


def row(size: int, starts: Sequence[Sequence[Sequence[float]]]) -> str:
    """A line of the table, given for each start, and each of the groups, the microseconds of each round."""
    quick = [statistics.median(sorted(times[group])[len(times[group]) // 50] for times in starts) for group in (0, 1)]
    texts = []
    for below, above in ((0, 1), (1, 2)):
        ratios = sorted(
            statistics.median(one / other for one, other in zip(times[above], times[below], strict=True))
            for times in starts
        )
        # As many ratios are below the true median as heads come of so many tosses of a coin.
        half, around = len(ratios) // 2, math.ceil(0.98 * math.sqrt(len(ratios)))
        low, high = ratios[max(0, half - around)], ratios[min(len(ratios) - 1, half + around)]
        texts.append(f"{statistics.median(ratios):.3f}   {low:.3f}-{high:.3f}")
    return f"{size:28,} {quick[0]:12.2f} {quick[1]:9.2f}   {texts[0]}    {texts[1]}"


def measure(out: Path, sizes: Sequence[int], rounds: int) -> None:
    """As one rank of the job: measure, and let rank 0 write down what it found."""
    import torch
    import torch.distributed as dist

    import phalanx
    from phalanx.diagnosis import recorder
    from phalanx.native.core import library

    world = phalanx.init(timeout_s=3600)
    compares = ctypes.c_int.in_dll(library(), "phx_compares")
    with mock.patch.object(recorder, "group", return_value=None):
        neither = dist.new_group()
    groups = [neither, dist.new_group(), dist.new_group()]
    found: dict[int, list[list[float]]] = {}
    for size in sizes:
        tensor = torch.zeros(size // 4)
        calls = max(1, min(MOST_CALLS, TURN_BYTES // size))
        times: list[list[float]] = [[] for _ in GROUPS]
        for number in range(WARM_ROUNDS + rounds):
            for which in ORDERS[number % len(ORDERS)]:
                group = groups[which]
                compares.value = GROUPS[which] != "neither"
                dist.all_reduce(tensor, group=group)  # the ranks are awake, and the tensor is in their caches
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    dist.all_reduce(tensor, group=group)
                times[which].append((time.perf_counter() - start) / calls * 1e6)
        found[size] = [each[WARM_ROUNDS:] for each in times]
    if world.rank == 0:
        out.write_text(json.dumps({"package": str(Path(phalanx.__file__).parent), "times": found}))
    phalanx.close()


if __name__ == "__main__":
    main()
