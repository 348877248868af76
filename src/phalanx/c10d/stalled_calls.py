"""Collectives that C++ calls on torch's own backends: recorded while they stall, from torch's own flight recorder.

torch notes every operation of Gloo and NCCL in a ring of its own. To read its counts of a group (which collective was
called last, which has ended last) takes microseconds; to read the ring takes a tenth of a second. So the counts are
looked at often, and the ring once when a group has stood still for two seconds. The collective in which it stands is
then recorded as if it had been seen: its kind, its bytes, when it was called, and by which line.

It has the number of the group's next collective, and when it is over its record is taken back. Ranks that went through
theirs without a stall have counted none: by its number they would be behind, or the others ahead.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _distributed_c10d as core

from phalanx.diagnosis import recorder
from phalanx.diagnosis.snapshot import KIND_NUMBERS
from phalanx.diagnosis.stacks import Frame
from phalanx.native.core import FOUND_LATE, RecordedGroup
from phalanx.transports.operands import REDUCIBLE
from phalanx.transports.shm.numbers import DTYPE_NUMBERS

__all__ = ["StalledCalls"]

_STALLS_S = 2.0
_NUMBERS = (*REDUCIBLE, torch.complex64, torch.complex128)
# By torch's names in C++, which are those of its types of tensors: "Float".
_SCALAR_TYPES = {torch.empty(0, dtype=dtype).type()[len("torch.") : -len("Tensor")]: dtype for dtype in _NUMBERS}
# "all_reduce_barrier" is a barrier, and "_reduce_scatter_base" no reduce.
_LONGEST_FIRST = sorted(KIND_NUMBERS.items(), key=lambda kind: -len(kind[0]))
# torch's flight recorders, one for Gloo and others, one for NCCL: the functions that give the operations, and counts.
_RINGS = [
    (getattr(core, name), getattr(core, f"{name}_json"))
    for name in ("_dump_fr_trace", "_dump_nccl_trace")
    if hasattr(core, name) and hasattr(core, f"{name}_json")
]


@dataclass
class _Group:
    """A group in one of torch's rings, by torch's own counts.

    Attributes:
        ended: which collective has ended last; None before the first look.
        since: when that was first seen, by ``time.monotonic``.
        was_read: whether the ring has been read since.
        ticket: the record of the collective that lasts; 0 if there is none.
        stalled: torch's number of that collective.
    """

    ended: int | None = None
    since: float = 0.0
    was_read: bool = False
    ticket: int = 0
    stalled: int = 0


class StalledCalls:
    """Looks after what the groups of this process do without Python. One thread calls :meth:`look`, now and then.

    Args:
        group: gives the recorded group of torch's name; None if there is none.
        is_seen: whether a collective of the group with this name is recorded already, and has not ended.
    """

    def __init__(self, group: Callable[[str], RecordedGroup | None], is_seen: Callable[[str], bool]) -> None:
        self._recorded = group
        self._is_seen = is_seen
        self._groups: dict[tuple[int, str], _Group] = {}

    def look(self) -> None:
        """Record what has stalled since the last look, and take back the records of what is over or has failed.

        Raises:
            Exception: torch's recorder answers otherwise than this expects.
        """
        for which, (dump, dump_json) in enumerate(_RINGS):
            counts = json.loads(dump_json(includeCollectives=False, onlyActive=True))["pg_status"]
            for identity, status in counts.items():
                group = self._groups.setdefault((which, identity), _Group())
                called, ended = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
                if group.ticket and ended >= group.stalled:
                    recorder.drop(group.ticket)
                    group.ticket = 0
                if called <= ended or group.ended != ended:
                    group.ended, group.since, group.was_read = ended, time.monotonic(), False
                elif not group.was_read and time.monotonic() - group.since >= _STALLS_S:
                    group.was_read = True
                    self._record(group, identity, dump)

    def _record(self, group: _Group, identity: str, dump: Callable[..., bytes]) -> None:
        entry = _first_after(group.ended or 0, identity, dump, with_stack=False)
        if entry is None or self._is_seen(name := entry["process_group"][0]):
            return
        recorded = self._recorded(name)
        kind = next((number for text, number in _LONGEST_FIRST if text in entry["profiling_name"]), 0)
        if not kind or recorded is None:
            return
        # To look up stacks torch imports its compiler, which takes seconds: C++ that calls a collective comes of DDP or
        # of functional collectives, which have imported it, but most programs have no need of it.
        entry = _first_after(group.ended or 0, identity, dump, with_stack=True) or entry
        dtype, nbytes = None, 0
        for shape, type_name in zip(entry["input_sizes"], entry["input_dtypes"], strict=False):
            dtype = _SCALAR_TYPES.get(type_name)
            nbytes += math.prod(map(int, shape)) * (dtype.itemsize if dtype is not None else 1)
        what = FOUND_LATE | kind | (DTYPE_NUMBERS[dtype][1] << 8 if dtype in DTYPE_NUMBERS else 0)
        entered_ns = time.monotonic_ns() - max(0, time.time_ns() - int(entry["time_created_ns"]))
        line = _users_line(entry.get("frames", ()))
        group.ticket = recorder.begin_at(recorded, what, nbytes, line=line, entered_ns=entered_ns)
        group.stalled = int(entry["collective_seq_id"])


def _first_after(ended: int, identity: str, dump: Callable[..., bytes], *, with_stack: bool) -> dict[str, Any] | None:
    """The first collective of a group after that with the number ``ended``; None if the ring has lost it."""
    found = pickle.loads(dump(includeCollectives=True, includeStackTraces=with_stack, onlyActive=True))
    entries: list[dict[str, Any]] = [
        entry
        for entry in found["entries"]
        if str(entry["pg_id"]) == identity
        and not entry["is_p2p"]
        and not entry["retired"]
        and entry["collective_seq_id"] > ended
    ]
    return min(entries, key=lambda entry: int(entry["collective_seq_id"]), default=None)


def _users_line(frames: Any) -> str:
    """The innermost line of the user's program in a stack of torch's; empty if there is none."""
    with contextlib.suppress(Exception):
        for found in frames:
            frame = Frame(found["filename"], int(found["line"]), found["name"])
            if not frame.is_librarys:
                return f"{frame.file}:{frame.line}"
    return ""
