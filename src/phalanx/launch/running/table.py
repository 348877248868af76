"""Show running jobs and a look at one: as a table for people, and as plain values for programs.

A new column of ``phalanx top`` is a field of ``RankLook`` that ``WatchedRank.look`` fills in (``rank_look.py``), a cell
of :func:`_line`, a value of :func:`_rank_values` for ``--json``, and a line of the help text (``commands/top.py``).
What the flight recorder knows is a field of ``Pace`` (``diagnosis/pace.py``).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.diagnosis.snapshot import Record, world_rank
from phalanx.launch.running.jobs import RunningJob
from phalanx.system.files import beside
from phalanx.topology.table import format_table
from phalanx.words import format_bytes, format_count, format_named

if TYPE_CHECKING:
    from phalanx.launch.running.rank_look import RankLook
    from phalanx.launch.running.watching import Look

__all__ = ["described_job", "format_age", "format_jobs", "format_look", "look_values"]

_STATES = {"disk": "waits for disk", "debugged": "in a debugger"}  # the others are called so
_TEXT_COLUMNS = ("host", "state", "operation", "job", "since", "script", "directory")
_SHORTEST_OPERATION, _WHOLE_OPERATION = 24, 56
_LESS_TELLING = ("pid", "data/s", "cores", "memory")  # what a narrow terminal does without, in this order


# Jobs.


def described_job(job: RunningJob) -> dict[str, Any]:
    """A job as plain values."""
    values = msgspec.structs.asdict(job)
    for own in ("start", "descriptor", "processes", "end_s", "run_id"):
        del values[own]
    return {
        "id": job.id,
        "run_id": job.run_id,
        **values,
        "since": _iso(job.since),
        "pids": [process.pid for process in job.processes],
    }


def format_jobs(jobs: Sequence[RunningJob], width: int | None = None) -> str:
    """A line for each job, as text that ends in a newline."""
    lines = [
        {
            "job": job.id,
            "pid": str(job.pid),
            "ranks": str(job.ranks),
            "since": _since(job.since),
            "script": _printable(" ".join((job.target, *job.arguments))),
            "directory": _printable(job.directory),
        }
        for job in jobs
    ]
    if width is not None:
        # The directory is told by its end, the script by its beginning.
        taken = sum(max(len(line[name]) for line in lines) + 2 for name in ("job", "pid", "ranks", "since")) + 8
        room = max(width - taken, 2 * _SHORTEST_OPERATION)
        for line in lines:
            line["directory"] = _end_of(line["directory"], max(room - len(line["script"]), room // 2))
            line["script"] = _start_of(line["script"], room - len(line["directory"]))
    count = format_count(len(jobs), "job")
    return format_table(lines, title=f"phalanx list: {count} of yours on this host", text_columns=_TEXT_COLUMNS)


def format_age(seconds: float) -> str:
    """``12 s``, ``4 min``, ``3.5 h``, ``2.1 days``."""
    for unit, size in (("days", 86400), ("h", 3600)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"


def _since(since: float) -> str:
    begun = datetime.datetime.fromtimestamp(since)
    today = begun.date() == datetime.datetime.now().date()
    return f"{begun:%H:%M:%S}" if today else f"{begun:%Y-%m-%d %H:%M}"


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def _printable(text: str) -> str:
    """A text of somebody's on one line, whatever bytes a file name has."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _start_of(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: max(length - 1, 0)]}…"


def _end_of(text: str, length: int) -> str:
    return text if len(text) <= length else f"…{text[len(text) - max(length - 1, 0) :]}"


# A look at one job.


def look_values(look: Look) -> dict[str, Any]:
    """A look as plain values, which ``phalanx top --json`` prints."""
    elsewhere: dict[str, list[int]] = {}
    for rank, (host, _) in sorted(look.hidden.items()):
        if host != look.job.host:
            elsewhere.setdefault(host, []).append(rank)
    return {
        "job": described_job(look.job),
        "at": _iso(look.at),
        "interval_s": look.interval_s,
        "ranks": [_rank_values(rank, look.job) for rank in look.ranks],
        "elsewhere": elsewhere,
        "notes": _notes(look),
    }


def _rank_values(rank: RankLook, job: RunningJob) -> dict[str, Any]:
    pace = rank.pace
    own = ("rank", "pid", "host", "state", "asked", "lag", "resident_bytes", "cores")
    rates = ("operations_per_s", "bytes_per_s", "steps_per_s", "communication")
    return {
        **{name: getattr(rank, name) for name in own},
        **{name: getattr(pace, name, None) for name in rates},
        "operation": _operation_values(pace.operation, job) if pace is not None else None,
        "last": _operation_values(pace.last, job) if pace is not None else None,
        "operations": pace.begun if pace is not None else None,
        "step": pace.step if pace is not None and pace.step >= 0 else None,
        "label": pace.label if pace is not None else "",
    }


def _operation_values(record: Record | None, job: RunningJob) -> dict[str, Any] | None:
    if record is None:
        return None
    values = {name: getattr(record, name) for name in ("kind", "in_group", "nbytes", "dtype", "op", "peer", "failed")}
    return {
        "name": record.name(),
        **values,
        "group": record.group.name,
        "site": beside(record.site, job.directory),
        "under_way": record.under_way,
        "awaits": world_rank(record.group, record.awaits) if record.under_way and record.awaits >= 0 else None,
        "for_s": _for_s(record),
    }


def _for_s(record: Record) -> float:
    """For how long an operation has been under way, or how long it took."""
    return max(0, (record.left_ns or time.monotonic_ns()) - record.entered_ns) / 1e9


def format_look(look: Look, *, width: int | None = None, height: int | None = None, color: bool = False) -> str:
    """A look as text that ends in a newline.

    Args:
        look: the look.
        width, height: of the terminal; None for as much as is needed.
        color: whether to write ANSI colours.
    """
    job = look.job
    hosts = list(dict.fromkeys(process.host for process in job.processes))
    where = f" on {format_count(len(hosts), 'host')}" if hosts and (job.hosts or job.mpi) else ""
    age = format_age(max(0.0, look.at - job.since))
    title = f"phalanx top: {_printable(job.target)}, {format_count(job.ranks, 'rank')}{where}, job {job.id}, for {age}"
    notes = [f"note: {note}" for note in _notes(look)]
    if not look.ranks:
        return "\n".join([title, *notes]) + "\n"
    shown = list(look.ranks)
    if height is not None:
        shown = _most_telling(shown, max(1, height - len(notes) - 4))
    several = bool(job.hosts or job.mpi)
    lines = [_line(rank, job, with_host=several) for rank in shown]
    if width is not None:
        lines = _fit(lines, width)
    if len(shown) < len(look.ranks):
        notes.insert(0, f"{format_count(len(look.ranks) - len(shown), 'more rank')}, which --json shows as well")
    table = format_table(lines, title=title, text_columns=_TEXT_COLUMNS, width=width, color=color)
    return table + "".join(f"{note}\n" for note in notes)


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


def _line(rank: RankLook, job: RunningJob, *, with_host: bool) -> dict[str, str]:
    pace = rank.pace
    step = "" if pace is None or pace.step < 0 else str(pace.step)
    if pace is not None and pace.label:
        step = f'{step} "{_printable(pace.label)}"'.strip()
    return {
        "rank": str(rank.rank),
        **({"host": _printable(rank.host)} if with_host else {}),
        "pid": str(rank.pid),
        "state": _STATES.get(rank.state, rank.state),
        "step": step,
        "steps/s": "" if pace is None or pace.steps_per_s is None else f"{pace.steps_per_s:.3g}",
        "data/s": "" if pace is None else format_bytes(pace.bytes_per_s),
        "comm": "" if pace is None else f"{pace.communication:.0%}",
        "lag": "" if rank.lag is None else str(rank.lag),
        "memory": "" if rank.resident_bytes is None else format_bytes(rank.resident_bytes),
        "cores": "" if rank.cores is None else f"{rank.cores:.2f}",
        "operation": _operation(rank, job),
    }


def _operation(rank: RankLook, job: RunningJob) -> str:
    pace = rank.pace
    if pace is not None and pace.operation is not None:
        record = pace.operation
        awaited = f", for rank {world_rank(record.group, record.awaits)}" if record.awaits >= 0 else ""
        return f"{_named(record, job)}{awaited}, {_for_s(record):.1f} s"
    if rank.asked:
        return f"asked {_printable(rank.asked)}"
    if pace is not None and pace.last is not None:
        return f"after {_named(pace.last, job)}"
    return ""


def _named(record: Record, job: RunningJob) -> str:
    site = beside(record.site, job.directory)
    return f"{record.name()} at {_printable(site)}" if site else record.name()


def _most_telling(ranks: list[RankLook], count: int) -> list[RankLook]:
    """As many ranks as fit: those first that are not at work, and that are behind the others."""

    def telling(rank: RankLook) -> tuple[bool, int, int]:
        return rank.state not in ("stopped", "debugged", "disk", "ended"), -(rank.lag or 0), rank.rank

    return sorted(sorted(ranks, key=telling)[:count], key=lambda rank: rank.rank)


def _notes(look: Look) -> list[str]:
    """What cannot be known, and why."""
    job = look.job
    notes = []
    if look.launcher in ("T", "t"):
        notes.append(f"the launcher (pid {job.pid}) is stopped; the ranks go on, but nobody reads what they print")
    if not job.processes:
        notes.append("the ranks have not been started yet")
    reasons: dict[tuple[str, str], list[int]] = {}
    for rank, reason in sorted(look.hidden.items()):
        reasons.setdefault(reason, []).append(rank)
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
