"""Messages on a stream of bytes: each follows its own length, and a length is believed only up to a limit.

The limit is small until the other side has proven the job's key (``proof.py``), so that a stranger cannot make this
process keep much; after that it is as large as one message may reasonably be.
"""

from __future__ import annotations

import struct

__all__ = ["LONGEST", "LONGEST_UNPROVEN", "PREFIX_BYTES", "Malformed", "end_of_frame", "frame"]

LONGEST_UNPROVEN = 4096
LONGEST = 1 << 26
_LENGTH = struct.Struct("!I")
PREFIX_BYTES = _LENGTH.size


class Malformed(Exception):
    """Bytes that are not a message."""


def frame(*parts: bytes, longest: int = LONGEST) -> bytes:
    """One message made of ``parts``, with its length before it.

    Raises:
        ValueError: it has more than ``longest`` bytes, so the receiver would refuse it.
    """
    nbytes = sum(map(len, parts))
    if nbytes > longest:
        raise ValueError(f"a message of {nbytes} bytes is too long; at most {longest} bytes are taken")
    return b"".join((_LENGTH.pack(nbytes), *parts))


def end_of_frame(data: bytes | bytearray, start: int = 0, *, shortest: int = 0, longest: int = LONGEST) -> int | None:
    """The end of the message whose length begins at ``start``; None while that length has not come yet.

    The message itself begins at ``start + PREFIX_BYTES``, and may not have come either.

    Raises:
        Malformed: the length is below ``shortest`` or above ``longest``.
    """
    if len(data) < start + PREFIX_BYTES:
        return None
    nbytes: int = _LENGTH.unpack_from(data, start)[0]
    if not shortest <= nbytes <= longest:
        raise Malformed(f"a message of {nbytes} bytes")
    return start + PREFIX_BYTES + nbytes
