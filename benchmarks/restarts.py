"""How soon a job whose rank was killed works again: ``phalanx run --restarts``.

A job of some ranks is started again and again. In each one a random rank is killed (SIGKILL) at a random moment after
all ranks have begun to run their script: while they import torch, meet, or call all_reduce one time after the other.
All processes read the same clock. The job has recovered from a kill if every rank of the next attempt has done an
all_reduce, and the launcher ends with 0 after the last kill. The time is that from the kill until the last of these
ranks has done it. With ``--kills 10`` ten attempts of each job end so.

    python benchmarks/restarts.py
    python benchmarks/restarts.py --rounds 100 --ranks 8
    python benchmarks/restarts.py --rounds 5 --against-torchrun
    python benchmarks/restarts.py --rounds 10 --kills 10 --backend gloo

With ``--backend gloo`` the ranks join by torch alone, and talk over Gloo. With ``--against-torchrun`` the same script
runs under ``torchrun --max-restarts`` as well, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# How long a job may take to go on before it counts as not recovered.
PATIENCE_S = 120.0
# The moment of the kill is drawn from so many seconds after the first rank has begun.
LATEST_S = 2.0
# That of each further kill in the same job; a job of many kills is measured sooner than as many jobs of one.
LATER_S = 0.5
BACKENDS = ("phalanx", "gloo")


def say(**said: object) -> None:
    """Print one line in one piece."""
    os.write(1, json.dumps(said).encode() + b"\n")


@contextlib.contextmanager
def joined(backend: str) -> Iterator[tuple[Callable[[torch.Tensor], object], Callable[[], object]]]:
    """The world over a backend: its all_reduce and its barrier."""
    if backend == "phalanx":
        import phalanx

        with phalanx.init(quiet=True) as world:
            yield world.all_reduce, world.barrier
    else:
        import torch.distributed as dist

        dist.init_process_group(backend)
        yield dist.all_reduce, dist.barrier
        dist.destroy_process_group()


def work(backend: str, kills: int) -> None:
    """What each rank does: in each attempt but the last one it computes until it is ended."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    say(what="began", attempt=attempt, rank=rank, pid=os.getpid(), at=time.monotonic())
    import torch

    with joined(backend) as (all_reduce, barrier):
        x = torch.ones(1000)
        all_reduce(x)
        say(what="worked", attempt=attempt, rank=rank, at=time.monotonic())
        while attempt < kills:
            all_reduce(x.fill_(1.0))
        barrier()


def command(launcher: str, options: argparse.Namespace) -> list[str]:
    """The command line that starts this file on the ranks."""
    ranks, kills = str(options.ranks), str(options.kills)
    script = [__file__, "--work", "--backend", options.backend, "--kills", kills]
    if launcher == "phalanx":
        run = [sys.executable, "-m", "phalanx", "run", "-q", "--no-prefix", "--restarts", kills]
        return [*run, "-n", ranks, *script]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", kills]
    return [*run, "--nproc-per-node", ranks, *script]


class Ranks:
    """What the ranks of a job say, as it comes; nothing more comes once the job has ended."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._rest = b""
        self._said: dict[tuple[object, object], dict[int, dict[str, Any]]] = {}

    def all_said(self, what: str, attempt: int, ranks: int) -> list[dict[str, Any]] | None:
        """What so many ranks have said of this kind in an attempt, in their order; None if they do not in time."""
        until = time.monotonic() + PATIENCE_S
        said = self._said.setdefault((what, attempt), {})
        while len(said) < ranks:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([self._output], [], [], left_s)[0]:
                return None
            data = os.read(self._output, 1 << 16)
            if not data:
                return None
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in (json.loads(line) for line in lines if line.startswith(b"{")):
                self._said.setdefault((line["what"], line["attempt"]), {})[line["rank"]] = line
        return [said[rank] for rank in sorted(said)]


def recover(launcher: str, options: argparse.Namespace, draw: random.Random) -> list[float]:
    """Run one job and kill its ranks; for each kill the seconds until all ranks worked again, as far as they did."""
    words = command(launcher, options)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    taken: list[float] = []
    try:
        if process.stdout is None:
            return taken
        ranks = Ranks(process.stdout.fileno())
        for attempt in range(options.kills):
            # The pipe keeps what the ranks say meanwhile.
            victim, after_s = draw.randrange(options.ranks), draw.uniform(0.0, LATER_S if attempt else LATEST_S)
            began = ranks.all_said("began", attempt, options.ranks)
            if began is None:
                return taken
            time.sleep(after_s)
            killed_at = time.monotonic()
            os.kill(began[victim]["pid"], signal.SIGKILL)
            worked = ranks.all_said("worked", attempt + 1, options.ranks)
            if worked is None:
                return taken
            taken.append(max(said["at"] for said in worked) - killed_at)
        return taken if process.wait(PATIENCE_S) == 0 else taken[:-1]
    finally:
        process.kill()
        process.communicate()


def describe(launcher: str, options: argparse.Namespace, taken: list[float]) -> str:
    """One line with the result for one launcher."""
    kills = options.rounds * options.kills
    if not taken:
        return f"{launcher}: none of {kills} kills in jobs of {options.ranks} ranks recovered"
    highest = sorted(taken)[max(0, -(-len(taken) * 99 // 100) - 1)]
    return (
        f"{launcher}: {len(taken)} of {kills} kills in jobs of {options.ranks} ranks recovered; from the kill until "
        f"all ranks worked again median {statistics.median(taken):.2f} s, 99 % {highest:.2f} s, "
        f"longest {max(taken):.2f} s"
    )


def main() -> None:
    """Measure, and print a line for each launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how many jobs [%(default)s]")
    parser.add_argument("--ranks", type=int, default=8, help="of how many ranks each [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and moments that are drawn [%(default)s]")
    parser.add_argument("--kills", type=int, default=1, help="in each job, one after the other [%(default)s]")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="of the ranks [%(default)s]")
    parser.add_argument("--against-torchrun", action="store_true", help="measure torchrun --max-restarts as well")
    parser.add_argument("--json", action="store_true", help="print one JSON array with every time, in seconds")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.backend, options.kills)
        return
    launchers = ["phalanx", *(["torchrun"] if options.against_torchrun else [])]
    taken: dict[str, list[float]] = {launcher: [] for launcher in launchers}
    for number in range(options.rounds):
        for launcher in launchers:
            # Each launcher gets the same ranks and moments.
            times = recover(launcher, options, random.Random(options.seed * 1_000_003 + number))
            taken[launcher] += times
            lost = options.kills - len(times)
            words = [f"{time_s:.2f} s" for time_s in times] + ([f"{lost} not recovered"] if lost else [])
            line = f"{number + 1:4} {launcher}: {', '.join(words)}"
            print(line, flush=True, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        kills = options.rounds * options.kills
        print(json.dumps([{"launcher": one, "kills": kills, "taken_s": times} for one, times in taken.items()]))
        return
    for launcher in launchers:
        print(describe(launcher, options, taken[launcher]))


if __name__ == "__main__":
    main()
