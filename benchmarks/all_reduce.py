"""all_reduce through torch.distributed: backend phalanx beside Gloo, in one run.

Both backends live in the same processes and take turns, round by round, so that whatever else the machine does
meets both. Each round times as many back-to-back calls as fit a fixed time; the table shows the median over
rounds, its spread, and the ratio of the medians. Run it on an otherwise idle machine:

    python benchmarks/all_reduce.py                      # two ranks, float32
    python benchmarks/all_reduce.py --ranks 4 --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
BACKENDS = ("phalanx", "gloo")
ROUND_S = 0.1


def call_seconds(tensor: torch.Tensor, group: dist.ProcessGroup, calls: int) -> float:
    """The mean time of one call in a run of ``calls``."""
    dist.barrier(group)
    started = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter() - started) / calls


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank's part; rank 0 writes what it measured to a file in ``folder``."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Gloo's best case, and the fair one
    store = FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=options.ranks)
    groups: dict[str, Any] = {name: dist.new_group(backend=name) for name in BACKENDS}
    results = []
    for nbytes in options.sizes:
        tensor = torch.zeros(nbytes // 4)
        calls = {}
        for name, group in groups.items():
            call_seconds(tensor, group, 2)  # connections, page faults
            trial = torch.tensor([call_seconds(tensor, group, 3)])
            dist.all_reduce(trial, op=dist.ReduceOp.MAX)  # every rank must make the same number of calls
            calls[name] = max(3, min(20000, int(ROUND_S / trial.item())))
        samples: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for _ in range(options.rounds):
            for name, group in groups.items():
                samples[name].append(call_seconds(tensor, group, calls[name]) * 1e6)
        results.append({"nbytes": nbytes, "microseconds": samples})
    if rank == 0:
        with open(f"{folder}/results", "w") as file:
            json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line, run the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(measure, (options, folder), nprocs=options.ranks, start_method="fork")
        with open(f"{folder}/results") as file:
            results = json.load(file)
    if options.json:
        print(json.dumps({"ranks": options.ranks, "torch": torch.__version__, "results": results}))
        return
    print(f"all_reduce, float32, {options.ranks} ranks on {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{'bytes':>10}  {'phalanx µs (spread)':>26}  {'gloo µs (spread)':>26}  {'ratio':>6}")
    for row in results:
        cells, medians = [], []
        for name in BACKENDS:
            samples = sorted(row["microseconds"][name])
            medians.append(statistics.median(samples))
            cells.append(f"{medians[-1]:10.1f} ({samples[0]:.1f}–{samples[-1]:.1f})")
        print(f"{row['nbytes']:>10}  {cells[0]:>26}  {cells[1]:>26}  {medians[1] / medians[0]:>5.1f}x")


if __name__ == "__main__":
    main()
