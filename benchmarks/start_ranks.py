"""How long it takes to start N ranks that import torch, print a line and end: phalanx against torchrun.

The launchers take turns, so that a busy moment of the machine slows both. Medians are compared, because one slow run on
a shared machine changes a mean. ``--memory`` measures instead how much memory a rank does not share with others; with
that figure ``phalanx run`` estimates how many ranks fit.

    python benchmarks/start_ranks.py
    python benchmarks/start_ranks.py --rounds 5 --json
    python benchmarks/start_ranks.py --memory
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = "import os, torch\nprint('rank', os.environ['RANK'], torch.__version__)\n"
# The script uses what training uses, and stops itself (SIGSTOP) at the very end, when the interpreter has been
# finalised: a fork owns a page once it has written to it, and finalisation writes to most pages.
MEMORY_SCRIPT = """
import ctypes, os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1000)
dist.all_reduce(x)
torch.nn.Linear(64, 64)(torch.ones(8, 64)).sum().backward()
libc = ctypes.CDLL(None)
libc["__cxa_atexit"](libc["raise"], ctypes.c_void_p(signal.SIGSTOP), None)
print(os.getpid())
"""


def command(launcher: str, ranks: int, script: str) -> list[str]:
    """The command line that starts ``ranks`` processes with ``launcher``."""
    if launcher == "phalanx":
        return [sys.executable, "-m", "phalanx", "run", "-n", str(ranks), script]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), script]


def time_once(launcher: str, ranks: int, script: str) -> float:
    """Run it once; return the wall time in seconds, process start to process end."""
    begin = time.perf_counter()
    done = subprocess.run(command(launcher, ranks, script), capture_output=True, check=False)
    elapsed = time.perf_counter() - begin
    # Newlines are counted and not lines compared, because under torchrun the ranks' lines run into each other.
    if done.returncode or done.stdout.count(b"\n") != ranks:
        sys.exit(f"{launcher} with {ranks} ranks failed (code {done.returncode}):\n{done.stderr.decode()}")
    return elapsed


def measure(rounds: int, sizes: list[int], alone: list[int], script: str) -> list[dict[str, object]]:
    """Time both launchers at ``sizes`` and phalanx at ``alone``; one record a launcher and size."""
    jobs = [(launcher, ranks) for ranks in sizes for launcher in ("phalanx", "torchrun")]
    jobs += [("phalanx", ranks) for ranks in alone]
    times: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    # The first round is not counted: it brings the files into the page cache.
    for launcher, ranks in jobs[:2]:
        time_once(launcher, ranks, script)
    for _ in range(rounds):
        for job in jobs:
            times[job].append(time_once(*job, script))
    return [
        {
            "launcher": launcher,
            "ranks": ranks,
            "median_s": statistics.median(taken),
            "fastest_s": min(taken),
            "slowest_s": max(taken),
            "rounds": rounds,
        }
        for (launcher, ranks), taken in times.items()
    ]


def measure_memory(script: str, ranks: int = 8) -> list[int]:
    """How much memory, in KiB, each of ``ranks`` processes shared with no other when it ended."""
    line = command("phalanx", ranks, script)
    line[4:4] = ["-q", "--no-prefix"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as launcher:
        if launcher.stdout is None:
            sys.exit("no pipe")
        pids = [int(launcher.stdout.readline()) for _ in range(ranks)]
        try:
            return [private_kib(pid) for pid in pids]
        finally:
            launcher.terminate()


def private_kib(pid: int) -> int:
    """Wait until ``pid`` has stopped, and read how much memory it shares with no other process."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed (default 5)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8], help="sizes timed with both (default 2 8)")
    parser.add_argument("--alone", type=int, nargs="*", default=[64], help="sizes timed with phalanx only (64)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--memory", action="store_true", help="measure a rank's own memory instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        script = str(Path(directory) / "script.py")
        Path(script).write_text(MEMORY_SCRIPT if arguments.memory else SCRIPT)
        if arguments.memory:
            taken = statistics.median(measure_memory(script)) / 1024
            print(f"memory that a rank shares with no other when it ends: {taken:.0f} MiB")
            return
        records = measure(arguments.rounds, arguments.ranks, arguments.alone, script)
    medians = {(record["launcher"], record["ranks"]): record["median_s"] for record in records}
    ratios = {}
    for ranks in arguments.ranks:
        ours, theirs = medians["phalanx", ranks], medians["torchrun", ranks]
        if isinstance(ours, float) and isinstance(theirs, float):
            ratios[str(ranks)] = theirs / ours
    if arguments.json:
        print(json.dumps({"cores": len(os.sched_getaffinity(0)), "times": records, "torchrun_over_phalanx": ratios}))
        return
    print(f"{len(os.sched_getaffinity(0))} cores, {arguments.rounds} rounds; seconds")
    print(f"{'launcher':10}{'ranks':>6}{'median':>9}{'fastest':>9}{'slowest':>9}")
    for record in records:
        print(
            f"{record['launcher']:10}{record['ranks']:>6}"
            f"{record['median_s']:>9.2f}{record['fastest_s']:>9.2f}{record['slowest_s']:>9.2f}"
        )
    for size, ratio in ratios.items():
        print(f"{size} ranks: phalanx starts and ends them in 1/{ratio:.1f} of the time")


if __name__ == "__main__":
    main()
