"""The report on a job that hangs: a file of JSON, and what people read of it.

A folder has a report for each time that the job hung, ``hang-1.json``, ``hang-2.json`` and so on, each with a folder
beside it (``hang-1-torch``) in which every rank's operations are written as torch's flight recorder does. A job leaves
another file of this format when it ends, ``operations.json``, in which nobody waits (``timeline.py``).
"""

from __future__ import annotations

import json
import pickle
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from phalanx.diagnosis.diagnose import HangDiagnosis
from phalanx.diagnosis.snapshot import RankSnapshot, Record, Recording, lengths_in
from phalanx.system.files import whole_file
from phalanx.system.foreign_values import read_json

_OPERATIONS = "operations.json"
_NAME = re.compile(r"hang-(\d+)\.json")
# How many of each rank's last operations the report has: so many of all ranks together, but neither fewer nor more than
# these of each. The folder beside it has all.
_KEPT, _FEWEST_KEPT, _MOST_KEPT = 16384, 32, 256
_VERSION = 2


class HangReport(msgspec.Struct, frozen=True):
    """Snapshots, stacks and diagnosis of a job that does not go on."""

    job: str  # the command, for people
    host: str  # where the ranks run; several names if they run on several hosts
    when: str  # the time of day, with its zone
    now_ns: int  # the same moment on the host's monotonic clock, which the operations' times are of
    diagnosis: HangDiagnosis
    ranks: Sequence[RankSnapshot]
    # Of main threads, by rank, as lines, the innermost call last; without those that did not say.
    stacks: dict[int, list[str]] = {}

    def to_json(self, *, whole: bool = False) -> dict[str, Any]:
        """Plain values; :func:`read_report` gives them back, with all operations if it is the ``whole`` report."""
        kept = None if whole else min(_MOST_KEPT, max(_FEWEST_KEPT, _KEPT // len(self.ranks)))
        return {
            "version": _VERSION,
            **msgspec.to_builtins(self.diagnosis),
            "waited_s": round((self.now_ns - self.diagnosis.since_ns) / 1e9, 3),
            **{name: getattr(self, name) for name in ("job", "host", "when", "now_ns")},
            "ranks": [{**seen.to_json(kept), "stack": self.stacks.get(seen.rank, [])} for seen in self.ranks],
        }

    def headline(self) -> str:
        """The first sentence, without its full stop."""
        sentence = self.diagnosis.sentence
        return f"{sentence[:1].upper()}{sentence[1:]}{self.diagnosis.advice}"


def write_report(folder: Path, report: HangReport, over: Path | None = None) -> Path:
    """Write a report behind those that the folder has, or over an earlier one; its path.

    Its files appear whole. If they cannot be written (OSError), nothing of them stays, and the earlier report does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".hang-", dir=folder) as name:
        parts = Path(name)
        write_torch_traces(parts, {seen.rank: seen.recording for seen in report.ranks if seen.recording is not None})
        (parts / "report").write_text(json.dumps(report.to_json()))
        path = over if over is not None else _next_in(folder)
        (parts / "report").replace(path)
        for part in parts.iterdir():
            part.replace(path.with_name(f"{path.stem}-torch") / part.name)
    return path


def _next_in(folder: Path) -> Path:
    """The next report's path. Several jobs may write into a folder: who makes the folder beside it has the number."""
    number = 1 + max((number for number, _ in _reports(folder)), default=0)
    while True:
        try:
            (folder / f"hang-{number}-torch").mkdir()
            return folder / f"hang-{number}.json"
        except FileExistsError:
            number += 1


def write_operations(folder: Path, report: HangReport) -> None:
    """Write what a job leaves of its ranks' operations when it ends, in the place of what an earlier one has left."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / _OPERATIONS) as file:
        file.write(json.dumps(report.to_json(whole=True)).encode())


def read_operations(path: Path) -> HangReport | None:
    """Read what a job has left in a folder, or a newer report there, or a file; None if there is nothing."""
    there = [path]
    if path.is_dir():
        there = [each for each in (path / _OPERATIONS, latest_report(path)) if each is not None and each.exists()]
    return read_report(max(there, key=lambda each: each.stat().st_mtime)) if there else None


def latest_report(folder: Path) -> Path | None:
    """The newest report of a folder; None if it has none."""
    return max(_reports(folder), default=(0, None))[1]


def _reports(folder: Path) -> list[tuple[int, Path]]:
    return [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]


def read_report(path: Path) -> HangReport:
    """A report from its file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a report, or one of a newer Phalanx.
    """
    values = read_json(path.read_text())
    if not isinstance(values, dict) or values.get("version") != _VERSION:
        raise ValueError("it is not a report of this version of Phalanx")
    try:
        diagnosis = msgspec.convert(values, HangDiagnosis)
        ranks = [RankSnapshot.from_json(rank) for rank in values["ranks"]]
        stacks = {rank["rank"]: rank["stack"] for rank in values["ranks"] if rank["stack"]}
        return msgspec.convert({**values, "diagnosis": diagnosis, "ranks": ranks, "stacks": stacks}, HangReport)
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a whole report: {error}") from None


def write_torch_traces(folder: Path, recordings: Mapping[int, Recording]) -> None:
    """Write a file for each rank into a folder, for ``torchfrtrace --prefix rank_ FOLDER``.

    The format is that of torch's ``_dump_nccl_trace`` in version 2.10, as far as torch's analyser
    (``torch.distributed.flight_recorder``, torch 2.13 to 2.15) reads it. The analyser knows backends by a list of its
    own, so our operations are called ``gloo:...``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank, recording in recordings.items():
        records = [record for record in recording.records if record.kind != "init"]  # which torch does not record
        groups = {record.group.name: str(list(record.group.ranks)) for record in records}
        trace = {
            "version": "2.10",
            "pg_config": {
                name: {"name": name, "desc": _description(name), "ranks": ranks} for name, ranks in groups.items()
            },
            "entries": [_entry(record) for record in records],
        }
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(trace))


def _description(name: str) -> str:
    return "default_pg" if name == "0" else "undefined"


def _entry(record: Record) -> dict[str, Any]:
    inputs, outputs = _sizes(record)
    dtypes = [record.dtype] if record.dtype else []
    file, _, line = record.site.rpartition(":")
    done = not record.under_way
    return {
        "record_id": record.number,
        "pg_id": 0,
        "process_group": (record.group.name, _description(record.group.name)),
        "collective_seq_id": 0 if record.is_message else record.in_group,
        "p2p_seq_id": record.in_group if record.is_message else 0,
        "op_id": record.number,
        "profiling_name": f"gloo:{_name(record)}",
        "time_created_ns": record.entered_ns,
        "time_discovered_started_ns": record.entered_ns,
        "time_discovered_completed_ns": record.left_ns if done else None,
        "duration_ms": (record.left_ns - record.entered_ns) / 1e6 if done else None,
        "input_sizes": inputs,
        "input_dtypes": dtypes,
        "output_sizes": outputs,
        "output_dtypes": dtypes,
        "state": "completed" if done else "started",
        "retired": done,
        "is_p2p": record.is_message,
        "timeout_ms": 0,
        "frames": [{"name": record.label or "script", "filename": file, "line": int(line)}] if line.isdigit() else [],
    }


def _name(record: Record) -> str:
    """With the ends of a message, by their places among the group's sorted ranks: the analyser takes them for these."""
    if not record.is_message:
        return record.kind
    ranks, ends = record.group.ranks, (record.group.own, record.peer)
    own, peer = (sorted(ranks).index(ranks[end]) if 0 <= end < len(ranks) else end for end in ends)
    return f"{record.kind} {own}{'->' if record.kind == 'send' else '<-'}{peer}"


def _sizes(record: Record) -> tuple[list[list[int]], list[list[int]]]:
    """The shapes of inputs and outputs; where a shape is not recorded, that of a vector of as many elements."""
    if record.kind == "barrier":
        return [[0]], [[0]]
    bits = re.search(r"\d+", record.dtype)
    own = record.nbytes // (max(1, int(bits[0]) // 8) if bits else 1)
    whole = own * max(1, len(record.group.ranks))
    shape = [*lengths_in(record.shape)] or [own]
    return {
        "all_gather": ([shape], [[whole]]),
        "gather": ([shape], [[whole]]),
        "reduce_scatter": ([[whole]], [shape]),
        "scatter": ([[whole]], [shape]),
    }.get(record.kind, ([shape], [shape]))
