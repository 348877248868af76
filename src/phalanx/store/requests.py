"""The requests that a rank sends to rank 0's store once both have proven themselves, and the answers.

A message is a frame (``wire/framing.py``) with a code, a number, and fields of bytes. Nothing is ever unpickled, and a
message whose fields do not fill it exactly is refused as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from phalanx.wire import framing
from phalanx.wire.framing import PREFIX_BYTES, Malformed, end_of_frame, frame

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
    "LOST",
    "MEETING",
    "READ",
    "SET",
    "SHORTEST",
    "WAIT",
    "WAITING",
    "length_of",
    "pack",
    "unpack",
]

# Requests. For READ, WAIT and EVERYBODY the number is how long to wait, in milliseconds (0: without limit); for ADD it
# is the summand; for MEETING it is 1 when the rank begins to exchange what the ranks need of each other, 0 when it has
# all, and 2 when it gives up; all others send 0. The fields are keys, or keys and values in turn; for MEETING they say
# why it gives up (``gathering.py``).
SET, ADD, APPEND, COMPARE_SET, DELETE, CHECK, COUNT, LIST, READ, WAIT, EVERYBODY, MEETING = range(1, 13)
#: Those that rank 0 may answer later.
WAITING = (READ, WAIT, EVERYBODY)
# Answers. DONE carries the result, as a number or as fields: for EVERYBODY, the claims of the ranks that this one may
# look at. LATE means that the wait took too long; its fields name what is missing. The field of FAILED is the reason.
# So is the first of LOST: a rank went while the ranks were meeting; if that is about another rank, its rank, pid and
# host follow. LOST is also sent unasked, as the answer to whatever is asked next; nothing else is answered on the
# connection after it.
DONE, LATE, FAILED, LOST = range(4)

# Eight times what torch's own store accepts.
LONGEST = framing.LONGEST
_LENGTH = struct.Struct("!I")
_HEAD = struct.Struct("!BqI")
SHORTEST = PREFIX_BYTES + _HEAD.size


def pack(code: int, number: int = 0, fields: Sequence[bytes] = ()) -> bytes:
    """A message, ready to be sent.

    Raises:
        ValueError: it is longer than ``LONGEST``.
    """
    parts = [_HEAD.pack(code, number, len(fields))]
    for field in fields:
        parts += (_LENGTH.pack(len(field)), field)
    return frame(*parts, longest=LONGEST)


def length_of(data: bytes | bytearray) -> int | None:
    """How many bytes the message that ``data`` begins with has in all; None while too few have come to know that.

    Raises:
        Malformed: that is more than ``LONGEST``, or too little for a message.
    """
    return end_of_frame(data, shortest=_HEAD.size, longest=LONGEST)


def unpack(data: bytes | bytearray, length: int) -> tuple[int, int, list[bytes]]:
    """Code, number and fields of the message in the first ``length`` bytes.

    Raises:
        Malformed: the fields do not fill the message exactly.
    """
    code, number, count = _HEAD.unpack_from(data, PREFIX_BYTES)
    at, fields = PREFIX_BYTES + _HEAD.size, []
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
