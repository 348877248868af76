"""``phalanx bench --tune``: measure the switch points of the shared-memory backend on this machine.

Every candidate is a group of its own in the same processes, and the groups take turns. The slowdown of a candidate is
its time as a multiple of the best candidate's, as the geometric mean over all rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

from phalanx.bench.cases import UNBOUNDED, BenchOptions, tuning_label
from phalanx.bench.measurement import measure
from phalanx.bench.report import noise_of
from phalanx.transports.shm.tuning import Tuning, save_tuning
from phalanx.words import format_size

CHUNKS = tuple(1 << exponent for exponent in range(16, 21))
CHUNK_SIZES = (512 << 10, 2 << 20, 16 << 20)
CHUNK_OPERATIONS = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")
SMALL_SIZES = tuple(1 << exponent for exponent in range(9, 17))
STREAM_SIZES = tuple(1 << exponent for exponent in range(21, 27))
STREAM_OPERATIONS = ("broadcast", "all_gather_single")
MARGIN = 0.03
MOST_NOISY = 0.5


class _EndedEarly(Exception):
    """The measurement ended early; the argument is its exit code."""


def tune(options: BenchOptions, command: Sequence[str], quiet: bool) -> dict[str, Any]:
    """Measure the candidates and write the best values into the file that every later group reads.

    Args:
        options: the ranks, rounds and patience; what is measured is chosen here.
        command: the arguments of the command line.
        quiet: show no progress.

    Returns:
        The object of ``--json``: ``tuning``, and the values that are ``built_in``; ``slowdown``, for each of them and
        each candidate; ``noisy``, the share of rows on a noisy machine; ``path`` of the file, None if too many were, or
        the measurement ended early; and its ``exit_code``.
    """
    noisy: list[bool] = []

    def measured(
        operations: Sequence[str], sizes: Sequence[int], field: str, candidates: Sequence[int]
    ) -> list[tuple[int, int, list[float]]]:
        """Return, for each row, the ranks, the size, and the time with each candidate as the value of this field."""
        tunings = [astuple(replace(found, **{field: value})) for value in candidates]
        each = replace(options, operations=operations, sizes=sizes, tunings=tunings)
        results = measure(each, (), command, quiet)
        if results["exit_code"]:
            raise _EndedEarly(results["exit_code"])
        rows = [(job["size"], row) for job in results["jobs"] for row in job["rows"]]
        noisy.extend(noise_of(row).excessive for _, row in rows)
        names = [tuning_label(values) for values in tunings]
        return [
            (ranks, row["used_nbytes"], [statistics.median(row["samples_us"][name]) for name in names])
            for ranks, row in rows
        ]

    found, exit_code = Tuning(), 0
    slowdown: dict[str, dict[int, float]] = {}
    both = UNBOUNDED, 0
    try:
        rows = measured(CHUNK_OPERATIONS, CHUNK_SIZES, "chunk_bytes", CHUNKS)
        costs = [dict(zip(CHUNKS, times, strict=True)) for _, _, times in rows]
        best, slowdown["chunk_bytes"] = choose(CHUNKS, found.chunk_bytes, costs)
        found = replace(found, chunk_bytes=best)

        rows = measured(("all_reduce",), SMALL_SIZES, "small_bytes", both)
        points = [(ranks * nbytes, below, above) for ranks, nbytes, (below, above) in rows]
        best, slowdown["small_bytes"] = choose_switch(points, found.small_bytes)
        found = replace(found, small_bytes=best)

        rows = measured(STREAM_OPERATIONS, STREAM_SIZES, "stream_bytes", both)
        points = [(nbytes - 1, below, above) for _, nbytes, (below, above) in rows]
        best, slowdowns = choose_switch(points, found.stream_bytes - 1)
        slowdown["stream_bytes"] = {value + 1: times for value, times in slowdowns.items()}
        found = replace(found, stream_bytes=best + 1)
    except _EndedEarly as ended:
        found, exit_code = Tuning(), ended.args[0]
    share = statistics.fmean(noisy) if noisy else 1.0
    path = str(save_tuning(found)) if not exit_code and share <= MOST_NOISY else None
    values = {"tuning": asdict(found), "built_in": asdict(Tuning())}
    return {**values, "slowdown": slowdown, "noisy": share, "path": path, "exit_code": exit_code}


def choose(
    candidates: Sequence[int], default: int, costs: Sequence[Mapping[int, float]]
) -> tuple[int, dict[int, float]]:
    """Return the candidate with the least slowdown, or the default if it is about as good; and each slowdown.

    ``costs`` has the time of each candidate for each row.
    """

    def mean_slowdown(candidate: int) -> float:
        return math.exp(statistics.fmean(math.log(row[candidate] / min(row.values())) for row in costs))

    slowdown = {candidate: mean_slowdown(candidate) for candidate in candidates}
    best = min(candidates, key=slowdown.__getitem__)
    # Rows in which both candidates took the same code path would only hide the difference.
    gains = [math.log(row[default] / row[best]) for row in costs if row[default] != row[best]]
    return (best if gains and statistics.fmean(gains) > math.log1p(MARGIN) else default), slowdown


def choose_switch(points: Sequence[tuple[int, float, float]], default: int) -> tuple[int, dict[int, float]]:
    """Return the largest size for which the algorithm for small sizes should be used; and each slowdown.

    ``points`` has each size measured, with the times of the algorithm for small sizes and of the one for large sizes.
    """
    candidates = sorted({nbytes for nbytes, _, _ in points} | {0, default})
    costs = [{each: below if nbytes <= each else above for each in candidates} for nbytes, below, above in points]
    return choose(candidates, default, costs)


def format_tuning(found: dict[str, Any]) -> str:
    """Format what :func:`tune` returned for a person."""
    lines = []
    for name, slowdown in found["slowdown"].items():
        lines.append(f"{name}: time as a multiple of the best candidate's, mean over all rows")
        for value, times in slowdown.items():
            chosen, built_in = found["tuning"][name] == value, found["built_in"][name] == value
            marks = ", ".join(["chosen"] * chosen + ["built in"] * built_in)
            lines.append(f"  {format_size(value):>6}  {times:5.2f}×  {marks}".rstrip())
    if found["path"]:
        lines.append(f"Written to {found['path']}; groups made from now on use it. Delete the file to go back.")
    elif found["exit_code"]:
        lines.append("Nothing was written: the measurement ended early.")
    else:
        lines.append(
            f"Nothing was written: the machine was too noisy in {found['noisy']:.0%} of the rows. Repeat it "
            f"when nothing else runs here, or wait for quiet with --patience 120."
        )
    return "\n".join(lines) + "\n"
