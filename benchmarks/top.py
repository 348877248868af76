"""What a job pays for being watched: all_reduces while ``phalanx top`` looks at it, and while it is held still.

    phalanx run -n 2 benchmarks/top.py

Rank 0 starts ``phalanx top --interval 0.5`` on a terminal of its own and stops it (SIGSTOP) in every other turn, so
that what the machine does meanwhile falls on both. A turn is as long as several looks. Pairs of neighbouring turns are
compared, and the median of their ratios counts. The time that top itself needs is printed too: for that share of its
time a core is not the job's.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import statistics
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

import phalanx
from phalanx.system.processes import process_use

INTERVAL_S = 0.5
TURN_S = 1.5
PAIRS = 30
SIZES = (4, 65536)


class Top:
    """``phalanx top`` on a pseudo-terminal, whose text nobody keeps."""

    def __init__(self) -> None:
        ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "top", os.environ["TORCHELASTIC_RUN_ID"], "--interval", str(INTERVAL_S)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
        )
        os.close(theirs)
        self.shown = os.read(ours, 1 << 16)  # it has begun
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()
        time.sleep(4 * INTERVAL_S)

    def _read(self, terminal: int) -> None:
        with contextlib.suppress(OSError):  # at its end
            while os.read(terminal, 1 << 16):
                pass

    def go_on(self, on: bool) -> None:
        self.process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def cpu_s(self) -> float:
        use = process_use(self.process.pid)
        return use.cpu_s if use is not None else 0.0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Print a line for each size, on rank 0."""
    world = phalanx.init()
    top = Top() if world.rank == 0 else None
    if world.rank == 0:
        print("all_reduce   bytes   calls/s alone   watched/alone: median (quartiles)   top: of a core", flush=True)
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        calls = round(TURN_S / seconds(tensor, 1000) * 1000)
        ratios, alone_s, used_s, watched_s = [], [], 0.0, 0.0
        for pair in range(PAIRS):
            took = {}
            for watched in (False, True) if pair % 2 else (True, False):
                used = 0.0
                if top is not None:
                    top.go_on(watched)
                    used = top.cpu_s()
                took[watched] = seconds(tensor, calls)
                if top is not None and watched:
                    used_s += top.cpu_s() - used
                    watched_s += took[True]
            ratios.append(took[True] / took[False])
            alone_s.append(took[False])
        if top is not None:
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{nbytes:18,} {calls / statistics.median(alone_s):15,.0f}   {middle:.4f} ({low:.4f} to {high:.4f})"
                f"{used_s / watched_s:27.2%}",
                flush=True,
            )
    dist.barrier()
    if top is not None:
        top.end()
    phalanx.close()


def seconds(tensor: torch.Tensor, calls: int) -> float:
    """The time of so many calls, which all ranks make equally often."""
    agreed = torch.tensor([calls])
    dist.broadcast(agreed, 0)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(int(agreed.item())):
        dist.all_reduce(tensor)
    return time.perf_counter() - start


main()
