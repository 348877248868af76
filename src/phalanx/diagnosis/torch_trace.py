"""Recordings in the format of torch's flight recorder, which ``torchfrtrace`` compares between ranks.

The format is that of ``torch._C._distributed_c10d._dump_nccl_trace`` in version 2.10, as far as torch's analyser
(``torch.distributed.flight_recorder``, torch 2.13 to 2.15) reads it: a pickled dictionary for each rank, in files
whose names end with the rank. The analyser knows backends by a list of its own, so our operations are called
``gloo:...``.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.diagnosis.snapshot import Record, Recording, lengths_in

__all__ = ["PREFIX", "as_torch_trace", "write_torch_traces"]

PREFIX = "rank_"
_VERSION = "2.10"


def write_torch_traces(folder: Path, recordings: Mapping[int, Recording]) -> None:
    """Write a file for each rank into a folder of its own, for ``torchfrtrace --prefix rank_ FOLDER``.

    Args:
        folder: is made if it does not exist.
        recordings: by rank in the world.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank, recording in recordings.items():
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(as_torch_trace(recording)))


def as_torch_trace(recording: Recording) -> dict[str, Any]:
    """One rank's recording as torch's dictionary; without the waits of ranks that join, which torch does not record."""
    records = [record for record in recording.records if record.kind != "init"]
    groups = {record.group.name: record.group for record in records}
    return {
        "version": _VERSION,
        "pg_config": {
            name: {"name": name, "desc": _description(name), "ranks": str(list(group.ranks))}
            for name, group in groups.items()
        },
        "entries": [_entry(record) for record in records],
    }


def _description(name: str) -> str:
    return "default_pg" if name == "0" else "undefined"


def _entry(record: Record) -> dict[str, Any]:
    inputs, outputs = _sizes(record)
    file, _, line = record.site.rpartition(":")
    state = "started" if record.under_way else "completed"
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
        "time_discovered_completed_ns": None if record.under_way else record.left_ns,
        "duration_ms": None if record.under_way else (record.left_ns - record.entered_ns) / 1e6,
        "input_sizes": inputs,
        "input_dtypes": [record.dtype] if record.dtype else [],
        "output_sizes": outputs,
        "output_dtypes": [record.dtype] if record.dtype else [],
        "state": state,
        "retired": not record.under_way,
        "is_p2p": record.is_message,
        "timeout_ms": 0,
        "frames": [{"name": record.label or "script", "filename": file, "line": int(line)}] if line.isdigit() else [],
    }


def _name(record: Record) -> str:
    """With the ends of a message, by their places among the group's sorted ranks: the analyser takes them for these."""
    if not record.is_message:
        return record.kind
    arrow = "->" if record.kind == "send" else "<-"
    return f"{record.kind} {_own_place(record)}{arrow}{_place(record, record.peer)}"


def _place(record: Record, group_rank: int) -> int:
    ranks = record.group.ranks
    return sorted(ranks).index(ranks[group_rank]) if 0 <= group_rank < len(ranks) else group_rank


def _own_place(record: Record) -> int:
    return _place(record, record.group.own)


def _sizes(record: Record) -> tuple[list[list[int]], list[list[int]]]:
    """The shapes of inputs and outputs; where a shape is not recorded, that of a vector of as many elements."""
    if record.kind == "barrier":
        return [[0]], [[0]]
    own = record.nbytes // max(1, _itemsize(record.dtype))
    whole = own * max(1, len(record.group.ranks))
    shape = [*lengths_in(record.shape)] or [own]
    return {
        "all_gather": ([shape], [[whole]]),
        "gather": ([shape], [[whole]]),
        "reduce_scatter": ([[whole]], [shape]),
        "scatter": ([[whole]], [shape]),
    }.get(record.kind, ([shape], [shape]))


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
