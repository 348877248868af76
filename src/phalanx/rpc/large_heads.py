"""Heads with large ``bytes`` in them: pickle writes these out as they are, so they become buffers without a copy.

Such a head begins with ``FIRST_BYTE``, where every pickle has another. Then follow how many pieces were taken out, the
position of each, and the rest; the pieces are the message's last buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from phalanx.errors import EncodingError

__all__ = ["FIRST_BYTE", "Chunks", "Pieces", "put_together", "take_apart"]

FIRST_BYTE = b"\x01"
# Pickle collects what it writes in frames of at most 128 KiB, so a larger piece is the content of one object.
PIECE_NBYTES = 256 * 1024

_COUNT = struct.Struct("<BI")


class Chunks(list[bytes]):
    """A file that keeps what pickle writes to it, piece by piece."""

    write = list.append


def put_together(chunks: Sequence[bytes], buffers: list[memoryview]) -> tuple[bytes, list[memoryview]]:
    """A head of what pickle has written, and the buffers with the large pieces after them."""
    positions: list[int] = []
    small: list[bytes] = []
    length = 0
    for chunk in chunks:
        if len(chunk) >= PIECE_NBYTES:
            positions.append(length)
            buffers.append(memoryview(chunk))
        else:
            small.append(chunk)
            length += len(chunk)
    if not positions:
        return b"".join(small), buffers
    table = _COUNT.pack(FIRST_BYTE[0], len(positions)) + struct.pack(f"<{len(positions)}Q", *positions)
    return b"".join((table, *small)), buffers


def take_apart(head: bytes | memoryview, buffers: Sequence[memoryview]) -> tuple[Pieces, Sequence[memoryview]]:
    """What to unpickle, as a file, and the buffers that are not parts of it."""
    try:
        _, count = _COUNT.unpack_from(head)
        positions = struct.unpack_from(f"<{count}Q", head, _COUNT.size)
    except struct.error:
        raise EncodingError.damaged("the beginning of a head") from None
    rest = memoryview(head)[_COUNT.size + 8 * count :]
    if count > len(buffers) or list(positions) != sorted(positions) or (positions and positions[-1] > len(rest)):
        raise EncodingError.damaged(f"{len(buffers)} buffers and a head that names {count} of them")
    parts, begin = [], 0
    for position, piece in zip(positions, buffers[len(buffers) - count :], strict=True):
        parts += [rest[begin:position], piece]
        begin = position
    return Pieces([*parts, rest[begin:]]), buffers[: len(buffers) - count]


class Pieces:
    """A file for reading, of pieces of memory in order."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = [part for part in reversed(parts) if part.nbytes]

    def readinto(self, target: memoryview) -> int:
        """Fill ``target``, as far as there are bytes, and return their number."""
        target = memoryview(target).cast("B")
        done = 0
        while done < len(target) and self._parts:
            part = self._parts.pop()
            count = min(len(target) - done, len(part))
            target[done : done + count] = part[:count]
            done += count
            if count < len(part):
                self._parts.append(part[count:])
        return done

    def read(self, nbytes: int) -> bytes:
        """The next bytes; fewer at the end."""
        content = bytearray(min(nbytes, sum(map(len, self._parts))))
        self.readinto(memoryview(content))
        return bytes(content)

    def readline(self) -> bytes:
        """The next line, which pickle only needs for protocols of old."""
        line = bytearray()
        while not line.endswith(b"\n") and (byte := self.read(1)):
            line += byte
        return bytes(line)
