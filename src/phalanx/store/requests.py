"""What a rank and rank 0's store say to each other once they have proven themselves: requests and answers.

A message is a length, a code, a number, and fields of bytes. Nothing is ever unpickled, no length is believed beyond
``LONGEST``, and a message that does not come out even is refused whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = [
    "ADD",
    "APPEND",
    "CHECK",
    "COMPARE_SET",
    "COUNT",
    "DELETE",
    "DONE",
    "EVERYBODY",
    "FAILED",
    "LATE",
    "LIST",
    "LONGEST",
    "READ",
    "SET",
    "WAIT",
    "Malformed",
    "length_of",
    "pack",
    "unpack",
]

# Requests. The number of READ, WAIT and EVERYBODY is how long to wait, in milliseconds (0: as long as it takes), that
# of ADD is added; all others send 0. The fields are keys, or keys and values in turn.
SET, ADD, APPEND, COMPARE_SET, DELETE, CHECK, COUNT, LIST, READ, WAIT, EVERYBODY = range(1, 12)
# Answers. DONE has the result, as a number or as fields; LATE says that the wait took too long; the field of FAILED
# says why.
DONE, LATE, FAILED = range(3)

# As much as a process sends in one message; torch's own store takes an eighth of it.
LONGEST = 1 << 26
_LENGTH = struct.Struct("!I")
_HEAD = struct.Struct("!BqI")


class Malformed(Exception):
    """Bytes that are no message."""


def pack(code: int, number: int = 0, fields: Sequence[bytes] = ()) -> bytes:
    """A message, ready to be sent.

    Raises:
        ValueError: it is longer than ``LONGEST``.
    """
    parts = [_HEAD.pack(code, number, len(fields))]
    for field in fields:
        parts += (_LENGTH.pack(len(field)), field)
    size = sum(map(len, parts))
    if size > LONGEST:
        raise ValueError(f"a message of {size} bytes; the store takes at most {LONGEST}")
    return b"".join((_LENGTH.pack(size), *parts))


def length_of(data: bytes | bytearray) -> int | None:
    """How many bytes the message that ``data`` begins with has in all; None if that is not known yet.

    Raises:
        Malformed: more than ``LONGEST``, or too few to be a message.
    """
    if len(data) < _LENGTH.size:
        return None
    size: int = _LENGTH.unpack_from(data)[0]
    if not _HEAD.size <= size <= LONGEST:
        raise Malformed(f"a message of {size} bytes")
    return _LENGTH.size + size


def unpack(data: bytes | bytearray, length: int) -> tuple[int, int, list[bytes]]:
    """Code, number and fields of the message in the first ``length`` bytes.

    Raises:
        Malformed: the fields do not fill it.
    """
    code, number, count = _HEAD.unpack_from(data, _LENGTH.size)
    at, fields = _LENGTH.size + _HEAD.size, []
    for _ in range(count):
        if at + _LENGTH.size > length:
            raise Malformed("a field is missing")
        size = _LENGTH.unpack_from(data, at)[0]
        at += _LENGTH.size
        if at + size > length:
            raise Malformed("a field is cut off")
        fields.append(bytes(data[at : at + size]))
        at += size
    if at != length:
        raise Malformed("bytes are left over")
    return code, number, fields
