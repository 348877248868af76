"""Show running jobs and a look at one: as a table for people, and as plain values for programs.

A new column of ``phalanx top`` is a field of ``RankLook`` that ``WatchedRank.look`` fills in (``rank_look.py``), a cell
of :func:`_line`, and a line of the help text (``commands/top.py``). What the flight recorder knows is a field of
``Pace``, whose name :data:`_OF_PACE` has for ``--json``.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.diagnosis.render import printable_line
from phalanx.launch.running.jobs import RunningJob
from phalanx.topology.table import format_table
from phalanx.words import format_bytes, format_count, format_named

if TYPE_CHECKING:
    from phalanx.launch.running.rank_look import RankLook
    from phalanx.launch.running.watching import Look

_STATES = {"disk": "waits for disk", "debugged": "in a debugger"}  # the others are called so
_TEXT_COLUMNS = ("host", "state", "operation", "job", "since", "script", "directory")
_SHORTEST_OPERATION, _WHOLE_OPERATION = 24, 56
_LESS_TELLING = ("pid", "data/s", "cores", "memory")  # what a narrow terminal does without, in this order
_OF_PACE = (
    *("operation", "last", "operations", "operations_per_s", "bytes_per_s", "steps_per_s"),
    *("communication", "step", "label"),
)


# Jobs.


def described_job(job: RunningJob) -> dict[str, Any]:
    """A job as plain values."""
    values = msgspec.to_builtins(job)
    for own in ("start", "processes", "end_s"):
        del values[own]
    return {"id": job.id, **values, "since": _iso(job.since), "pids": [process.pid for process in job.processes]}


def format_jobs(jobs: Sequence[RunningJob], width: int | None = None) -> str:
    """A line for each job, as text that ends in a newline."""
    lines = []
    for job in jobs:
        begun = datetime.datetime.fromtimestamp(job.since)
        today = begun.date() == datetime.date.today()
        lines.append(
            {
                "job": job.id,
                "pid": str(job.pid),
                "ranks": str(job.ranks),
                "since": f"{begun:%H:%M:%S}" if today else f"{begun:%Y-%m-%d %H:%M}",
                "script": printable_line(" ".join((job.target, *job.arguments))),
                "directory": printable_line(job.directory),
            }
        )
    if width is not None:
        taken = sum(max(len(line[name]) for line in lines) + 2 for name in ("job", "pid", "ranks", "since"))
        room = max(width - taken - 2, 2 * _SHORTEST_OPERATION) // 2
        for line in lines:
            line["script"] = _start_of(line["script"], room)
            if len(line["directory"]) > room:  # which is told by its end
                line["directory"] = f"…{line['directory'][1 - room :]}"
    count = format_count(len(jobs), "job")
    return format_table(lines, title=f"phalanx list: {count} of yours on this host", text_columns=_TEXT_COLUMNS)


def _age(seconds: float) -> str:
    """``12 s``, ``4 min``, ``3.5 h``, ``2.1 days``."""
    for unit, size in (("days", 86400), ("h", 3600)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def _start_of(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


# A look at one job.


def look_values(look: Look) -> dict[str, Any]:
    """A look as plain values, which ``phalanx top --json`` prints."""
    elsewhere: dict[str, list[int]] = {}
    for rank, (host, _) in sorted(look.hidden.items()):
        if host != look.job.host:
            elsewhere.setdefault(host, []).append(rank)
    ranks = []
    for rank_look in look.ranks:
        values = msgspec.to_builtins(rank_look)
        pace = values.pop("pace") or {"label": ""}
        ranks.append(values | {name: pace.get(name) for name in _OF_PACE})
    return {
        "job": described_job(look.job),
        "at": _iso(look.at),
        "interval_s": look.interval_s,
        "ranks": ranks,
        "elsewhere": elsewhere,
        "notes": _notes(look),
    }


def format_look(look: Look, *, width: int | None = None, height: int | None = None, color: bool = False) -> str:
    """A look as text that ends in a newline, with ANSI colours or not, for a terminal of this size if one is given."""
    job = look.job
    several = bool(job.hosts or job.mpi)
    hosts = {process.host for process in job.processes}
    where = f" on {format_count(len(hosts), 'host')}" if hosts and several else ""
    about = f"{printable_line(job.target)}, {format_count(job.ranks, 'rank')}{where}"
    title = f"phalanx top: {about}, job {job.id}, for {_age(max(0.0, look.at - job.since))}"
    notes = [f"note: {note}" for note in _notes(look)]
    if not look.ranks:
        return "\n".join([title, *notes]) + "\n"
    shown = list(look.ranks)
    if height is not None:
        shown = sorted(shown, key=_telling)[: max(1, height - len(notes) - 4)]
        shown.sort(key=lambda rank: rank.rank)
    lines = [_line(rank, with_host=several) for rank in shown]
    if width is not None:
        lines = _fit(lines, width)
    if len(shown) < len(look.ranks):
        notes.insert(0, f"{format_count(len(look.ranks) - len(shown), 'more rank')}, which --json shows as well")
    table = format_table(lines, title=title, text_columns=_TEXT_COLUMNS, width=width, color=color)
    return table + "".join(f"{note}\n" for note in notes)


def _telling(rank: RankLook) -> tuple[bool, int, int]:
    """Put ranks first that are not at work, and then those that are behind the others."""
    return rank.state not in ("stopped", "debugged", "disk", "ended"), -(rank.lag or 0), rank.rank


def _fit(lines: list[dict[str, str]], width: int) -> list[dict[str, str]]:
    """The lines in a narrow terminal: without the columns that can be had elsewhere, and with shorter operations."""
    for name in (*_LESS_TELLING, ""):
        others = [column for column in lines[0] if column != "operation"]
        taken = sum(max(len(column), *(len(line[column]) for line in lines)) + 2 for column in others)
        if width - taken >= _WHOLE_OPERATION or not name:
            break
        lines = [{column: cell for column, cell in line.items() if column != name} for line in lines]
    room = max(_SHORTEST_OPERATION, width - taken)
    return [{**line, "operation": _start_of(line["operation"], room)} for line in lines]


def _line(rank: RankLook, *, with_host: bool) -> dict[str, str]:
    pace = rank.pace
    step = "" if pace is None or pace.step is None else str(pace.step)
    if pace is not None and pace.label:
        step = f'{step} "{printable_line(pace.label)}"'.strip()
    return {
        "rank": str(rank.rank),
        **({"host": printable_line(rank.host)} if with_host else {}),
        "pid": str(rank.pid),
        "state": _STATES.get(rank.state, rank.state),
        "step": step,
        "steps/s": "" if pace is None or pace.steps_per_s is None else f"{pace.steps_per_s:.3g}",
        "data/s": "" if pace is None else format_bytes(pace.bytes_per_s),
        "comm": "" if pace is None else f"{pace.communication:.0%}",
        "lag": "" if rank.lag is None else str(rank.lag),
        "memory": "" if rank.resident_bytes is None else format_bytes(rank.resident_bytes),
        "cores": "" if rank.cores is None else f"{rank.cores:.2f}",
        "operation": _operation(rank),
    }


def _operation(rank: RankLook) -> str:
    pace = rank.pace
    if pace is not None and pace.operation is not None:
        awaits = pace.operation["awaits"]
        awaited = f", for rank {awaits}" if awaits is not None else ""
        return f"{_named(pace.operation)}{awaited}, {pace.operation['for_s']:.1f} s"
    if rank.asked:
        return f"asked {printable_line(rank.asked)}"
    return f"after {_named(pace.last)}" if pace is not None and pace.last is not None else ""


def _named(operation: dict[str, Any]) -> str:
    return printable_line(f"{operation['name']} at {operation['site']}" if operation["site"] else operation["name"])


def _notes(look: Look) -> list[str]:
    """Return what cannot be known, and why."""
    job = look.job
    notes = []
    if look.launcher in ("T", "t"):
        notes.append(f"the launcher (pid {job.pid}) is stopped; the ranks go on, but nobody reads what they print")
    if not job.processes:
        notes.append("the ranks have not been started yet")
    reasons: dict[tuple[str, str], list[int]] = {}
    for number, reason in sorted(look.hidden.items()):
        reasons.setdefault(reason, []).append(number)
    for (host, why), ranks in reasons.items():
        where = "" if host == job.host else f" on {host}"
        notes.append(f"{format_named('rank', ranks)}{where}: not shown, since {why}")
    silent = [rank.rank for rank in look.ranks if rank.pace is None and rank.state != "ended"]
    if silent:
        who = format_named("rank", silent)
        of_cpp = "what C++ calls on gloo and nccl is recorded only if it lasts 2 s"
        why = of_cpp if job.is_python else "the job is not a Python program"
        notes.append(f"{who}: no operation recorded so far ({why}), so only the process is shown")
    return notes
