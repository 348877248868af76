"""How soon a job whose rank was killed works again: ``phalanx run --restarts``.

A job of some ranks is started again and again. In each one a random rank is killed (SIGKILL) at a random moment after
the first rank has begun to run its script: while the ranks import torch, meet, or call all_reduce one time after the
other. All processes read the same clock. A job has recovered if every rank of the next attempt has done an all_reduce,
and the launcher then ends with 0. The time is that from the kill until the last of these ranks has done it.

    python benchmarks/restarts.py
    python benchmarks/restarts.py --rounds 100 --ranks 8
    python benchmarks/restarts.py --rounds 5 --against-torchrun

With ``--against-torchrun`` the same script runs under ``torchrun --max-restarts`` as well, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

# How long a job may take to go on before it counts as not recovered.
PATIENCE_S = 120.0
# The moment of the kill is drawn from so many seconds after the first rank has begun.
LATEST_S = 2.0


def say(**said: object) -> None:
    """Print one line in one piece."""
    os.write(1, json.dumps(said).encode() + b"\n")


def work() -> None:
    """What each rank does: in the first attempt it computes until it is ended."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    say(what="began", attempt=attempt, rank=rank, pid=os.getpid(), at=time.monotonic())
    import torch

    import phalanx

    with phalanx.init(quiet=True) as world:
        x = torch.ones(1000)
        world.all_reduce(x)
        say(what="worked", attempt=attempt, rank=rank, at=time.monotonic())
        while attempt == 0:
            world.all_reduce(x.fill_(1.0))
        world.barrier()


def command(launcher: str, ranks: int) -> list[str]:
    """The command line that starts this file on so many ranks."""
    script = [__file__, "--work"]
    if launcher == "phalanx":
        run = [sys.executable, "-m", "phalanx", "run", "-q", "--no-prefix", "--restarts", "1"]
        return [*run, "-n", str(ranks), *script]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    return [*run, "--nproc-per-node", str(ranks), *script]


def lines_of(process: subprocess.Popen[bytes], until: float) -> Iterator[dict[str, object]]:
    """What the ranks say, as it comes, until a time on the monotonic clock; nothing more once the job has ended."""
    output = process.stdout
    if output is None:
        return
    rest = b""
    while (left_s := until - time.monotonic()) > 0 and select.select([output], [], [], left_s)[0]:
        data = os.read(output.fileno(), 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from (json.loads(line) for line in whole if line.startswith(b"{"))


def recover(launcher: str, ranks: int, draw: random.Random) -> float | None:
    """Run one job and kill one of its ranks; the seconds until all ranks worked again, None if they did not."""
    process = subprocess.Popen(command(launcher, ranks), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    victim, after_s = draw.randrange(ranks), draw.uniform(0.0, LATEST_S)
    try:
        pids: dict[int, int] = {}
        for line in lines_of(process, time.monotonic() + PATIENCE_S):
            if line["what"] == "began":
                pids[int(str(line["rank"]))] = int(str(line["pid"]))
            if len(pids) == ranks:
                break
        else:
            return None
        # The pipe keeps what the ranks say meanwhile.
        time.sleep(after_s)
        killed_at = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        worked: dict[int, float] = {}
        for line in lines_of(process, killed_at + PATIENCE_S):
            if line["what"] == "worked" and line["attempt"] == 1:
                worked[int(str(line["rank"]))] = float(str(line["at"]))
        ended_well = process.wait(PATIENCE_S) == 0
        return max(worked.values()) - killed_at if ended_well and len(worked) == ranks else None
    finally:
        process.kill()
        process.communicate()


def describe(launcher: str, rounds: int, ranks: int, taken: list[float]) -> str:
    """One line with the result for one launcher."""
    if not taken:
        return f"{launcher}: none of {rounds} jobs of {ranks} ranks recovered"
    highest = sorted(taken)[max(0, -(-len(taken) * 99 // 100) - 1)]
    return (
        f"{launcher}: {len(taken)} of {rounds} jobs of {ranks} ranks recovered; from the kill until all ranks worked "
        f"again median {statistics.median(taken):.2f} s, 99 % {highest:.2f} s"
    )


def main() -> None:
    """Measure, and print a line for each launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how many jobs [%(default)s]")
    parser.add_argument("--ranks", type=int, default=8, help="of how many ranks each [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and moments that are drawn [%(default)s]")
    parser.add_argument("--against-torchrun", action="store_true", help="measure torchrun --max-restarts as well")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    launchers = ["phalanx", *(["torchrun"] if options.against_torchrun else [])]
    taken: dict[str, list[float]] = {launcher: [] for launcher in launchers}
    for number in range(options.rounds):
        for launcher in launchers:
            # Each launcher gets the same ranks and moments.
            took_s = recover(launcher, options.ranks, random.Random(options.seed * 1_000_003 + number))
            if took_s is not None:
                taken[launcher].append(took_s)
            print(f"{number + 1:4} {launcher}: {'not recovered' if took_s is None else f'{took_s:.2f} s'}", flush=True)
    for launcher in launchers:
        print(describe(launcher, options.rounds, options.ranks, taken[launcher]))


if __name__ == "__main__":
    main()
