"""``phalanx bench --tune``: measure the switch points of the shared-memory backend on this machine.

Every candidate is a group of its own in the same processes, and the groups take turns as backends otherwise do. The
choice is made by one figure for each candidate: its time as a multiple of the best candidate's, as the geometric mean
over all rows. A built-in value is kept unless another one is better by more than noise could make it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.bench.cases import UNBOUNDED, BenchOptions, tuning_label
from phalanx.bench.measurement import measure
from phalanx.bench.report import noise_of
from phalanx.transports.shm.tuning import Tuning, save_tuning
from phalanx.words import format_size

__all__ = ["Finding", "choose", "choose_switch", "format_finding", "tune"]

CHUNKS = tuple(1 << exponent for exponent in range(16, 21))
CHUNK_SIZES = (512 << 10, 2 << 20, 16 << 20)
CHUNK_OPERATIONS = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")
SMALL_SIZES = tuple(1 << exponent for exponent in range(9, 17))
STREAM_SIZES = tuple(1 << exponent for exponent in range(21, 27))
STREAM_OPERATIONS = ("broadcast", "all_gather_single")
MARGIN = 0.03
MOST_NOISY = 0.5

Row = Mapping[str, Any]
Slowdown = dict[int, float]


@dataclass(frozen=True)
class Finding:
    """The findings of a tuning run.

    Attributes:
        tuning: the values to use from now on.
        slowdown: for each field of the tuning and each candidate, its time as a multiple of the best one's, on
            average.
        noisy: the share of the rows that were measured while the machine was too noisy.
        path: the file that was written; None if none was, because too many rows were noisy or the run was interrupted.
        exit_code: the exit code of the measurement.
    """

    tuning: Tuning
    slowdown: dict[str, Slowdown]
    noisy: float
    path: Path | None
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        """One object for ``--json``."""
        return {
            "tuning": asdict(self.tuning),
            "built_in": asdict(Tuning()),
            "slowdown": self.slowdown,
            "noisy": self.noisy,
            "path": str(self.path) if self.path else None,
        }


class _Stopped(Exception):
    """The measurement ended early."""


def tune(options: BenchOptions, command: Sequence[str], quiet: bool) -> Finding:
    """Measure the candidates and write the best values into the file that every later group reads.

    Args:
        options: the ranks, rounds and patience; what is measured is chosen here.
        command: the arguments of the command line.
        quiet: show no progress.

    Raises:
        LaunchError: this machine cannot hold that many ranks.
    """
    found = Tuning()
    slowdown: dict[str, Slowdown] = {}
    rows: list[tuple[int, Row]] = []
    exit_code = 0

    def rows_of(operations: Sequence[str], sizes: Sequence[int], candidates: Sequence[Tuning]) -> Sequence[Any]:
        nonlocal exit_code
        values = tuple(_values(candidate) for candidate in candidates)
        each = replace(options, operations=tuple(operations), sizes=tuple(sizes), tunings=values)
        results = measure(each, (), command, quiet)
        exit_code = int(results["exit_code"])
        if exit_code:
            raise _Stopped
        measured = [(job["size"], row) for job in results["jobs"] for row in job["rows"]]
        rows.extend(measured)
        return measured

    try:
        candidates = [replace(found, chunk_bytes=nbytes) for nbytes in CHUNKS]
        costs = [
            {each.chunk_bytes: medians[tuning_label(_values(each))] for each in candidates}
            for medians in (_medians(row) for _, row in rows_of(CHUNK_OPERATIONS, CHUNK_SIZES, candidates))
        ]
        chunk_bytes, slowdown["chunk_bytes"] = choose(CHUNKS, found.chunk_bytes, costs)
        found = replace(found, chunk_bytes=chunk_bytes)

        below, above = replace(found, small_bytes=UNBOUNDED), replace(found, small_bytes=0)
        points = _points(
            rows_of(("all_reduce",), SMALL_SIZES, (below, above)), below, above, lambda size, nbytes: size * nbytes
        )
        small_bytes, slowdown["small_bytes"] = choose_switch(points, found.small_bytes)
        found = replace(found, small_bytes=small_bytes)

        below, above = replace(found, stream_bytes=UNBOUNDED), replace(found, stream_bytes=0)
        points = _points(
            rows_of(STREAM_OPERATIONS, STREAM_SIZES, (below, above)), below, above, lambda _, nbytes: nbytes - 1
        )
        last, slowdowns = choose_switch(points, found.stream_bytes - 1)
        slowdown["stream_bytes"] = {value + 1: times for value, times in slowdowns.items()}
        found = replace(found, stream_bytes=last + 1)
    except _Stopped:
        found = Tuning()
    noisy = statistics.fmean(noise_of(dict(row)).excessive for _, row in rows) if rows else 1.0
    path = save_tuning(found) if not exit_code and noisy <= MOST_NOISY else None
    return Finding(found, slowdown, noisy, path, exit_code)


def choose(
    candidates: Sequence[int], default: int, costs: Sequence[Mapping[int, float]]
) -> tuple[int, dict[int, float]]:
    """The candidate with the least mean slowdown, or the default if that is about as good; and each one's slowdown.

    Args:
        candidates: the values to choose from; the default is one of them.
        default: the built-in value.
        costs: for each row, the time of each candidate.
    """
    if not costs:
        return default, {}

    def mean_slowdown(candidate: int) -> float:
        return math.exp(statistics.fmean(math.log(row[candidate] / min(row.values())) for row in costs))

    slowdown = {candidate: mean_slowdown(candidate) for candidate in candidates}
    best = min(slowdown, key=lambda candidate: slowdown[candidate])
    # Rows in which both candidates took the same code path say nothing about the choice; averaging them in would only
    # hide the difference.
    gains = [math.log(row[default] / row[best]) for row in costs if row[default] != row[best]]
    return (best if gains and statistics.fmean(gains) > math.log1p(MARGIN) else default), slowdown


def choose_switch(points: Sequence[tuple[int, float, float]], default: int) -> tuple[int, dict[int, float]]:
    """The largest size for which the algorithm for small sizes is taken, chosen so that the least time is lost.

    Args:
        points: for each size measured, the times of the algorithm for small sizes and of the one for large sizes.
        default: the built-in value.

    Returns:
        The size, and the slowdown of each candidate, as from :func:`choose`.
    """
    candidates = sorted({nbytes for nbytes, _, _ in points} | {0, default})
    costs = [{each: below if nbytes <= each else above for each in candidates} for nbytes, below, above in points]
    return choose(candidates, default, costs)


def format_finding(finding: Finding) -> str:
    """The finding as text for a person."""
    lines = []
    for name, slowdown in finding.slowdown.items():
        lines.append(f"{name}: time as a multiple of the best candidate's, mean over all rows")
        chosen, built_in = getattr(finding.tuning, name), getattr(Tuning(), name)
        for value, times in slowdown.items():
            marks = [mark for mark, held in (("chosen", value == chosen), ("built in", value == built_in)) if held]
            lines.append(f"  {format_size(value):>6}  {times:5.2f}×  {', '.join(marks)}".rstrip())
    if finding.path:
        lines.append(f"Written to {finding.path}; groups made from now on use it. Delete the file to go back.")
    elif finding.exit_code:
        lines.append("Nothing was written: the measurement ended early.")
    else:
        lines.append(
            f"Nothing was written: the machine was too noisy in {finding.noisy:.0%} of the rows. Repeat it "
            f"when nothing else runs here, or wait for quiet with --patience 120."
        )
    return "\n".join(lines) + "\n"


def _values(tuning: Tuning) -> tuple[int, int, int]:
    return tuning.chunk_bytes, tuning.small_bytes, tuning.stream_bytes


def _medians(row: Row) -> dict[str, float]:
    return {name: statistics.median(samples) for name, samples in row["samples_us"].items()}


def _points(
    rows: Sequence[tuple[int, Row]], below: Tuning, above: Tuning, measure_of: Callable[[int, int], int]
) -> list[tuple[int, float, float]]:
    points = []
    for size, row in rows:
        medians = _medians(row)
        times = medians[tuning_label(_values(below))], medians[tuning_label(_values(above))]
        points.append((measure_of(size, row["used_nbytes"]), *times))
    return points
