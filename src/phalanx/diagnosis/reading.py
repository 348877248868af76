"""Read the flight recorder of a process, of this or of another one, running or gone.

The writer may have crashed in the middle, or have written over it: a text or a group that cannot be read is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from phalanx.diagnosis.recorder import MEMORY_NAME, own_memory
from phalanx.diagnosis.snapshot import KINDS, Group, Record, Recording, ranks_in
from phalanx.diagnosis.stacks import memory_file
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.native.core import (
    FOUND_LATE,
    PIECES_AT,
    RECORDER_BYTES,
    RECORDS,
    RECORDS_AT,
    STRINGS_AT,
    SeenRecord,
    library,
)
from phalanx.system.files import beside, jobs_folder
from phalanx.system.foreign_values import read_json

_OPS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")  # enum phx_op
# native/csrc/recorder/record.h; of the header the magic number, version, world size, pid, rank, dtypes, step and label.
_HEADER, _NEXT_AT, _RECORD_BYTES = "=QIIIiIiI", 64, 64
_Error = TypeVar("_Error", bound=BaseException)


class RecorderCopy:
    """Copy of the recorder at an address: its operations as the core has them, and its texts."""

    def __init__(self, address: int) -> None:
        seen, begun = (SeenRecord * RECORDS)(), ctypes.c_uint64()
        count = library().phx_records_read(address, 0, seen, ctypes.byref(begun))
        self.seen, self.begun = (SeenRecord * count).from_buffer(seen), begun.value  # in no order
        header = struct.unpack(_HEADER, ctypes.string_at(address, struct.calcsize(_HEADER)))
        _, _, self.size, self.pid, self.rank, dtypes, self.step, label = header
        # Read after the records, which name the texts: a text is there before the record that names it.
        self._texts = ctypes.string_at(address + STRINGS_AT, RECORDER_BYTES - STRINGS_AT)
        self._groups: dict[int, Group] = {}
        self._dtypes, self.label = self._values(dtypes), self.place(label)
        whole, moved = struct.unpack("<II", ctypes.string_at(address + PIECES_AT, 8))
        self.done = 100 * moved // whole if 0 < moved < whole else -1

    def recording(self, count: int = RECORDS) -> Recording:
        """The last ``count`` operations with their texts. To put many into words takes long."""
        latest = sorted(range(len(self.seen)), key=lambda index: int(self.seen[index].number))[-count:]
        own = self.pid, self.rank, self.size, self.step, self.label, self.begun
        return Recording(*own, tuple(map(self.record, latest)), self.done)

    def record(self, index: int) -> Record:
        """One of the operations that were seen."""
        seen = self.seen[index]
        dtype, op = seen.what >> 8 & 0xFF, seen.what >> 16 & 0xFF
        return Record(
            number=seen.number,
            group=self.group(seen.group),
            in_group=seen.in_group,
            kind=KINDS.get(seen.what & 0xFF, "unknown"),
            nbytes=seen.nbytes,
            dtype=str(self._dtypes.get(str(dtype), "")) if dtype else "",
            op=_OPS[op] if op < len(_OPS) else "",
            peer=seen.peer,
            site=self.place(seen.site),
            label=self.place(seen.label),
            step=seen.step,
            entered_ns=seen.entered_ns,
            left_ns=seen.left_ns,
            failed=bool(seen.failed),
            awaits=seen.awaits,
            found_late=bool(seen.what & FOUND_LATE),
            shape=self.place(seen.shape),
        )

    def place(self, number: int) -> str:
        """The text with this number, as of a line of the program; empty if there is none."""
        if not 0 < number <= len(self._texts) - 4:
            return ""
        length = int.from_bytes(self._texts[number : number + 4], "little")
        return self._texts[number + 4 : number + 4 + length].decode(errors="replace") if length < 1 << 16 else ""

    def group(self, number: int) -> Group:
        """The group with this number, by which ``seen`` names it."""
        if number not in self._groups:
            self._groups[number] = Group()
            with contextlib.suppress(ValueError, KeyError):
                values = self._values(number)
                self._groups[number] = msgspec.convert({**values, "ranks": ranks_in(values["ranks"])}, Group)
        return self._groups[number]

    def _values(self, number: int) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            found = read_json(self.place(number))
            if isinstance(found, dict):
                return found
        return {}


def copy_memory(address: int) -> RecorderCopy | None:
    """A copy of the recorder that is mapped at an address; None if there is none, also for 0."""
    return RecorderCopy(address) if address and any(ctypes.string_at(address, 8)) else None


def copy_recorder(file: int, at: int = 0) -> RecorderCopy | None:
    """A copy of the recorder that begins at ``at`` in the file of a descriptor; None if there is none."""
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


def read_recording(file: int, at: int = 0, count: int = RECORDS) -> Recording | None:
    """The last ``count`` operations in a file, as of :func:`copy_recorder`; None if there is no recorder."""
    copy = copy_recorder(file, at)
    return copy.recording(count) if copy is not None else None


def read_memory(address: int) -> Recording | None:
    """The recorder that is mapped at an address; None if there is none, also for 0."""
    copy = copy_memory(address)
    return copy.recording() if copy is not None else None


def read_process(pid: int) -> Recording | None:
    """The recorder of a process of this host and this user that no launcher keeps; None if it has none."""
    with contextlib.suppress(OSError), open(memory_file(pid, f"{MEMORY_NAME}-{pid}"), "rb") as file:
        return read_recording(file.fileno())
    return None


@dataclass(frozen=True)
class Position:
    """Progress of a process, by a look that takes microseconds."""

    begun: int  # how many operations
    under_way_since_ns: int  # the last of them, on the host's monotonic clock; 0 if it is done
    pieces: int = 0  # changes when one of several pieces of an operation has moved


def read_position(file: int, at: int) -> Position | None:
    """Read a process's progress from three words of its recorder; None if there is none, or its last record is half."""
    header = os.pread(file, PIECES_AT + 8, at)
    if len(header) < PIECES_AT + 8 or not any(header[:8]):
        return None
    begun = int.from_bytes(header[_NEXT_AT : _NEXT_AT + 8], "little")
    if not begun:
        return Position(0, 0)
    record = os.pread(file, 24, at + RECORDS_AT + (begun - 1) % RECORDS * _RECORD_BYTES)
    word, left, entered = (int.from_bytes(record[i : i + 8], "little") for i in (0, 8, 16))
    if word != 2 * begun:
        return None
    return Position(begun, entered if left >> 63 else 0, int.from_bytes(header[PIECES_AT:], "little"))


def facts_in(recording: Recording) -> dict[str, Any]:
    """The attributes of :class:`PeerLost` that are in a rank's recorder, and whether it ``was_in_it``."""
    facts: dict[str, Any] = {"rank": recording.rank}
    last = recording.last
    if last is not None:
        facts["last_line"], facts["was_in_it"] = last.site, last.under_way
        facts["last_operation"] = msgspec.structs.replace(last, site=beside(last.site, jobs_folder())).text()
    return facts


def with_own_wait(error: _Error) -> _Error:
    """Add to an error about other ranks in which operation of which group this process was, and who is to blame.

    For calls that differ it names no rank to blame: any of them may be the one that was meant. Nothing is added without
    a recorder, or if operations of several groups are under way, since any of them may be the one that failed.
    """
    if not isinstance(error, (PeerLost, CollectiveTimeout, CollectiveMismatch)):
        return error
    recording = read_memory(own_memory())
    last = recording.last if recording is not None else None
    if recording is None or last is None or not (last.under_way or last.failed):
        return error
    if len({record.group for record in recording.records if record.under_way}) > 1:
        return error
    error.group, error.sequence = last.group.name, last.in_group
    error.elapsed_s = error.elapsed_s or ((last.left_ns or time.monotonic_ns()) - last.entered_ns) / 1e9
    if not isinstance(error, CollectiveMismatch) and error.rank < 0 and 0 <= error.group_rank < len(last.group.ranks):
        error.rank = last.group.ranks[error.group_rank]
    return error
