"""What one rank does: every case of the options, backend by backend and round by round.

A round is one backend's turn: a barrier, then as many back-to-back calls as fit the time of a round. That number
is found by trial and agreed by all ranks. The round's figure is the mean time of a call on the slowest rank, so
work that a rank leaves to others after it has returned is counted on them. The backends take turns within every
round, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from phalanx import settings
from phalanx.bench.cases import BenchOptions, Case, format_size, tuning_label
from phalanx.bench.machine import mpi_description, versions
from phalanx.bench.mpi_calls import left_out, mpi_call
from phalanx.bench.noise import CpuClock, Noise, probe, probe_spread, reasons, severity
from phalanx.bench.operations import Operation, make_operation
from phalanx.c10d.register import register
from phalanx.system.limits import usable_cores
from phalanx.transports.shm.tuning import Tuning, tuning_in_force

__all__ = ["run_rank"]

TIMEOUT = timedelta(seconds=120)
MOST_CALLS = 100_000
FEWEST_CALLS = 2
# A backend that crawls (a library that waits actively, on cores that others want, can take seconds a call) gets fewer
# rounds, and larger sizes are not tried any more.
PATIENCE_S = 5.0
GLANCE_S = 0.25

Call = Callable[[], Any]


def run_rank(rank: int, size: int, folder: Path, options: BenchOptions, mpi: Any = None) -> None:
    """Measure everything; rank 0 writes a line of JSON for each row into the pipe ``folder/events``.

    Args:
        rank, size: this process's place in the world.
        folder: where the ranks meet; every rank is given the same.
        options: what to measure.
        mpi: the module ``mpi4py.MPI`` when MPI is to be measured too; its world is this one.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Gloo's best case on one host, and the fair one
    register()
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group(settings.BACKEND, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    groups = _groups(options)
    # Line by line: whoever reads shows each row as soon as it is measured.
    with open(folder / "events" if rank == 0 else os.devnull, "w", buffering=1) as events:
        transport = type(getattr(next(iter(groups.values())), "_communicator", None)).__name__
        started = {"event": "started", "transport": transport, "cores": usable_cores(), "versions": versions()}
        events.write(json.dumps({**started, "mpi": mpi_description(mpi) if mpi else None}) + "\n")
        bench = _Bench(rank, size, options, groups, mpi)
        for case in options.cases():
            events.write(json.dumps({"event": "case", **asdict(case)}) + "\n")
            events.write(json.dumps({"event": "row", **bench.quiet_row(case)}) + "\n")
        dist.barrier()
        dist.destroy_process_group()


def _groups(options: BenchOptions) -> dict[str, Any]:
    """What is to be compared: a name, and a group of all ranks."""
    if not options.tunings:
        return {name: dist.new_group(backend=name, timeout=TIMEOUT) for name in (settings.BACKEND, *options.against)}
    groups = {}
    for values in options.tunings:
        with tuning_in_force(Tuning(*values)):
            groups[tuning_label(values)] = dist.new_group(backend=settings.BACKEND, timeout=TIMEOUT)
    return groups


class _Bench:
    def __init__(self, rank: int, size: int, options: BenchOptions, groups: dict[str, Any], mpi: Any) -> None:
        self.rank = rank
        self.size = size
        self.options = options
        self.groups = groups
        self.mpi = mpi
        self.patience_s = options.patience_s
        self.row_s = 0.0
        self.crawls: dict[tuple[str, str, str], int] = {}
        self.spread = self._probe()
        gc.collect()
        gc.disable()  # a collection in the middle of a round is nobody's time

    def quiet_row(self, case: Case) -> dict[str, Any]:
        """Measure one case, again while the machine is noisy and patience lasts; the quietest attempt."""
        row = self.row(case)
        while reasons(Noise(**row["noise"])) and self._wait_for_quiet():
            again = self.row(case)
            if severity(Noise(**again["noise"])) < severity(Noise(**row["noise"])):
                row = again
        return row

    def _wait_for_quiet(self) -> bool:
        """Sleep until the machine is quiet; False, on every rank alike, when patience is at its end."""
        started = time.monotonic()
        while self._largest([started - time.monotonic() + self.patience_s])[0] > 0:
            clock = CpuClock()
            time.sleep(GLANCE_S)
            if not reasons(self._noise(clock)):
                break
        self.patience_s -= self._largest([time.monotonic() - started + self.row_s])[0]
        return self.patience_s > 0

    def row(self, case: Case) -> dict[str, Any]:
        """Measure one case on every backend; every rank calls it, and gets the same."""
        began = time.monotonic()
        operation = make_operation(case.operation, self.rank, self.size, case.dtype, case.nbytes)
        nbytes = int(self._largest([operation.nbytes])[0])
        clock = CpuClock()
        calls, first_s, skipped, wrong = self._ready(case, operation)
        operation.clear()
        if nbytes:
            calls["memcpy"] = _copy(nbytes)
        counts, rounds = {}, {}
        for name, call in calls.items():
            counts[name], mean_s = self._agree(call, first_s.get(name, 0.0))
            rounds[name] = max(1, min(self.options.rounds, int(PATIENCE_S / (counts[name] * mean_s))))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(self.options.rounds):
            for name, call in calls.items():
                if turn < rounds[name]:
                    samples[name].append(_mean_s(call, counts[name]))
        slowest = self._largest([value for values in samples.values() for value in values])
        self.row_s = time.monotonic() - began
        unit = {name: 1e6 / (1 if name == "memcpy" else operation.messages) for name in samples}
        return {
            **asdict(case),
            "used_nbytes": nbytes,
            "calls": counts,
            "samples_us": {name: [slowest.pop(0) * unit[name] for _ in values] for name, values in samples.items()},
            "left_out": skipped,
            "wrong": wrong,
            "noise": asdict(self._noise(clock)),
        }

    def _ready(
        self, case: Case, operation: Operation
    ) -> tuple[dict[str, Call], dict[str, float], dict[str, str], list[str]]:
        """One checked call on each backend: those that work and their time, why others do not, which were wrong."""
        candidates = {name: operation.call(group, self.options.asynchronous) for name, group in self.groups.items()}
        calls: dict[str, Call] = {}
        first_s: dict[str, float] = {}
        skipped: dict[str, str] = {}
        wrong: list[str] = []
        if self.mpi is not None:
            why = left_out(operation)
            if why:
                skipped["mpi"] = why
            else:
                candidates["mpi"] = mpi_call(case.operation, operation, self.mpi, self.options.asynchronous)
        for name, call in candidates.items():
            crawl = (case.operation, case.dtype, name)
            if crawl in self.crawls and case.nbytes >= self.crawls[crawl]:
                skipped[name] = f"a call with {format_size(self.crawls[crawl])} took more than {PATIENCE_S:g} s"
                continue
            operation.fill()
            dist.barrier()
            started = time.perf_counter()
            error, difference = "", ""
            try:
                call()
                first_s[name] = time.perf_counter() - started
                difference = operation.wrong()
            except Exception as problem:
                error = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            first_s[name] = self._largest([first_s.get(name, 0.0)])[0]
            if first_s[name] > PATIENCE_S:
                self.crawls[crawl] = case.nbytes
            texts: list[Any] = [None] * self.size
            dist.all_gather_object(texts, (error, difference))
            errors, differences = ([text[i] for text in texts if text[i]] for i in (0, 1))
            if errors:
                skipped[name] = errors[0]
            elif differences:
                skipped[name] = f"wrong result: {differences[0]}"
                wrong.append(name)
            else:
                calls[name] = call
        return calls, first_s, skipped, wrong

    def _agree(self, call: Call, first_s: float) -> tuple[int, float]:
        """How many calls fill a round, the same number on every rank; and the mean time of one.

        Args:
            call: what is to be timed.
            first_s: how long the first took; one that took a second is trial enough.
        """
        if first_s > 1.0:
            return 1, first_s
        _mean_s(call, FEWEST_CALLS)  # connections, fresh pages
        count, round_s = FEWEST_CALLS, self.options.round_s
        while True:
            mean_s = self._largest([_mean_s(call, count)])[0]
            if mean_s * count >= round_s / 10 or count == MOST_CALLS:
                return max(FEWEST_CALLS, min(MOST_CALLS, int(round_s / mean_s))), mean_s
            count = min(MOST_CALLS, count * 8)

    def _probe(self) -> float:
        """The probe's spread on the rank where it is largest; no more ranks take part than there are cores."""
        samples = [1.0]
        if self.rank < usable_cores():
            samples = probe()
        else:
            time.sleep(0.02)  # a rank that waits actively would be the noise it is looking for
        return self._largest([probe_spread(samples)])[0]

    def _noise(self, clock: CpuClock) -> Noise:
        own = torch.tensor([clock.own_s()], dtype=torch.float64)
        dist.all_reduce(own)
        stolen, others = self._largest([*clock.shares(own.item())])
        before, self.spread = self.spread, self._probe()
        return Noise(max(before, self.spread), stolen, others)

    def _largest(self, figures: list[float]) -> list[float]:
        """Of each figure the largest on any rank."""
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
    """Copy that many bytes within this process: what no transport through memory can beat by much."""
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    pointers = target.data_ptr(), source.data_ptr()

    def copy(keep: tuple[torch.Tensor, torch.Tensor] = (source, target)) -> None:
        ctypes.memmove(*pointers, nbytes)

    return copy
