"""``phalanx bench --tune``: measure the switch points of the shared-memory backend on this machine.

Every candidate is a group of its own in the same processes, and they take turns as backends do elsewhere. What
decides is one figure for each candidate: how much longer than the best one it takes, as the geometric mean over
everything measured. A built-in value stays unless another one is better by more than noise would make it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.backends.tuning import Tuning, save_tuning
from phalanx.bench.noise import reasons
from phalanx.bench.plan import ALWAYS, Plan, format_size, tuning_label
from phalanx.bench.report import noise_of
from phalanx.bench.session import measure

__all__ = ["Finding", "choose_chunk", "choose_small", "format_finding", "tune"]

CHUNKS = tuple(1 << exponent for exponent in range(16, 21))
CHUNK_SIZES = (512 << 10, 2 << 20, 16 << 20)
CHUNK_OPERATIONS = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")
SMALL_SIZES = tuple(1 << exponent for exponent in range(9, 17))
MARGIN = 0.03
MOST_NOISY = 0.5


@dataclass(frozen=True)
class Finding:
    """What a tuning run found.

    Attributes:
        tuning: the values to use from now on.
        chunk_slowdown: for each chunk size, how many times as long as the best candidate of each row, on average.
        small_slowdown: the same for each value of ``small_bytes``.
        noisy: share of the rows that were measured on a machine too noisy to believe.
        path: the file that was written; None if it was not, because too much was noisy or the run was interrupted.
        exit_code: of the measurement.
    """

    tuning: Tuning
    chunk_slowdown: dict[int, float]
    small_slowdown: dict[int, float]
    noisy: float
    path: Path | None
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        """One object for ``--json``."""
        return {
            "tuning": asdict(self.tuning),
            "built_in": asdict(Tuning()),
            "chunk_slowdown": self.chunk_slowdown,
            "small_slowdown": self.small_slowdown,
            "noisy": self.noisy,
            "path": str(self.path) if self.path else None,
        }


def tune(plan: Plan, command: Sequence[str], quiet: bool) -> Finding:
    """Measure the candidates and write the best into the file that every later group reads.

    Args:
        plan: its ranks, rounds and patience hold; what is measured is chosen here.
        command: the arguments of the command line.
        quiet: show no progress.

    Raises:
        LaunchError: this machine has no room for that many ranks.
    """
    built_in = Tuning()
    chunks = replace(
        plan,
        operations=CHUNK_OPERATIONS,
        sizes=CHUNK_SIZES,
        tunings=tuple((nbytes, built_in.small_bytes) for nbytes in CHUNKS),
    )
    results = measure(chunks, (), command, quiet)
    rows, exit_code = _rows(results), int(results["exit_code"])
    chunk_bytes, chunk_slowdown = choose_chunk(rows)
    small_bytes = built_in.small_bytes
    small_slowdown: dict[int, float] = {}
    if not exit_code:
        smalls = replace(
            plan, operations=("all_reduce",), sizes=SMALL_SIZES, tunings=((chunk_bytes, 0), (chunk_bytes, ALWAYS))
        )
        results = measure(smalls, (), command, quiet)
        small_rows, exit_code = _rows(results), int(results["exit_code"])
        small_bytes, small_slowdown = choose_small(small_rows, chunk_bytes)
        rows += small_rows
    noisy = statistics.fmean(bool(reasons(noise_of(row))) for _, row in rows) if rows else 1.0
    tuning = Tuning(chunk_bytes, small_bytes)
    path = save_tuning(tuning) if not exit_code and noisy <= MOST_NOISY else None
    return Finding(tuning, chunk_slowdown, small_slowdown, noisy, path, exit_code)


def choose_chunk(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[int, dict[int, float]]:
    """The chunk size that loses least over all rows, and what each loses.

    Args:
        rows: number of ranks and measured row, whose samples are named by :func:`tuning_label`.
    """
    costs = []
    for _, row in rows:
        medians = _medians(row)
        costs.append({chunk: medians[tuning_label((chunk, Tuning().small_bytes))] for chunk in CHUNKS})
    return _best(CHUNKS, Tuning().chunk_bytes, costs)


def choose_small(rows: Sequence[tuple[int, Mapping[str, Any]]], chunk_bytes: int) -> tuple[int, dict[int, float]]:
    """The largest sum of inputs at which one synchronisation pays, and what each candidate loses.

    Args:
        rows: number of ranks and measured row.
        chunk_bytes: of the two groups that were measured, one of which always synchronised once, the other twice.
    """
    candidates = sorted({size * nbytes for size, _ in rows for nbytes in SMALL_SIZES} | {0, Tuning().small_bytes})
    costs = []
    for size, row in rows:
        medians = _medians(row)
        twice, once = medians[tuning_label((chunk_bytes, 0))], medians[tuning_label((chunk_bytes, ALWAYS))]
        total = size * row["used_nbytes"]
        costs.append({candidate: once if total <= candidate else twice for candidate in candidates})
    return _best(candidates, Tuning().small_bytes, costs)


def format_finding(finding: Finding) -> str:
    """What a person reads."""
    built_in = Tuning()

    def table(title: str, slowdown: Mapping[int, float], chosen: int, default: int) -> list[str]:
        lines = [title]
        for value, times in slowdown.items():
            marks = [mark for mark, held in (("chosen", value == chosen), ("built in", value == default)) if held]
            lines.append(f"  {format_size(value):>6}  {times:5.2f}×  {', '.join(marks)}".rstrip())
        return lines

    lines = [
        *table(
            "chunk_bytes: time against the best candidate, mean over all rows",
            finding.chunk_slowdown,
            finding.tuning.chunk_bytes,
            built_in.chunk_bytes,
        ),
        *table(
            "small_bytes: the same",
            finding.small_slowdown,
            finding.tuning.small_bytes,
            built_in.small_bytes,
        ),
    ]
    if finding.path:
        lines.append(f"Written to {finding.path}; groups made from now on use it. Delete the file to go back.")
    elif finding.exit_code:
        lines.append("Nothing was written: the measurement did not come to its end.")
    else:
        lines.append(
            f"Nothing was written: the machine was too noisy in {finding.noisy:.0%} of the rows. Repeat it when "
            f"nothing else runs here, or wait for quiet with --patience 120."
        )
    return "\n".join(lines) + "\n"


def _rows(results: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    return [(job["size"], row) for job in results["jobs"] for row in job["rows"]]


def _medians(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: statistics.median(samples) for name, samples in row["samples_us"].items()}


def _best(
    candidates: Sequence[int], default: int, costs: Sequence[Mapping[int, float]]
) -> tuple[int, dict[int, float]]:
    """The candidate of least geometric-mean cost, the default if that is about as good; and every one's cost."""
    if not costs:
        return default, {}

    def mean_slowdown(candidate: int) -> float:
        return math.exp(statistics.fmean(math.log(row[candidate] / min(row.values())) for row in costs))

    slowdown = {candidate: mean_slowdown(candidate) for candidate in candidates}
    best = min(slowdown, key=lambda candidate: slowdown[candidate])
    # What the two do alike says nothing about which is better, and would water the difference down.
    gains = [math.log(row[default] / row[best]) for row in costs if row[default] != row[best]]
    return (best if gains and statistics.fmean(gains) > math.log1p(MARGIN) else default), slowdown
