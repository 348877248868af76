"""Measure every case on all backends, on one rank.

In every round each backend has one turn: a barrier, and then as many back-to-back calls as fit the time of a turn. Its
figure is the mean time of a call on the slowest rank, because a rank may return early and leave work to the others.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy
import torch
import torch.distributed as dist

from phalanx import settings, world
from phalanx.bench.cases import MEMCPY, MPI, NOTHING, BenchOptions, Case, tuning_label
from phalanx.bench.links import Links, busiest, outward_interface, stated_bytes
from phalanx.bench.machine import CpuClock, Noise, probe, probe_spread, versions
from phalanx.bench.operations import DTYPES, OPERATIONS, Buffers, Call, MpiBuffers, Operation
from phalanx.c10d.work import DoneWork
from phalanx.errors import LaunchError
from phalanx.system.limits import memory_left, usable_cores
from phalanx.system.processes import set_name
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning, tuning_in_force
from phalanx.words import format_gib, format_size

Report = Callable[[dict[str, Any]], object]

TIMEOUT = timedelta(seconds=120)
# How many buffers of the largest size a rank may hold at once: what it sends and receives, memcpy's two, the expected
# result and its parts, and one that Gloo makes.
MOST_BUFFERS = 8
MOST_CALLS, FEWEST_CALLS = 100_000, 2
# All turns of a backend take no longer: a library that waits actively on shared cores can take seconds a call.
PATIENCE_S = 5.0
EMPTY_DTYPE = "uint8"  # of the buffers of an operation that moves no data


def main() -> None:
    """Measure on a rank that ``phalanx bench`` has started; rank 0 prints each event as a line of JSON.

    The arguments are the options, as JSON, and ``mpi`` if MPI is to be measured too.
    """
    mpi = _load_mpi() if MPI in sys.argv[2:] else None
    run_rank(BenchOptions(**json.loads(sys.argv[1])), lambda event: print(json.dumps(event), flush=True), mpi=mpi)


def _load_mpi() -> Any:
    size = int(os.environ["WORLD_SIZE"])
    # With "funneled" a library needs no locks. But if ranks share cores, MPICH yields its core while it waits only if
    # other threads may call it; otherwise a call waits for whole time slices (measured: 500 times as long).
    importlib.import_module("mpi4py").rc.thread_level = "funneled" if size <= usable_cores() else "multiple"
    mpi = importlib.import_module("mpi4py.MPI")
    if size != mpi.COMM_WORLD.size:
        raise LaunchError(
            f"{size} ranks were started, and each of them found a world of {mpi.COMM_WORLD.size}: this mpiexec does "
            f"not belong to the library that mpi4py loads ({mpi.Get_library_version().splitlines()[0]}); give that "
            f"library's mpiexec with --mpi"
        )
    return mpi


def run_rank(options: BenchOptions, report: Report, *, mpi: Any = None, quiet: bool = True) -> None:
    """Join the world of this process's launcher, and measure every case with its ranks.

    Args:
        options: what to measure; their ``ranks`` do not count.
        report: called on rank 0 with each event: ``started`` once, and ``row`` for each case.
        mpi: the module ``mpi4py.MPI`` if MPI is to be measured too.
        quiet: print no rank table.

    Raises:
        LaunchError: a host cannot hold the buffers of its ranks.
    """
    torch.set_num_threads(1)
    with world.init(settings.BACKEND, device="cpu", timeout_s=TIMEOUT.total_seconds(), quiet=quiet) as joined:
        set_name(f"bench-{joined.rank}")
        # Gloo's quickest interface on one host. Between hosts it would listen where the host's name leads.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", outward_interface() if joined.num_nodes > 1 else "lo")
        need, left = MOST_BUFFERS * max(options.sizes) * joined.local_world_size, memory_left()
        if left is not None and need > left:
            raise LaunchError(
                f"{joined.local_world_size} ranks with buffers of {format_size(max(options.sizes))} need about "
                f"{format_gib(need)}, and {format_gib(left)} are left here; choose smaller --sizes or fewer ranks"
            )
        groups = _groups(options)
        timer = _CaseTimer(joined, options, groups, mpi)
        vendor = mpi.get_vendor() if mpi else None  # "Open MPI", (5, 0, 11)
        communicator = getattr(next(iter(groups.values())), "_communicator", None)
        started = {
            "event": "started",
            "transport": type(communicator).__name__,
            "engine": getattr(communicator, "engine", ""),
            "shared_memory": isinstance(communicator, SharedMemoryCommunicator),
            "cores": usable_cores(),
            "ranks_of_machine": max(len(node.ranks) for node in joined.nodes),
            "hosts": [[node.host, len(node.ranks)] for node in joined.nodes],
            "link_bytes_per_s": timer.rate,
            "versions": versions(),
            "mpi": {"name": vendor[0], "version": ".".join(map(str, vendor[1]))} if vendor else None,
        }
        rows = ({"event": "row", **timer.quiet_row(case)} for case in options.cases())
        for event in chain([started], rows):
            if joined.rank == 0:
                report(event)
        joined.barrier()


def _groups(options: BenchOptions) -> dict[str, Any]:
    """Make a group of all ranks for each backend, or for each tuning, by its name in the results."""
    if NOTHING in options.against:
        _register_nothing(options.asynchronous)
    if not options.tunings:
        return {name: dist.new_group(backend=name, timeout=TIMEOUT) for name in (settings.BACKEND, *options.against)}
    groups = {}
    for values in options.tunings:
        with tuning_in_force(Tuning(*values)):
            groups[tuning_label(values)] = dist.new_group(backend=settings.BACKEND, timeout=TIMEOUT)
    return groups


def _register_nothing(asynchronous: bool) -> None:
    """Let ``new_group(backend="nothing")`` make groups whose operations move nothing: what torch itself costs."""
    done = DoneWork([])
    collectives = (
        *("allreduce", "reduce", "broadcast", "allgather", "_allgather_base", "all_gather_single", "gather"),
        *("gather_single", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
        *("alltoall", "alltoall_base", "all_to_all_single", "barrier"),
    )
    methods: dict[str, Any] = {"getBackendName": lambda _: NOTHING, "shutdown": lambda _: None}
    methods |= {name: lambda *_, **__: done for name in ("send", "recv")}
    # A synchronous collective returns no handle.
    methods |= {name: lambda *_, **__: done if asynchronous else None for name in collectives}
    kind: Any = type("NothingGroup", (dist.ProcessGroup,), methods)

    def create(given: Any, _options: Any) -> Any:
        group = kind(given.group_rank, given.group_size)
        group._set_group_name(given.group_id)
        return group

    dist.Backend.register_backend(NOTHING, create, extended_api=True, devices=["cpu"])


@dataclass
class _Timed:
    """A backend's call while a case is measured; a turn has ``count`` calls."""

    call: Call
    first_s: float
    count: int = 0
    turns: int = 0
    samples_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


class _CaseTimer:
    """Measure cases together with the other ranks: each calls every method in the same order."""

    def __init__(self, joined: world.World, options: BenchOptions, groups: dict[str, Any], mpi: Any) -> None:
        self.world, self.options, self.groups, self.mpi = joined, options, groups, mpi
        self.patience_s = options.patience_s
        self.links = Links(joined.rank, joined.nodes) if joined.num_nodes > 1 else None
        self.rate = (options.link_bytes_per_s or self.links.measure_rate()) if self.links else 0.0
        self.spread = self._probe()
        gc.collect()
        gc.disable()  # a collection in the middle of a turn would be counted on the backend whose turn it is

    def quiet_row(self, case: Case) -> dict[str, Any]:
        """Measure one case, and again while the machine is noisy and patience lasts; return the quietest attempt."""
        best = self.row(case)
        while Noise(**best["noise"]).excessive and self.patience_s > 0:
            began = time.monotonic()
            best = min(best, self.row(case), key=lambda row: Noise(**row["noise"]).severity)
            self.patience_s -= self._largest([time.monotonic() - began])[0]  # the same on every rank
        return best

    def row(self, case: Case) -> dict[str, Any]:
        """Measure one case on every backend; the result is the same on every rank."""
        clock = CpuClock()
        operation = OPERATIONS[case.operation]
        buffers = Buffers(operation, self.world.rank, self.world.size, case.dtype or EMPTY_DTYPE, case.nbytes)
        nbytes = int(self._largest([buffers.nbytes])[0])
        timed, left_out, wrong = self._prepare(case, operation, buffers)
        buffers.clear()
        if nbytes:
            timed[MEMCPY] = _Timed(_copy(nbytes), 0.0)
        for each in timed.values():
            self._agree(each)
        for turn in range(self.options.rounds):
            for each in timed.values():
                if turn < each.turns:
                    before_s = time.process_time()
                    each.samples_s.append(_mean_s(each.call, each.count))
                    each.cpu_s.append((time.process_time() - before_s) / each.count)
        unit = {name: 1e6 / (1 if name == MEMCPY else operation.messages) for name in timed}
        samples = {name: self._largest(each.samples_s) for name, each in timed.items()}
        used = self._largest([statistics.median(each.cpu_s) for each in timed.values()])
        return {
            **asdict(case),
            "used_nbytes": nbytes,
            "calls": {name: each.count for name, each in timed.items()},
            "samples_us": {name: [value * unit[name] for value in values] for name, values in samples.items()},
            "cpu_us": {name: value * unit[name] for name, value in zip(timed, used, strict=True)},
            "left_out": left_out,
            "wrong": wrong,
            "noise": asdict(self._noise(clock)),
            **self._crossing(operation, buffers, timed),
        }

    def _crossing(self, operation: Operation, buffers: Buffers, timed: dict[str, _Timed]) -> dict[str, Any]:
        """Return what has to cross each host's link, and what does, as ``[sent, received]``; nothing on one host."""
        if self.links is None:
            return {}
        stated = stated_bytes(operation, buffers, self.links.hosts)
        moving = {name: each.call for name, each in timed.items() if name not in (MEMCPY, NOTHING)}
        return {
            "stated_bytes": stated and [[link.sent, link.received] for link in stated],
            "wire_us": stated and busiest(stated) / self.rate * 1e6,
            "counted_bytes": {name: self.links.count(call) for name, call in moving.items()},
        }

    def _prepare(
        self, case: Case, operation: Operation, buffers: Buffers
    ) -> tuple[dict[str, _Timed], dict[str, str], list[str]]:
        """Make one call on each backend and compare what it gives.

        Returns:
            The calls that gave the right result; the reason why each other backend is left out; and the backends that
            computed something wrong.
        """
        asynchronous = self.options.asynchronous
        calls = {name: operation.torch(group, buffers, asynchronous) for name, group in self.groups.items()}
        left_out: dict[str, str] = {}
        if self.mpi is not None:
            datatype = DTYPES[case.dtype or EMPTY_DTYPE]
            if datatype is None:
                left_out[MPI] = f"MPI has no datatype for {case.dtype} that every library knows"
            else:
                calls[MPI] = operation.mpi(MpiBuffers(buffers, self.mpi, datatype), asynchronous)
        timed, wrong = {}, []
        for name, call in calls.items():
            buffers.fill()
            dist.barrier()
            started = time.perf_counter()
            error = difference = None
            took_s = 0.0
            try:
                call()
                took_s = time.perf_counter() - started
                difference = None if name == NOTHING else buffers.difference(operation.expected(buffers))
            except Exception as problem:
                error = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            said: list[Any] = [None] * self.world.size
            dist.all_gather_object(said, (error, difference, took_s))
            errors, differences = ([each[i] for each in said if each[i] is not None] for i in (0, 1))
            if errors:
                left_out[name] = errors[0]
            elif differences:
                left_out[name] = f"wrong result: {differences[0]}"
                wrong.append(name)
            else:
                timed[name] = _Timed(call, max(each[2] for each in said))
        return timed, left_out, wrong

    def _agree(self, timed: _Timed) -> None:
        """Find how many calls fill a turn, and how many turns there is time for: the same numbers on every rank."""
        count, mean_s = 1, timed.first_s
        if timed.first_s <= 1.0:
            _mean_s(timed.call, FEWEST_CALLS)  # not counted: these make connections and touch new pages
            count = FEWEST_CALLS
            while True:
                mean_s = self._largest([_mean_s(timed.call, count)])[0]
                if mean_s * count >= self.options.round_s / 10 or count == MOST_CALLS:
                    break
                count = min(MOST_CALLS, count * 8)
            count = max(FEWEST_CALLS, min(MOST_CALLS, int(self.options.round_s / mean_s)))
        timed.count, timed.turns = count, max(1, min(self.options.rounds, int(PATIENCE_S / (count * mean_s))))

    def _probe(self) -> float:
        """Return the probe's spread on the rank where it is largest; only as many ranks probe as there are cores."""
        if self.world.local_rank < usable_cores():
            return self._largest([probe_spread(probe())])[0]
        time.sleep(0.02)  # waiting actively in the collective below would disturb the ranks that probe
        return self._largest([0.0])[0]

    def _noise(self, clock: CpuClock) -> Noise:
        # The kernel counts CPU time for the whole machine, so the ranks of each are added up by themselves.
        own = torch.zeros(self.world.num_nodes, dtype=torch.float64)
        own[self.world.node_rank] = clock.own_s()
        dist.all_reduce(own)
        stolen, others = self._largest([*clock.shares(own[self.world.node_rank].item())])
        before, self.spread = self.spread, self._probe()
        return Noise(max(before, self.spread), stolen, others)

    def _largest(self, figures: list[float]) -> list[float]:
        """Return the largest value of each figure on any rank."""
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
    """Copy that many bytes within this process; no transport through memory can be much quicker."""
    return partial(numpy.copyto, numpy.ones(nbytes, numpy.uint8), numpy.ones(nbytes, numpy.uint8))


if __name__ == "__main__":
    main()
