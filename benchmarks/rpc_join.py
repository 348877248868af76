"""How long it takes N processes of one machine to become workers of each other, under ``phalanx run``.

Times are those of the slowest rank, in seconds: until ``rpc.init()`` has returned, counted from when all ranks had
met; until each has also called its neighbour; until one of them has called all others; and of the whole job, with the
start of the processes and ``import torch``.

    python benchmarks/rpc_join.py
    python benchmarks/rpc_join.py -n 24 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import time
import torch
import phalanx
from phalanx import rpc

torch.set_num_threads(1)
world = phalanx.init()
world.barrier()
began = time.monotonic()
rpc.init()
times = [time.monotonic() - began]
rpc.call((world.rank + 1) % world.world_size, abs, -1)
times.append(time.monotonic() - began)
world.barrier()
began = time.monotonic()
if world.rank == 0:
    assert [each.wait() for each in rpc.each(range(world.world_size), abs, -2)] == [2] * world.world_size
times.append(time.monotonic() - began)
slowest = torch.tensor(times)
world.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
rpc.shutdown()
if world.rank == 0:
    print("times", *slowest.tolist())
phalanx.close()
"""
WHAT = ("rpc.init()", "and each has called another", "one calls all", "the whole job")


def measured(ranks: int) -> list[float]:
    """The times of one job."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "join.py"
        script.write_text(SCRIPT)
        began = time.monotonic()
        command = [sys.executable, "-m", "phalanx", "run", "--no-prefix", "-n", str(ranks), str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        elapsed = time.monotonic() - began
    lines = [line for line in done.stdout.splitlines() if line.startswith("times ")]
    if done.returncode or len(lines) != 1:
        sys.exit(f"{ranks} ranks failed (code {done.returncode}):\n{done.stdout}{done.stderr}")
    return [*map(float, lines[0].split()[1:]), elapsed]


def main() -> None:
    """Parse the command line, run the jobs, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=100, metavar="RANKS")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [measured(options.n) for _ in range(options.rounds)]
    for what, times in zip(WHAT, zip(*rounds, strict=True), strict=True):
        print(f"{what:<28}{statistics.median(times):8.2f} s   ({min(times):.2f} to {max(times):.2f})")


if __name__ == "__main__":
    main()
