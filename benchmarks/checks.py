"""What the flight recorder and the comparison of calls cost together: all_reduces with both, and with neither.

    python benchmarks/checks.py
    python benchmarks/checks.py --ranks 4

Two jobs run at the same time: one of this Phalanx, and one of a copy whose core is built without the comparison
(``-DPHX_UNCHECKED``; it still writes down each call) and whose group has no recorder. They take turns of a few
milliseconds, the ranks of the other job asleep meanwhile, so what slows a shared machine down for a while slows down
both. The order changes from pair to pair. The table has the 2 % quantile of the turns of each job, and of the ratios
within a pair the median, with the interval that contains it with 95 % certainty (from the order of the ratios alone).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

SIZES = (4, 1024, 16384, 65536, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
TURN_BYTES = 4 << 20  # a turn has as many calls as these bytes take, within the limits
MOST_CALLS = 200
WARM_TURNS = 20
OWN = Path(__file__).resolve()
PACKAGE = OWN.parents[1] / "src" / "phalanx"


def main() -> None:
    """Print the table, or measure as one rank of a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of each job [%(default)s]")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of the tensors, in bytes [%(default)s]")
    parser.add_argument("--pairs", type=int, default=1000, help="of turns, for each size [%(default)s]")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, pipes = arguments.measure
        measure(Path(pipes), recorded=kind == "with")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_unchecked(folder)
        ranks = arguments.ranks
        with job(PACKAGE.parent, "with", folder, ranks) as checked, job(folder, "without", folder, ranks) as unchecked:
            print(f"all_reduce, {ranks} ranks    bytes   without µs   with µs   ratio   95 % certain")
            for size in arguments.sizes:
                print(row(size, paired(unchecked, checked, size, arguments.pairs)), flush=True)


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


class Job:
    """A job that waits for its turns.

    Args:
        orders: to rank 0, a line with the bytes and the calls of the next turn.
        answers: from rank 0, a line with the microseconds that a call took.
    """

    def __init__(self, orders: int, answers: int) -> None:
        self._orders = os.fdopen(orders, "w", buffering=1)
        self._answers = os.fdopen(answers)

    def turn(self, size: int, calls: int) -> float:
        """Let the job make so many calls; the microseconds of each."""
        self._orders.write(f"{size} {calls}\n")
        return float(self.answer())

    def answer(self) -> str:
        """The next line of rank 0."""
        line = self._answers.readline()
        if not line:
            raise SystemExit("a job has ended; what it printed is above")
        return line

    def close(self) -> None:
        """Let the job end."""
        self._orders.close()


@contextlib.contextmanager
def job(place: Path, kind: str, folder: Path, ranks: int) -> Iterator[Job]:
    """Start the Phalanx that is in this place, whose rank 0 is given its orders by pipes in the folder."""
    pipes = folder / kind
    pipes.mkdir()
    for name in ("orders", "answers"):
        os.mkfifo(pipes / name)
    # The other ranks wait for rank 0 as long as it has no turn, which no line should say.
    options = ["-n", str(ranks), "-q", "--no-prefix", "--warn-after", "0"]
    command = [sys.executable, "-m", "phalanx", "run", *options, str(OWN), "--measure", kind, str(pipes)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(place)}) as process:
        ends = {name: os.open(pipes / name, flag) for name, flag in (("orders", os.O_WRONLY), ("answers", os.O_RDONLY))}
        made = Job(**ends)
        try:
            if Path(json.loads(made.answer())) != place / "phalanx":
                raise SystemExit(f"the job has imported another Phalanx than that in {place}")
            yield made
        except BaseException:
            process.terminate()
            raise
        finally:
            made.close()
    if process.returncode:
        raise SystemExit(f"a job has failed with exit code {process.returncode}")


def paired(unchecked: Job, checked: Job, size: int, pairs: int) -> list[tuple[float, float]]:
    """The microseconds of a call without and with the checks, in turns next to each other."""
    calls = max(1, min(MOST_CALLS, TURN_BYTES // size))
    found = []
    for number in range(WARM_TURNS + pairs):
        if number % 2:
            with_us = checked.turn(size, calls)
            without_us = unchecked.turn(size, calls)
        else:
            without_us = unchecked.turn(size, calls)
            with_us = checked.turn(size, calls)
        found.append((without_us, with_us))
    return found[WARM_TURNS:]


def row(size: int, found: Sequence[tuple[float, float]]) -> str:
    """A line of the table."""
    quantiles = [sorted(times)[len(found) // 50] for times in zip(*found, strict=True)]
    ratios = sorted(with_us / without_us for without_us, with_us in found)
    # As many ratios are below the true median as heads come of so many tosses of a coin.
    half, around = len(ratios) // 2, math.ceil(0.98 * math.sqrt(len(ratios)))
    low, high = ratios[max(0, half - around)], ratios[min(len(ratios) - 1, half + around)]
    return f"{size:28,} {quantiles[0]:12.2f} {quantiles[1]:9.2f}   {ratios[half]:.3f}   {low:.3f}-{high:.3f}"


def measure(pipes: Path, *, recorded: bool) -> None:
    """As one rank of a job: take the turns that rank 0 is ordered to."""
    import torch
    import torch.distributed as dist

    import phalanx
    from phalanx.watch import recorder

    world = phalanx.init(timeout_s=3600)
    with nullcontext() if recorded else mock.patch.object(recorder, "group", return_value=None):
        group = dist.new_group()
    if world.rank == 0:
        orders = os.fdopen(os.open(pipes / "orders", os.O_RDONLY))
        answers = os.fdopen(os.open(pipes / "answers", os.O_WRONLY), "w", buffering=1)
        answers.write(f"{json.dumps(str(Path(phalanx.__file__).parent))}\n")
    tensors: dict[int, torch.Tensor] = {}
    order = torch.zeros(2, dtype=torch.int64)
    while True:
        if world.rank == 0:
            words = orders.readline().split()
            order[:] = torch.tensor([int(word) for word in words] or [0, 0])
        dist.broadcast(order, 0)
        size, calls = order.tolist()
        if not calls:
            break
        tensor = tensors.setdefault(size, torch.zeros(size // 4))
        dist.all_reduce(tensor, group=group)  # the ranks are awake, and the tensor is in their caches
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor, group=group)
        taken_s = time.perf_counter() - start
        if world.rank == 0:
            answers.write(f"{taken_s / calls * 1e6}\n")
    phalanx.close()


if __name__ == "__main__":
    main()
