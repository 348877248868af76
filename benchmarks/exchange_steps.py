"""What each step of an all_to_all_single between hosts costs, beside Gloo's own, where links are quicker than memory.

The steps are put together one after the other, with Gloo's messages as Phalanx uses them:

sent         each part goes straight to its receiver; what stays in a host, through shared memory. Ranks whose calls or
             sizes differ would end or wait for ever, and so would a rank whose peer dies in the middle of a message.
apart        the same, and the messages are waited for on another thread, so that a rank whose peer dies can go on.
compared     the same, after all ranks have compared their calls.
phalanx      what users get.

It makes two hosts on this machine (``tests/support/hosts.py``), so it needs root and iproute2.

    python benchmarks/exchange_steps.py
    python benchmarks/exchange_steps.py --ranks 1 --sizes 1M --rounds 40
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.hosts import running_hosts, why_no_hosts

HOSTS = 2
PORT = 29579
WARM_UP_CALLS = 3
ROUND_S = 0.03
_UNITS = {"K": 1 << 10, "M": 1 << 20}


class Apart:
    """A thread that waits for messages."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Sequence[dist.Work]] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, works: Sequence[dist.Work]) -> None:
        """Wait for them there."""
        self._tasks.put(works)

    def end(self) -> None:
        """Wait here until they have come."""
        self._done.get()

    def _run(self) -> None:
        while works := self._tasks.get():
            for work in works:
                work.wait()
            self._done.put(None)


class Exchange:
    """One exchange of equal parts, in as many steps as are asked for.

    Args:
        gloo: all ranks, for messages.
        inside: the ranks of this host, over shared memory.
        ranks: how many each host has.
        nbytes: what a rank sends, itself included.
    """

    def __init__(self, gloo: dist.ProcessGroup, inside: dist.ProcessGroup, ranks: int, nbytes: int) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        first = rank // ranks * ranks
        self._here = slice(first, first + ranks)
        self._others = [other for other in range(size) if not first <= other < first + ranks]
        self.given = torch.full((size, max(1, nbytes // 4 // size)), float(rank))
        self.taken = torch.empty_like(self.given)
        self._gloo, self._inside, self._apart = gloo, inside, Apart()
        self._word = torch.zeros(1)

    def sent(self) -> None:
        """Send the parts, and wait for each message here."""
        works = self._begin()
        self._exchange_inside()
        for work in works:
            work.wait()

    def apart(self) -> None:
        """Send the parts, and wait for the messages on another thread."""
        self._apart.begin(self._begin())
        self._exchange_inside()
        self._apart.end()

    def compared(self) -> None:
        """As :meth:`apart`, after a small collective, which compares the calls as each one does."""
        dist.all_reduce(self._word)
        self.apart()

    def phalanx(self) -> None:
        """What users get."""
        dist.all_to_all_single(self.taken, self.given)

    def gloo(self) -> None:
        """Gloo's own."""
        dist.all_to_all_single(self.taken, self.given, group=self._gloo)

    def check(self) -> None:
        """Raise unless each part has come from its rank."""
        expected = torch.arange(len(self.taken), dtype=torch.float32)[:, None].expand_as(self.taken)
        torch.testing.assert_close(self.taken, expected, rtol=0, atol=0)
        self.taken.fill_(-1)

    def _begin(self) -> list[dist.Work]:
        works = [self._gloo.recv([self.taken[other]], other, 0) for other in self._others]
        return works + [self._gloo.send([self.given[other]], other, 0) for other in self._others]

    def _exchange_inside(self) -> None:
        dist.all_to_all_single(self.taken[self._here], self.given[self._here], group=self._inside)


def measure(sizes: Sequence[int], ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The seconds of a call in each round, by size and step, as a rank: those of the slowest rank."""
    dist.init_process_group("phalanx")
    gloo = dist.new_group(backend="gloo")
    groups = [dist.new_group(list(range(host * ranks, (host + 1) * ranks))) for host in range(HOSTS)]
    inside = groups[dist.get_rank() // ranks]
    found = {}
    for nbytes in sizes:
        exchange = Exchange(gloo, inside, ranks, nbytes)
        steps: list[Callable[[], None]] = [
            exchange.gloo,
            exchange.sent,
            exchange.apart,
            exchange.compared,
            exchange.phalanx,
        ]
        calls = {}
        for step in steps:
            for _ in range(WARM_UP_CALLS):
                began = time.monotonic()
                step()
                calls[step.__name__] = max(1, round(ROUND_S / (time.monotonic() - began)))
                exchange.check()
        counts = [calls]
        dist.broadcast_object_list(counts)
        times: dict[str, list[float]] = {step.__name__: [] for step in steps}
        for _ in range(rounds):
            for step in steps:
                dist.barrier()
                began = time.monotonic()
                for _ in range(counts[0][step.__name__]):
                    step()
                mine_s = (time.monotonic() - began) / counts[0][step.__name__]
                all_s = [0.0] * dist.get_world_size()
                dist.all_gather_object(all_s, mine_s)
                times[step.__name__].append(max(all_s))
        found[str(nbytes)] = times
    dist.destroy_process_group()
    return found


def on_hosts(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """What rank 0 has measured."""
    size = HOSTS * options.ranks
    command = [sys.executable, __file__, "--measure", "--ranks", str(options.ranks), "--rounds", str(options.rounds)]
    command += ["--sizes", options.sizes]
    with tempfile.TemporaryDirectory() as folder, running_hosts(HOSTS, Path(folder)) as hosts:
        processes = []
        for rank in range(size):
            local = rank % options.ranks
            place = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": options.ranks}
            meeting = {"MASTER_ADDR": "h0", "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
            environment = {name: str(value) for name, value in {**place, **meeting}.items()}
            processes.append(hosts.start(rank // options.ranks, command, environment, stdout=subprocess.PIPE))
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank has failed, see above")
    found: dict[str, dict[str, list[float]]] = json.loads(outputs[0].splitlines()[-1])
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """The medians for people, in µs, and the median of Gloo's time divided by each one's in the same round."""
    names = list(next(iter(found.values())))
    lines = [f"{'bytes of a rank':>16}" + "".join(f"{name:>16}" for name in names)]
    for nbytes, times in found.items():
        cells = []
        for name in names:
            ratio = statistics.median(gloo / ours for gloo, ours in zip(times["gloo"], times[name], strict=True))
            cells.append(f"{1e6 * statistics.median(times[name]):>8,.0f} ({ratio:.2f})")
        lines.append(f"{int(nbytes):>16,}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def sizes_of(text: str) -> list[int]:
    """The sizes in bytes: ``512K,1M``."""
    return [int(word.rstrip("KM")) * _UNITS.get(word[-1], 1) for word in text.upper().split(",")]


def main() -> None:
    """Measure as a rank, or make the hosts and start the ranks on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="512K,1M,2M,4M", help="of all parts of a rank together [%(default)s]")
    parser.add_argument("--ranks", type=int, default=2, help="on each host [%(default)s]")
    parser.add_argument("--rounds", type=int, default=20, help="of which the median counts [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample, in seconds")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(sizes_of(options.sizes), options.ranks, options.rounds)))
        return
    if why := why_no_hosts():
        sys.exit(f"no hosts can be made here: {why}")
    found = on_hosts(options)
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
