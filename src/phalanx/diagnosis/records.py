"""Reading the flight recorder of a process, of this or of another one, running or gone.

What is read was written by a process that may have crashed in the middle, or have written over it: nothing of it is
trusted to make sense. A text or a group that cannot be read is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from phalanx.diagnosis.recorder import MEMORY_NAME, ranks_in, spans
from phalanx.native.core import FOUND_LATE, PIECES_AT, RECORDER_BYTES, RECORDS, STRINGS_AT, SeenRecord, library
from phalanx.system.folder import beside
from phalanx.system.foreign_values import checked, read_json
from phalanx.words import format_bytes

__all__ = [
    "KINDS",
    "Group",
    "Record",
    "RecorderCopy",
    "Recording",
    "copy_memory",
    "copy_recorder",
    "in_words",
    "is_message",
    "open_own_recorder",
    "read_memory",
    "read_process",
    "read_recording",
    "world_rank",
]

# The core's numbers (enum phx_kind, enum phx_op).
KINDS = {
    1: "all_reduce",
    2: "broadcast",
    3: "all_gather",
    4: "barrier",
    5: "reduce",
    6: "reduce_scatter",
    7: "gather",
    8: "scatter",
    9: "all_to_all",
    10: "send",
    11: "recv",
    12: "init",
}
_MESSAGES = ("send", "recv")
_OPS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_ROOTS = {"reduce": "dst", "gather": "dst", "broadcast": "src", "scatter": "src"}


@dataclass(frozen=True)
class Group:
    """A group of ranks, as one of its members recorded it.

    Attributes:
        name: torch's name of it; the world's is ``0`` in most programs.
        backend: the backend's name.
        ranks: its members' ranks in the world, in the group's order.
        own: the group rank of the member that recorded it; -1 if that is not known.
    """

    name: str = ""
    backend: str = ""
    ranks: tuple[int, ...] = ()
    own: int = -1


@dataclass(frozen=True)
class Record:
    """One operation.

    Attributes:
        number: which of the process's operations, counted from 0.
        group: the group.
        in_group: which collective of the group it is, or which message, counted from 1: equal on all ranks for the
            collective that they do together.
        kind: its name, as ``all_reduce``.
        nbytes: of this rank's tensor.
        dtype, op: their names; empty if it has none.
        peer: the group rank of the root, or of the other end of a message; -1 for none, or any.
        site: the line of the script, as ``train.py:42``; empty if it is not known.
        label, step: what the script said it was doing; empty, and -1, if nothing.
        entered_ns, left_ns: on the host's monotonic clock; ``left_ns`` is 0 while it is under way.
        failed: it has ended with an error.
        awaits: the group rank that it waits for, or waited for last; -1 if that is not known.
        found_late: it was called by C++ and recorded only since it lasts (c10d/stalled_calls.py). So another rank may
            be in the same collective without a record, and ``in_group`` is what the next counted one will have.
        shape: of this rank's tensor, as ``[2, 3]``; empty if it is not recorded, as that of a vector is not, that of
            several tensors together, and that of any operation of Phalanx's backends, which compare shapes themselves.
    """

    number: int
    group: Group
    in_group: int
    kind: str
    nbytes: int
    dtype: str
    op: str
    peer: int
    site: str
    label: str
    step: int
    entered_ns: int
    left_ns: int
    failed: bool
    awaits: int
    found_late: bool = False
    shape: str = ""

    @property
    def is_message(self) -> bool:
        return self.kind in _MESSAGES

    @property
    def under_way(self) -> bool:
        return self.left_ns == 0

    def name(self) -> str:
        """``all_reduce #118``; in a group that is not the world ``all_reduce #118 of group 3``."""
        text = self.kind + (f" #{self.in_group}" if self.kind != "init" else "")
        if self.is_message:
            text = f"{self.kind} {'to' if self.kind == 'send' else 'from'} {self._peer_text()}"
        return text if self.group.name in ("", "0") else f"{text} of group {self.group.name!r}"

    def text(self, *, with_shape: bool = False) -> str:
        """``all_reduce #118 (float32, 4.0 KiB, sum) at train.py:42 in step 7, "evaluation"``."""
        shape = self.shape if with_shape else ""
        about = [f"{self.dtype}{shape}"] if self.dtype or shape else []
        if self.kind not in ("barrier", "init"):
            about.append(format_bytes(self.nbytes))
        if self.op:
            about.append(self.op)
        if self.kind in _ROOTS:
            about.append(f"{_ROOTS[self.kind]}={self.peer}")
        described = f" ({', '.join(about)})" if about else ""
        return f"{self.name()}{described}{self.where()}"

    def where(self) -> str:
        """`` at train.py:42 in step 7, "evaluation"``; empty if nothing of it is known."""
        text = f" at {self.site}" if self.site else ""
        said = ([f"step {self.step}"] if self.step >= 0 else []) + ([f'"{self.label}"'] if self.label else [])
        return text + (f" in {', '.join(said)}" if said else "")

    def _peer_text(self) -> str:
        if self.peer < 0:
            return "any rank"
        return f"rank {world_rank(self.group, self.peer)}"


def world_rank(group: Group, rank: int) -> int:
    """The rank in the world of a rank of the group."""
    return group.ranks[rank] if 0 <= rank < len(group.ranks) else rank


@dataclass(frozen=True)
class Recording:
    """What the recorder of one process holds.

    Attributes:
        pid, rank, size: the process, and its place in the world; -1 and 0 if it is not known.
        step, label: what its script said last of what it does; -1 and empty if nothing.
        begun: how many operations have begun since the process's first.
        records: the last of them, the oldest first.
        done: how far the one under way is, in percent; -1 if it has not moved any of several pieces.
    """

    pid: int
    rank: int
    size: int
    step: int
    label: str
    begun: int
    records: tuple[Record, ...] = field(repr=False)
    done: int = -1

    @cached_property
    def last(self) -> Record | None:
        """The operation that tells where the process is: the oldest collective under way, or else the last to begin."""
        under_way = [record for record in self.records if record.under_way]
        waiting = [record for record in under_way if not record.is_message] or under_way
        return waiting[0] if waiting else self.records[-1] if self.records else None

    def latest(self, count: int) -> Recording:
        """The same with the last ``count`` operations only, and those that are under way."""
        kept = {record.number: record for record in self.records if record.under_way}
        kept |= {record.number: record for record in self.records[-count:]}
        return replace(self, records=tuple(kept[number] for number in sorted(kept)))

    def excerpt(self, count: int) -> Recording:
        """The same with few operations, from which another process can still conclude who waits for whom.

        These are the last ``count``, the last collective of each of the 64 groups that were used last, and the 64
        oldest that are under way.
        """
        last = {record.group: record for record in self.records if not record.is_message}
        groups = sorted(last.values(), key=lambda record: record.number)[-_MOST_EACH:]
        under_way = [record for record in self.records if record.under_way][:_MOST_EACH]
        newest = self.records[-count:] if count else ()
        kept = {record.number: record for record in (*groups, *under_way, *newest)}
        return replace(self, records=tuple(kept[number] for number in sorted(kept)))

    def later(self, by_ns: int) -> Recording:
        """The same with all times so much later: on another host's clock."""
        moved = (
            replace(each, entered_ns=each.entered_ns + by_ns, left_ns=each.left_ns + by_ns if each.left_ns else 0)
            for each in self.records
        )
        return replace(self, records=tuple(moved))

    def beside(self, folder: str) -> Recording:
        """The same with the files of a folder named without it, as people write them; unchanged if that is empty."""
        if not folder:
            return self
        return replace(self, records=tuple(replace(each, site=beside(each.site, folder)) for each in self.records))

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` makes the same recording."""
        groups = list(dict.fromkeys(record.group for record in self.records))
        number = {group: index for index, group in enumerate(groups)}
        return {
            **{name: getattr(self, name) for name in _OWN},
            "groups": [[group.name, group.backend, spans(group.ranks), group.own] for group in groups],
            "records": [
                [number[record.group], *(getattr(record, name) for name in _FIELDS)] for record in self.records
            ],
            "fields": ["group", *_FIELDS],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Recording:
        """See :meth:`to_json`; other values raise ValueError, TypeError, KeyError or IndexError."""
        groups = [
            checked(Group, {"name": name, "backend": backend, "ranks": ranks_in(ranks), "own": own})
            for name, backend, ranks, own in values["groups"]
        ]
        names = values["fields"][1:]
        records = tuple(
            checked(Record, {"group": groups[group], **dict(zip(names, rest, strict=True))})
            for group, *rest in values["records"]
        )
        return checked(cls, {**{name: values[name] for name in _OWN}, "records": records})


_MOST_EACH = 64
_OWN = ("pid", "rank", "size", "step", "label", "begun", "done")
_FIELDS = [name for name in Record.__dataclass_fields__ if name != "group"]


class _Header(ctypes.Structure):
    """``struct phx_recorder_header``."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("dtypes", ctypes.c_uint32),
        ("step", ctypes.c_int32),
        ("label", ctypes.c_uint32),
    ]


class _Texts:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._groups: dict[int, Group] = {}

    def text(self, at: int) -> str:
        if not 0 < at <= len(self._data) - 4:
            return ""
        length = int.from_bytes(self._data[at : at + 4], "little")
        return self._data[at + 4 : at + 4 + length].decode(errors="replace") if length < 1 << 16 else ""

    def values(self, at: int) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            found = read_json(self.text(at))
            if isinstance(found, dict):
                return found
        return {}

    def group(self, at: int) -> Group:
        if at not in self._groups:
            group = Group()
            with contextlib.suppress(ValueError, TypeError, KeyError):
                values = self.values(at)
                own = {name: values[name] for name in ("name", "backend", "own")}
                group = checked(Group, {**own, "ranks": ranks_in(values["ranks"])})
            self._groups[at] = group
        return self._groups[at]


class RecorderCopy:
    """What a recorder held at one moment, as the core copies it: most readers need few of its operations in words.

    Attributes:
        pid, rank, size, step, label, begun, done: as in :class:`Recording`.
        seen: its operations, in no order.
    """

    def __init__(self, header: _Header, seen: ctypes.Array[SeenRecord], begun: int, done: int, texts: _Texts) -> None:
        self.pid, self.rank, self.size, self.step = header.pid, header.rank, header.size, header.step
        self.label = texts.text(header.label)
        self.begun = begun
        self.done = done
        self.seen = seen
        self._texts = texts
        self._dtypes = texts.values(header.dtypes)

    def record(self, index: int) -> Record:
        """One of the operations that were seen."""
        return _record(self.seen[index], self._texts, self._dtypes)

    def latest(self, count: int) -> RecorderCopy:
        """The same with the last ``count`` operations only, before they are put into words, which takes long."""
        newest = sorted(self.seen, key=lambda seen: seen.number)[-count:]
        self.seen = (SeenRecord * len(newest))(*newest)
        return self

    def place(self, number: int) -> str:
        """Return a line of the program by the number that ``seen`` has of it; empty if there is none."""
        return self._texts.text(number)

    def group(self, number: int) -> Group:
        """The group with this number, by which ``seen`` names it."""
        return self._texts.group(number)


def copy_recorder(file: int, at: int = 0) -> RecorderCopy | None:
    """A copy of the recorder in a file; None if there is none.

    Args:
        file: a descriptor of the file.
        at: where the recorder begins in it, a multiple of the page size.
    """
    # Only then is it mapped: the kernel would find memory for a hole in the file that is looked at.
    if os.fstat(file).st_size < at + RECORDER_BYTES or not any(os.pread(file, 8, at)):
        return None
    # A private mapping: ctypes takes the address of a writable one only, and nobody writes here.
    with mmap.mmap(file, RECORDER_BYTES, mmap.MAP_PRIVATE, offset=at) as memory:
        place = (ctypes.c_char * RECORDER_BYTES).from_buffer(memory)
        try:
            return copy_memory(ctypes.addressof(place))
        finally:
            del place


def read_recording(file: int, at: int = 0) -> Recording | None:
    """The whole recording in a file, with the arguments of :func:`copy_recorder`; None if there is none."""
    return in_words(copy_recorder(file, at))


def read_memory(address: int) -> Recording | None:
    """The recorder that is mapped at an address; None if there is none."""
    return in_words(copy_memory(address))


def copy_memory(address: int) -> RecorderCopy | None:
    """A copy of the recorder that is mapped at an address; None if there is none."""
    seen, begun = (SeenRecord * RECORDS)(), ctypes.c_uint64()
    count = library().phx_records_read(address, 0, seen, ctypes.byref(begun))
    header = _Header.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(_Header)))
    # Read after the records, which name the texts: a text is there before the record that names it.
    texts = _Texts(ctypes.string_at(address + STRINGS_AT, RECORDER_BYTES - STRINGS_AT))
    if not header.magic:
        return None
    pieces, moved = struct.unpack("<II", ctypes.string_at(address + PIECES_AT, 8))
    done = 100 * moved // pieces if 0 < moved < pieces else -1
    return RecorderCopy(header, (SeenRecord * count).from_buffer(seen), begun.value, done, texts)


def in_words(found: RecorderCopy | None) -> Recording | None:
    """Turn a copy of a recorder into its operations with their texts; None for None."""
    if found is None:
        return None
    records = sorted(map(found.record, range(len(found.seen))), key=lambda record: record.number)
    return Recording(**{name: getattr(found, name) for name in _OWN}, records=tuple(records))


def is_message(seen: SeenRecord) -> bool:
    """Whether an operation that the core has copied is a message."""
    return KINDS.get(seen.what & 0xFF) in _MESSAGES


def _record(seen: SeenRecord, texts: _Texts, dtypes: dict[str, Any]) -> Record:
    dtype, op = seen.what >> 8 & 0xFF, seen.what >> 16 & 0xFF
    return Record(
        number=seen.number,
        group=texts.group(seen.group),
        in_group=seen.in_group,
        kind=KINDS.get(seen.what & 0xFF, "unknown"),
        nbytes=seen.nbytes,
        dtype=str(dtypes.get(str(dtype), "")) if dtype else "",
        op=_OPS[op] if op < len(_OPS) else "",
        peer=seen.peer,
        site=texts.text(seen.site),
        label=texts.text(seen.label),
        step=seen.step,
        entered_ns=seen.entered_ns,
        left_ns=seen.left_ns,
        failed=bool(seen.failed),
        awaits=seen.awaits,
        found_late=bool(seen.what & FOUND_LATE),
        shape=texts.text(seen.shape),
    )


def read_process(pid: int) -> Recording | None:
    """The recorder of a process of this host and this user that keeps it itself; None if it has none.

    A process of ``phalanx run`` keeps it in the launcher's memory instead.
    """
    file = open_own_recorder(pid)
    if file is None:
        return None
    try:
        return read_recording(file)
    finally:
        os.close(file)


def open_own_recorder(pid: int) -> int | None:
    """A descriptor of the file in which such a process keeps its recorder; None if it has none."""
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{MEMORY_NAME} "):
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
