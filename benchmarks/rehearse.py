"""How long it takes to start and end a rehearsed cluster on this machine, with one all_reduce, and how much memory.

Memory is how far the machine's available memory (MemAvailable) fell. So pages that ranks share count once, and memory
that other programs took meanwhile is included.

    python benchmarks/rehearse.py
    python benchmarks/rehearse.py --cluster 8x8 --rounds 5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SCRIPT = """
import torch, phalanx
world = phalanx.init()
x = torch.ones(1)
world.all_reduce(x)
assert x.item() == world.size
phalanx.close()
"""
SAMPLE_S = 0.05


def available_kib() -> int:
    """How much memory programs can still get, in KiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def measure_once(cluster: str, script: str) -> tuple[float, float, float]:
    """Run it once; wall time in seconds, processor time in seconds, memory in GiB."""
    before = available_kib()
    lowest, ended = [before], threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            lowest[0] = min(lowest[0], available_kib())

    watcher = threading.Thread(target=watch)
    used, begin = os.times(), time.perf_counter()
    watcher.start()
    line = [sys.executable, "-m", "phalanx", "run", "-q", "--rehearse", cluster, script]
    done = subprocess.run(line, capture_output=True, check=False)
    elapsed = time.perf_counter() - begin
    ended.set()
    watcher.join()
    if done.returncode:
        sys.exit(f"{' '.join(line)} failed (code {done.returncode}):\n{done.stderr.decode()}")
    now = os.times()
    cpu_s = now.children_user + now.children_system - used.children_user - used.children_system
    return elapsed, cpu_s, (before - lowest[0]) / (1 << 20)


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", nargs="*", default=["8x8", "32x8"], help="as for --rehearse (default 8x8 32x8)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    rounds: dict[str, list[tuple[float, float, float]]] = {cluster: [] for cluster in arguments.cluster}
    with tempfile.TemporaryDirectory() as directory:
        script = str(Path(directory) / "script.py")
        Path(script).write_text(SCRIPT)
        for _ in range(arguments.rounds):
            for cluster, taken in rounds.items():
                taken.append(measure_once(cluster, script))
    records = [
        {
            "cluster": cluster,
            "median_s": statistics.median(each[0] for each in taken),
            "slowest_s": max(each[0] for each in taken),
            "processor_s": statistics.median(each[1] for each in taken),
            "memory_gib": max(each[2] for each in taken),
        }
        for cluster, taken in rounds.items()
    ]
    cores = len(os.sched_getaffinity(0))
    if arguments.json:
        print(json.dumps({"cores": cores, "rounds": arguments.rounds, "clusters": records}))
        return
    print(f"{cores} cores, {arguments.rounds} rounds; seconds and GiB")
    print(f"{'cluster':10}{'median':>9}{'slowest':>9}{'processor':>11}{'memory':>9}")
    for cluster, record in zip(rounds, records, strict=True):
        figures = [record[name] for name in ("median_s", "slowest_s", "processor_s", "memory_gib")]
        print(f"{cluster:10}{figures[0]:>9.2f}{figures[1]:>9.2f}{figures[2]:>11.2f}{figures[3]:>9.1f}")


if __name__ == "__main__":
    main()
