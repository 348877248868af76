"""Messages on a stream of bytes: each follows its own length, which is believed only up to a limit.

The limit is small until the other side has proven the job's key (``proof.py``).
"""

from __future__ import annotations

import struct

LONGEST_UNPROVEN = 4096
LONGEST = 1 << 26
_LENGTH = struct.Struct("!I")
PREFIX_BYTES = _LENGTH.size


class Malformed(Exception):
    """Bytes that are not a message."""


def frame(*parts: bytes, longest: int = LONGEST) -> bytes:
    """Make one message of ``parts``, with its length before it; raise ValueError if the receiver would refuse it."""
    nbytes = sum(map(len, parts))
    if nbytes > longest:
        raise ValueError(f"a message of {nbytes} bytes is too long; at most {longest} bytes are taken")
    return b"".join((_LENGTH.pack(nbytes), *parts))


def end_of_frame(data: bytes | bytearray, start: int = 0, *, shortest: int = 0, longest: int = LONGEST) -> int | None:
    """Return the end of the message whose length begins at ``start``; None while that length has not come yet.

    Raises:
        Malformed: the length is below ``shortest`` or above ``longest``.
    """
    if len(data) < start + PREFIX_BYTES:
        return None
    nbytes: int = _LENGTH.unpack_from(data, start)[0]
    if not shortest <= nbytes <= longest:
        raise Malformed(f"a message of {nbytes} bytes")
    return start + PREFIX_BYTES + nbytes
