"""Messages as frames of a proven connection: small ones whole, large ones in pieces that let small ones pass.

    frame    length, kind, number, body, digest
    SMALL    a whole message: its layout, its head, its buffers
    LARGE    the layout and the head of a message whose buffers follow in pieces
    PIECE    the next bytes of the buffers of the large message that is on its way
    HASHED   like PIECE, but its digest is HMAC-SHA-256; the sender takes what is quicker on its processor
    DROP     the large message that is on its way ends here: its sender's time is over
    END      the sender leaves in order, and this is the last frame

Only one large message is on its way in each direction, so its pieces need no number. The digest is the session's
(``wire/session.py``), so nobody on the way can add, change, drop or repeat a frame.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

from phalanx.rpc.message import Kind, Message
from phalanx.wire.framing import Malformed

__all__ = [
    "DROP",
    "END",
    "HASHED",
    "LARGE",
    "LENGTH_BYTES",
    "LONGEST_FRAME",
    "MOST_BUFFERS",
    "PIECE",
    "PIECE_BYTES",
    "PREFIX",
    "SMALL",
    "Layout",
    "check_sizes",
    "layout_of",
    "pieces_of",
    "room_for",
    "small_frame",
    "small_message",
]

SMALL, LARGE, PIECE, DROP, END, HASHED = 1, 2, 3, 4, 5, 6
PREFIX = struct.Struct("!IB")  # the length of what follows, without the digest; the kind of the frame
LENGTH_BYTES = 4
PIECE_BYTES = 1 << 16
# A head is small: what is large travels beside it. Without a limit a broken length would reserve any amount of memory.
LONGEST_FRAME = 1 << 30
MOST_BUFFERS = 1 << 20  # each takes memory here as soon as its size has come
_MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_MAPPED_BYTES = 1 << 18  # from here on, memory is mapped, and the kernel gives it when the bytes arrive
_FIXED = struct.Struct("!BQHII")  # kind, call, bytes of the service's name, number of buffers, bytes of the head
_SIZE = struct.Struct("!Q")
_SMALL_PREFIX = struct.Struct("!IBBQHII")  # PREFIX and _FIXED
_KINDS = {int(kind): kind for kind in Kind}


class Layout:
    """What precedes the head of a message: everything but its bytes.

    Attributes:
        kind, call, service: of the message.
        head_nbytes: the length of its head.
        sizes: the lengths of its buffers.
    """

    def __init__(self, kind: Kind, call: int, service: str, head_nbytes: int, sizes: Sequence[int]) -> None:
        self.kind, self.call, self.service = kind, call, service
        self.head_nbytes = head_nbytes
        self.sizes = sizes

    def encode(self) -> bytes:
        """The layout as it is sent."""
        name = self.service.encode()
        fixed = _FIXED.pack(self.kind, self.call, len(name), len(self.sizes), self.head_nbytes)
        return fixed + name + struct.pack(f"!{len(self.sizes)}Q", *self.sizes)

    @staticmethod
    def decode(data: memoryview) -> tuple[Layout, int]:
        """The layout at the start of ``data``, and where it ends.

        Raises:
            Malformed: these bytes are not a layout.
        """
        if len(data) < _FIXED.size:
            raise Malformed("a message without a layout")
        kind, call, name_nbytes, count, head_nbytes = _FIXED.unpack_from(data)
        end = _FIXED.size + name_nbytes + count * _SIZE.size
        if count > MOST_BUFFERS or end > len(data):
            raise Malformed(f"a layout of {end} bytes in a frame of {len(data)}")
        try:
            service = bytes(data[_FIXED.size : _FIXED.size + name_nbytes]).decode()
            layout = Layout(
                Kind(kind), call, service, head_nbytes, struct.unpack_from(f"!{count}Q", data, end - 8 * count)
            )
        except ValueError as error:
            raise Malformed(f"a layout that cannot be read: {error}") from error
        if end + head_nbytes > len(data):
            raise Malformed(f"a head of {head_nbytes} bytes in a frame of {len(data)}")
        return layout, end


@lru_cache(4096)
def _name(service: str) -> bytes:
    return service.encode()


@lru_cache(4096)
def _service(name: bytes) -> str:
    return name.decode()


def small_frame(message: Message) -> bytes:
    """A small message as a frame without its digest."""
    name, head, buffers = _name(message.service), message.head, message.buffers
    count = len(buffers)
    nbytes = 1 + _FIXED.size + len(name) + 8 * count + len(head)
    if not count:
        prefix = _SMALL_PREFIX.pack(nbytes, SMALL, message.kind, message.call, len(name), 0, len(head))
        return b"".join((prefix, name, head))
    sizes = [buffer.nbytes for buffer in buffers]
    prefix = _SMALL_PREFIX.pack(nbytes + sum(sizes), SMALL, message.kind, message.call, len(name), count, len(head))
    return b"".join((prefix, name, struct.pack(f"!{count}Q", *sizes), head, *buffers))


def small_message(frame: bytes) -> Message:
    """The message of such a frame.

    Raises:
        Malformed: these bytes are not a message.
    """
    nbytes = len(frame)
    if nbytes >= _SMALL_PREFIX.size:
        _, _, kind, call, name_nbytes, count, head_nbytes = _SMALL_PREFIX.unpack_from(frame)
        end = _SMALL_PREFIX.size + name_nbytes
        if not count and end + head_nbytes == nbytes and kind in _KINDS:  # the usual one
            try:
                return Message(_KINDS[kind], call, _service(frame[_SMALL_PREFIX.size : end]), frame[end:])
            except UnicodeDecodeError as error:
                raise Malformed(f"a layout that cannot be read: {error}") from error
    body = memoryview(frame)[PREFIX.size :]
    layout, at = Layout.decode(body)
    head = bytes(body[at : at + layout.head_nbytes])
    at += layout.head_nbytes
    if len(body) - at != sum(layout.sizes):
        raise Malformed(f"{len(body) - at} bytes of buffers, and not {sum(layout.sizes)}")
    buffers = []
    for size in layout.sizes:
        buffers.append(memoryview(bytearray(body[at : at + size])))
        at += size
    return Message(layout.kind, layout.call, layout.service, head, buffers)


def layout_of(message: Message) -> Layout:
    """The layout of a message."""
    sizes = [buffer.nbytes for buffer in message.buffers]
    return Layout(message.kind, message.call, message.service, len(message.head), sizes)


def pieces_of(buffers: Sequence[memoryview], nbytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """The buffers' bytes in pieces of at most ``nbytes``. No piece has bytes of two buffers."""
    for buffer in buffers:
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        for start in range(0, len(view), nbytes):
            yield view[start : start + nbytes]


def check_sizes(sizes: Sequence[int]) -> None:
    """Refuse a large message that this machine cannot hold.

    Raises:
        Malformed: it says that it is larger than the machine's memory.
    """
    if sum(sizes) > _MOST_BYTES:
        raise Malformed(f"a message of {sum(sizes)} bytes, and this machine has {_MOST_BYTES} bytes of memory")


def room_for(nbytes: int) -> memoryview:
    """Memory for a buffer that will arrive. What does not arrive takes none.

    Raises:
        Malformed: the system refuses as much.
    """
    if nbytes < _MAPPED_BYTES:
        return memoryview(bytearray(nbytes))
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, OverflowError, ValueError) as error:
        raise Malformed(f"a message with {nbytes} bytes in one piece, for which there is no memory: {error}") from error
