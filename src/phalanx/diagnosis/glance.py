"""Read a process's progress from three words of its flight recorder, cheaply enough to be done often."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.native.core import PIECES_AT, RECORDS, RECORDS_AT

__all__ = ["Position", "read_position"]

_NEXT_AT, _GLANCED, _RECORD_BYTES = 64, PIECES_AT + 8, 64  # native/csrc/record.h


@dataclass(frozen=True)
class Position:
    """How far a process has come, by a look that takes microseconds.

    Attributes:
        begun: how many operations have begun.
        under_way_since_ns: since when the last of them is under way, on the host's monotonic clock; 0 if it is done.
        pieces: changes when one of several pieces of an operation has moved.
    """

    begun: int
    under_way_since_ns: int
    pieces: int = 0


def read_position(file: int, at: int) -> Position | None:
    """A :class:`Position` at the recorder in a file; None if there is none, or if its last record is being written.

    The two words that decide are read whole. Between the reads the process may go on; then the look is an old one.
    """
    header = os.pread(file, _GLANCED, at)
    if len(header) < _GLANCED or not any(header[:8]):
        return None
    begun = int.from_bytes(header[_NEXT_AT : _NEXT_AT + 8], "little")
    if not begun:
        return Position(0, 0)
    record = os.pread(file, 24, at + RECORDS_AT + (begun - 1) % RECORDS * _RECORD_BYTES)
    word, left, entered = (int.from_bytes(record[i : i + 8], "little") for i in (0, 8, 16))
    if word != 2 * begun:
        return None
    return Position(begun, entered if left >> 63 else 0, int.from_bytes(header[PIECES_AT:], "little"))
