"""The work of one rank: it measures every case of the options, on all backends, in rounds.

In every round each backend has one turn, so whatever else the machine does slows all of them. A turn is a barrier and
then as many back-to-back calls as fit the time of a turn; the ranks find that number by trial and agree on it. A
turn's figure is the mean time of a call on the slowest rank: a rank may return from a call early and leave work to the
others, and that work is then counted on them. The CPU time of a call is the median over the turns on the rank that used
most, with all its threads; the barrier before the calls is in it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from phalanx import settings
from phalanx.bench.buffers import Buffers
from phalanx.bench.calls import Call, MpiBuffers
from phalanx.bench.cases import MEMCPY, MPI, NOTHING, BenchOptions, Case, tuning_label
from phalanx.bench.links import Links, stated_bytes
from phalanx.bench.machine import mpi_description, versions
from phalanx.bench.noise import CpuClock, Noise, probe, probe_spread, severity
from phalanx.bench.nothing import register_nothing
from phalanx.bench.operations import DTYPES, OPERATIONS, Operation
from phalanx.c10d.register import register
from phalanx.system.host import this_host
from phalanx.system.limits import usable_cores
from phalanx.topology.topology import Node
from phalanx.transports.hosts.bounds import busiest
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning, tuning_in_force
from phalanx.words import format_size

__all__ = ["TIMEOUT", "measure_cases", "run_rank"]

TIMEOUT = timedelta(seconds=120)
MOST_CALLS = 100_000
FEWEST_CALLS = 2
# A library that waits actively on shared cores can take seconds a call. A backend gets fewer turns if they would take
# longer than this, and once a call does, no larger sizes.
PATIENCE_S = 5.0
GLANCE_S = 0.25  # how long the machine is watched to find out whether it is quiet
EMPTY_DTYPE = "uint8"  # of the buffers of an operation that moves no data


def run_rank(rank: int, size: int, folder: Path, options: BenchOptions, mpi: Any = None) -> None:
    """Measure every case; rank 0 writes each row as a line of JSON into the pipe ``folder/events``.

    Args:
        rank, size: this process's place in the world.
        folder: where the ranks meet; the same for every rank.
        options: what to measure.
        mpi: the module ``mpi4py.MPI`` if MPI is to be measured too; its COMM_WORLD has the same ranks.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Gloo's quickest interface on one host, to be fair to it
    register()
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group(settings.BACKEND, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    # Buffered by lines, because the reader shows each row as soon as it is measured.
    with open(folder / "events" if rank == 0 else os.devnull, "w", buffering=1) as events:
        measure_cases(rank, size, options, lambda event: events.write(json.dumps(event) + "\n"), mpi=mpi)
        dist.barrier()
        dist.destroy_process_group()


def measure_cases(
    rank: int,
    size: int,
    options: BenchOptions,
    report: Callable[[dict[str, Any]], object],
    *,
    mpi: Any = None,
    nodes: Sequence[Node] = (),
) -> None:
    """Measure every case, in the world that is torch's default process group.

    Args:
        rank, size: this process's place in it.
        options: what to measure.
        report: called on every rank with each event, as :func:`~phalanx.bench.processes.run_ranks` describes them.
        mpi: the module ``mpi4py.MPI`` if MPI is to be measured too.
        nodes: the hosts, if their links are to be measured as well.
    """
    groups = _groups(options)
    communicator = getattr(next(iter(groups.values())), "_communicator", None)
    links = Links(rank, nodes) if len(nodes) > 1 else None
    timer = _CaseTimer(rank, size, options, groups, mpi, links)
    report(
        {
            "event": "started",
            "transport": type(communicator).__name__,
            "engine": getattr(communicator, "engine", ""),
            "shared_memory": isinstance(communicator, SharedMemoryCommunicator),
            "cores": usable_cores(),
            "ranks_of_machine": timer.most_neighbours,
            "hosts": [[node.host, len(node.ranks)] for node in nodes],
            "link_bytes_per_s": timer.rate,
            "versions": versions(),
            "mpi": mpi_description(mpi) if mpi else None,
        }
    )
    for case in options.cases():
        report({"event": "case", **asdict(case)})
        report({"event": "row", **timer.quiet_row(case)})


def _groups(options: BenchOptions) -> dict[str, Any]:
    """A group of all ranks for each backend, or for each tuning, that is to be compared; by its name in the results."""
    if NOTHING in options.against:
        register_nothing(options.asynchronous)
    if not options.tunings:
        return {name: dist.new_group(backend=name, timeout=TIMEOUT) for name in (settings.BACKEND, *options.against)}
    groups = {}
    for values in options.tunings:
        with tuning_in_force(Tuning(*values)):
            groups[tuning_label(values)] = dist.new_group(backend=settings.BACKEND, timeout=TIMEOUT)
    return groups


class _CaseTimer:
    """Measures cases on this rank, together with the other ranks: each calls every method in the same order."""

    def __init__(
        self, rank: int, size: int, options: BenchOptions, groups: dict[str, Any], mpi: Any, links: Links | None
    ) -> None:
        self.rank = rank
        self.size = size
        self.options = options
        self.groups = groups
        self.mpi = mpi
        self.patience_s = options.patience_s
        self.row_s = 0.0
        self.crawls: dict[tuple[str, str, str], int] = {}
        self.links = links
        self.rate = 0.0
        if links is not None:
            self.rate = options.link_bytes_per_s or links.measure_rate()
        # The kernel counts CPU time for the whole machine, so the ranks of each are added up by themselves.
        machines: list[Any] = [None] * size
        dist.all_gather_object(machines, this_host().boot_id)
        self.machines = list(dict.fromkeys(machines))
        self.machine = self.machines.index(machines[rank])
        self.place = machines[:rank].count(machines[rank])
        self.most_neighbours = max(map(machines.count, self.machines))
        self.spread = self._probe()
        gc.collect()
        gc.disable()  # a collection in the middle of a turn would be counted on the backend whose turn it is

    def quiet_row(self, case: Case) -> dict[str, Any]:
        """Measure one case, and repeat it while the machine is noisy and patience lasts; the quietest attempt."""
        row = self.row(case)
        while Noise(**row["noise"]).excessive and self._wait_for_quiet():
            again = self.row(case)
            if severity(Noise(**again["noise"])) < severity(Noise(**row["noise"])):
                row = again
        return row

    def _wait_for_quiet(self) -> bool:
        """Sleep until the machine is quiet. False, on every rank alike, if the time for that is used up."""
        started = time.monotonic()
        while self._largest([started - time.monotonic() + self.patience_s])[0] > 0:
            clock = CpuClock()
            time.sleep(GLANCE_S)
            if not self._noise(clock).excessive:
                break
        self.patience_s -= self._largest([time.monotonic() - started + self.row_s])[0]
        return self.patience_s > 0

    def row(self, case: Case) -> dict[str, Any]:
        """Measure one case on every backend; the result is the same on every rank."""
        began = time.monotonic()
        operation = OPERATIONS[case.operation]
        buffers = operation.make_buffers(self.rank, self.size, case.dtype or EMPTY_DTYPE, case.nbytes)
        nbytes = int(self._largest([buffers.nbytes])[0])
        clock = CpuClock()
        calls, first_s, skipped, wrong = self._ready(case, operation, buffers)
        buffers.clear()
        if nbytes:
            calls[MEMCPY] = _copy(nbytes)
        counts, rounds = {}, {}
        for name, call in calls.items():
            counts[name], mean_s = self._agree(call, first_s.get(name, 0.0))
            rounds[name] = max(1, min(self.options.rounds, int(PATIENCE_S / (counts[name] * mean_s))))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        used: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(self.options.rounds):
            for name, call in calls.items():
                if turn < rounds[name]:
                    before_s = time.process_time()
                    samples[name].append(_mean_s(call, counts[name]))
                    used[name].append((time.process_time() - before_s) / counts[name])
        slowest = self._largest([value for values in samples.values() for value in values])
        busiest = self._largest([statistics.median(values) for values in used.values()])
        self.row_s = time.monotonic() - began
        unit = {name: 1e6 / (1 if name == MEMCPY else operation.messages) for name in samples}
        return {
            **asdict(case),
            "used_nbytes": nbytes,
            "calls": counts,
            "samples_us": {name: [slowest.pop(0) * unit[name] for _ in values] for name, values in samples.items()},
            "cpu_us": {name: own_s * unit[name] for name, own_s in zip(used, busiest, strict=True)},
            "left_out": skipped,
            "wrong": wrong,
            "noise": asdict(self._noise(clock)),
            **self._crossing(operation, buffers, calls),
        }

    def _crossing(self, operation: Operation, buffers: Buffers, calls: dict[str, Call]) -> dict[str, Any]:
        """What has to cross the link of each host, and what does, as ``[sent, received]``; nothing on one host."""
        if self.links is None:
            return {}
        stated = stated_bytes(operation, buffers, self.links.hosts)
        counted = {name: self.links.count(call) for name, call in calls.items() if name not in (MEMCPY, NOTHING)}
        return {
            "stated_bytes": None if stated is None else [[link.sent, link.received] for link in stated],
            "wire_us": None if stated is None else busiest(stated) / self.rate * 1e6,
            "counted_bytes": counted,
        }

    def _ready(
        self, case: Case, operation: Operation, buffers: Buffers
    ) -> tuple[dict[str, Call], dict[str, float], dict[str, str], list[str]]:
        """Make one call on each backend and check it.

        Returns:
            The calls that gave the right result, and how long each took; the reason why each other backend is left
            out; and the backends that computed something wrong.
        """
        asynchronous = self.options.asynchronous
        candidates = {name: operation.torch(group, buffers, asynchronous) for name, group in self.groups.items()}
        calls: dict[str, Call] = {}
        first_s: dict[str, float] = {}
        skipped: dict[str, str] = {}
        wrong: list[str] = []
        if self.mpi is not None:
            datatype = DTYPES[case.dtype or EMPTY_DTYPE]
            if datatype is None:
                skipped[MPI] = f"MPI has no datatype for {case.dtype} that every library knows"
            else:
                candidates[MPI] = operation.mpi(MpiBuffers(buffers, self.mpi, datatype), asynchronous)
        for name, call in candidates.items():
            crawl = (case.operation, case.dtype, name)
            if crawl in self.crawls and case.nbytes >= self.crawls[crawl]:
                skipped[name] = f"a call with {format_size(self.crawls[crawl])} took more than {PATIENCE_S:g} s"
                continue
            buffers.fill()
            dist.barrier()
            started = time.perf_counter()
            error: str | None = None
            difference: str | None = None
            try:
                call()
                first_s[name] = time.perf_counter() - started
                difference = None if name == NOTHING else buffers.difference(operation.expected(buffers))
            except Exception as problem:
                error = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            first_s[name] = self._largest([first_s.get(name, 0.0)])[0]
            if first_s[name] > PATIENCE_S:
                self.crawls[crawl] = case.nbytes
            texts: list[Any] = [None] * self.size
            dist.all_gather_object(texts, (error, difference))
            errors, differences = ([pair[i] for pair in texts if pair[i] is not None] for i in (0, 1))
            if errors:
                skipped[name] = errors[0]
            elif differences:
                skipped[name] = f"wrong result: {differences[0]}"
                wrong.append(name)
            else:
                calls[name] = call
        return calls, first_s, skipped, wrong

    def _agree(self, call: Call, first_s: float) -> tuple[int, float]:
        """How many calls fill a turn, the same number on every rank; and the mean time of one.

        Args:
            call: what is to be timed.
            first_s: how long the first call took; if it took more than a second, no further trial is made.
        """
        if first_s > 1.0:
            return 1, first_s
        _mean_s(call, FEWEST_CALLS)  # not counted: these make connections and touch new pages
        count, round_s = FEWEST_CALLS, self.options.round_s
        while True:
            mean_s = self._largest([_mean_s(call, count)])[0]
            if mean_s * count >= round_s / 10 or count == MOST_CALLS:
                return max(FEWEST_CALLS, min(MOST_CALLS, int(round_s / mean_s))), mean_s
            count = min(MOST_CALLS, count * 8)

    def _probe(self) -> float:
        """The probe's spread on the rank where it is largest; only as many ranks probe as there are cores."""
        samples = [1.0]
        if self.place < usable_cores():
            samples = probe()
        else:
            time.sleep(0.02)  # waiting actively in the collective below would disturb the ranks that probe
        return self._largest([probe_spread(samples)])[0]

    def _noise(self, clock: CpuClock) -> Noise:
        own = torch.zeros(len(self.machines), dtype=torch.float64)
        own[self.machine] = clock.own_s()
        dist.all_reduce(own)
        stolen, others = self._largest([*clock.shares(own[self.machine].item())])
        before, self.spread = self.spread, self._probe()
        return Noise(max(before, self.spread), stolen, others)

    def _largest(self, figures: list[float]) -> list[float]:
        """The largest value of each figure on any rank."""
        tensor = torch.tensor(figures, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        result: list[float] = tensor.tolist()
        return result


def _mean_s(call: Call, count: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in repeat(None, count):
        call()
    return (time.perf_counter() - started) / count


def _copy(nbytes: int) -> Call:
    """Copy that many bytes within this process; no transport through memory can be much quicker than that."""
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    pointers = target.data_ptr(), source.data_ptr()

    def copy(keep: tuple[torch.Tensor, torch.Tensor] = (source, target)) -> None:
        ctypes.memmove(*pointers, nbytes)

    return copy
