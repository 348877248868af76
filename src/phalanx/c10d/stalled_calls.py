"""Collectives that C++ calls on torch's own backends: recorded while they stall, from torch's own flight recorder.

The reducer of DDP, functional collectives and compiled programs call a backend without Python, so no function of ours
sees them. torch notes every operation of Gloo and NCCL in a ring of its own. To read its counts of a group (which
collective was called last, which has ended last) takes microseconds; to read the ring takes a tenth of a second. So the
counts are looked at often, and the ring only when a group has stood still for a while. The collective in which it
stands is then recorded as if it had been seen: its kind, its bytes, when it was called, and by which line.

It has the number of the group's next collective, and when it is over its record is taken back. Ranks that went through
theirs without a stall have counted none: by its number they would be behind, or the others ahead.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.diagnosis import recorder
from phalanx.diagnosis.snapshot import KINDS
from phalanx.diagnosis.stacks import Frame
from phalanx.native.core import FOUND_LATE, RecordedGroup
from phalanx.transports.operands import REDUCIBLE
from phalanx.transports.shm.numbers import DTYPE_NUMBERS

__all__ = ["StalledCalls"]

_STALLS_S = 2.0
# The ring is read so seldom that this takes at most 1/50 of the time.
_PAUSE = 50
_NUMBERS = (*REDUCIBLE, torch.complex64, torch.complex128)
# By torch's names in C++, which are those of its types of tensors: "Float".
_SCALAR_TYPES = {torch.empty(0, dtype=dtype).type()[len("torch.") : -len("Tensor")]: dtype for dtype in _NUMBERS}
# The longest first: "all_reduce_barrier" is a barrier, and "_reduce_scatter_base" no reduce.
_NUMBER_OF_KIND = sorted(((name, number) for number, name in KINDS.items()), key=lambda kind: -len(kind[0]))


@dataclass
class _Counts:
    """How far a group has come, by torch's own count.

    Attributes:
        ended: which collective has ended last.
        since: when that was first seen, by ``time.monotonic``.
        was_read: whether the ring has been read since.
    """

    ended: int
    since: float
    was_read: bool = False


@dataclass
class _Stalled:
    """A collective that is recorded because it lasts: torch's number of it, and its record."""

    number: int
    ticket: int


class StalledCalls:
    """Looks after what the groups of this process do without Python. One thread calls :meth:`look`, now and then.

    Args:
        group: gives the recorded group of torch's name; None if there is none.
        is_seen: whether a collective of the group with this name is recorded already, and has not ended.
    """

    def __init__(self, group: Callable[[str], RecordedGroup | None], is_seen: Callable[[str], bool]) -> None:
        self._group = group
        self._is_seen = is_seen
        self._counts: dict[tuple[int, str], _Counts] = {}
        self._names: dict[tuple[int, str], str] = {}
        self._stalled: dict[tuple[int, str], _Stalled] = {}
        self._not_before = 0.0
        self._rings = _rings()

    def look(self) -> None:
        """Record what has stalled since the last look, and take back the records of what is over or has failed.

        Raises:
            Exception: torch's recorder answers otherwise than this expects.
        """
        for which, ring in enumerate(self._rings):
            found: dict[str, Any] = json.loads(ring.counts())["pg_status"]
            for identity, status in found.items():
                key = which, identity
                called, ended = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
                self._drop_if_over(key, ended)
                if self._is_stalled(key, called, ended):
                    self._read(key, ring, ended)

    def _drop_if_over(self, key: tuple[int, str], ended: int) -> None:
        stalled = self._stalled.get(key)
        if stalled is not None and ended >= stalled.number:
            del self._stalled[key]
            recorder.drop(stalled.ticket)

    def _is_stalled(self, key: tuple[int, str], called: int, ended: int) -> bool:
        now, counts = time.monotonic(), self._counts.get(key)
        if called <= ended or counts is None or counts.ended != ended:
            self._counts[key] = _Counts(ended, now)
            return False
        name = self._names.get(key)
        return (
            not counts.was_read
            and now - counts.since >= _STALLS_S
            and now >= self._not_before
            and not (name is not None and self._is_seen(name))
        )

    def _read(self, key: tuple[int, str], ring: _Ring, ended: int) -> None:
        self._counts[key].was_read = True
        began = time.monotonic()
        try:
            entry = _first_after(ended, key[1], ring.entries(with_stacks=False))
            if entry is None:
                return
            name = self._names[key] = entry["process_group"][0]
            kind = next((number for text, number in _NUMBER_OF_KIND if text in entry["profiling_name"]), 0)
            group = None if self._is_seen(name) else self._group(name)
            if not kind or group is None:
                return
            # To look up stacks torch imports its compiler, which takes seconds: C++ that calls a collective comes of
            # DDP or of functional collectives, which have imported it, but most programs have no need of it.
            entry = _first_after(ended, key[1], ring.entries(with_stacks=True)) or entry
        finally:
            now = time.monotonic()
            self._not_before = now + _PAUSE * (now - began)
        dtype, nbytes = _data(entry)
        entered_ns = time.monotonic_ns() - max(0, time.time_ns() - int(entry["time_created_ns"]))
        what = FOUND_LATE | kind | (DTYPE_NUMBERS[dtype][1] << 8 if dtype in DTYPE_NUMBERS else 0)
        ticket = recorder.begin_at(group, what, nbytes, line=_line(entry.get("frames", ())), entered_ns=entered_ns)
        if ticket:
            self._stalled[key] = _Stalled(int(entry["collective_seq_id"]), ticket)


@dataclass(frozen=True)
class _Ring:
    """One of torch's flight recorders: the groups' counts as JSON, and what has not ended."""

    counts: Callable[[], bytes]
    dump: Callable[..., bytes]

    def entries(self, *, with_stacks: bool) -> list[dict[str, Any]]:
        found = pickle.loads(self.dump(includeCollectives=True, includeStackTraces=with_stacks, onlyActive=True))
        entries: list[dict[str, Any]] = found["entries"]
        return entries


def _rings() -> list[_Ring]:
    """Those of this torch: one for Gloo and others, and one for NCCL."""
    from torch._C import _distributed_c10d as core

    rings = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump, counts = getattr(core, name, None), getattr(core, f"{name}_json", None)
        if dump is not None and counts is not None:
            rings.append(_Ring(_counting(counts), dump))
    return rings


def _counting(counts: Callable[..., bytes]) -> Callable[[], bytes]:
    return lambda: counts(includeCollectives=False, onlyActive=True)


def _first_after(ended: int, identity: str, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first collective of a group after that with the number ``ended``; None if the ring has lost it."""
    later = [
        entry
        for entry in entries
        if str(entry["pg_id"]) == identity
        and not entry["is_p2p"]
        and not entry["retired"]
        and entry["collective_seq_id"] > ended
    ]
    return min(later, key=lambda entry: int(entry["collective_seq_id"]), default=None)


def _data(entry: Mapping[str, Any]) -> tuple[torch.dtype | None, int]:
    """The dtype of a collective's input, and its bytes."""
    dtype, nbytes = None, 0
    for shape, name in zip(entry["input_sizes"], entry["input_dtypes"], strict=False):
        dtype = _SCALAR_TYPES.get(name)
        elements = 1
        for length in shape:
            elements *= int(length)
        nbytes += elements * (dtype.itemsize if dtype is not None else 1)
    return dtype, nbytes


def _line(frames: Any) -> str:
    """The innermost line of the user's program in a stack of torch's; empty if there is none."""
    with contextlib.suppress(Exception):
        for found in frames:
            frame = Frame(found["filename"], int(found["line"]), found["name"])
            if not frame.is_librarys:
                return f"{frame.file}:{frame.line}"
    return ""
