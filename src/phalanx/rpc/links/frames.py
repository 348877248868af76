"""Messages as frames of a proven connection: small ones whole, large ones in pieces that let small ones pass.

    frame    length, kind, number, body, digest
    SMALL    a whole message: its layout, its head, its buffers
    LARGE    the layout of a message whose head and buffers follow in pieces
    PIECE    the next bytes of the head and the buffers of the large message that is on its way
    HASHED   like PIECE, but its digest is HMAC-SHA-256; the sender takes what is quicker on its processor
    DROP     the large message that is on its way ends here: its sender's time is over
    END      the sender leaves in order, and this is the last frame

Only one large message is on its way in each direction, so its pieces need no number. The digest is the session's
(``wire/session.py``), so nobody on the way can add, change, drop or repeat a frame. The pieces of a large message are
received where they belong, together with the digest and the prefix of the frame behind each, so they are copied once,
by the kernel.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_size_t
from functools import partial

from phalanx.rpc.links.contract import Buffer, Kind, Message, decode_service, encode_service
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session

__all__ = ["LONGEST_FRAME", "MOST_BUFFERS", "Assembler", "large_frame", "pieces_of", "small_frame"]

SMALL, LARGE, PIECE, DROP, END, HASHED = 1, 2, 3, 4, 5, 6
_PIECES = (PIECE, HASHED)
PREFIX = struct.Struct("!IB")  # the length of what follows, without the digest; the kind of the frame
LENGTH_BYTES = 4
PIECE_BYTES = 1 << 16
LONGEST_FRAME = 1 << 24  # without a limit a broken length would reserve any amount of memory
MOST_BUFFERS = (1 << 20) - 1  # each takes memory here as soon as its size has come
_BLOCK_BYTES = 1 << 14
_MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_MAPPED_BYTES = 1 << 18  # from here on, memory is mapped, and the kernel gives it when the bytes arrive
# A frame that begins a message: PREFIX; kind, call, bytes of the service's name, number of buffers, bytes of the head.
# The name, the buffers' sizes and the head follow, and in a small message the buffers. In a large message the head is
# one of the buffers, the first.
_BEGIN = struct.Struct("!IBBQHII")
_KINDS = {int(kind): kind for kind in Kind}
# It keeps the interpreter's lock, which socket.recv() gives away, and which may be back only 5 ms later.
_receive = ctypes.PyDLL(None, use_errno=True).recv  # without argtypes, which would double its cost


def small_frame(message: Message) -> bytes:
    """Make the frame of a small message, without its digest."""
    name, head, buffers = encode_service(message.service), message.head, message.buffers
    nbytes = _BEGIN.size - LENGTH_BYTES + len(name) + len(head)
    if not buffers:
        return b"".join((_BEGIN.pack(nbytes, SMALL, message.kind, message.call, len(name), 0, len(head)), name, head))
    sizes = [buffer.nbytes for buffer in buffers]
    nbytes += 8 * len(sizes) + sum(sizes)
    begin = _BEGIN.pack(nbytes, SMALL, message.kind, message.call, len(name), len(sizes), len(head))
    return b"".join((begin, name, struct.pack(f"!{len(sizes)}Q", *sizes), head, *buffers))


def large_frame(message: Message, sizes: Sequence[int]) -> bytes:
    """Make the first frame of a large message, without its digest. ``sizes`` are those of its head and its buffers."""
    name = encode_service(message.service)
    nbytes = _BEGIN.size - LENGTH_BYTES + len(name) + 8 * len(sizes)
    begin = _BEGIN.pack(nbytes, LARGE, message.kind, message.call, len(name), len(sizes), 0)
    return b"".join((begin, name, struct.pack(f"!{len(sizes)}Q", *sizes)))


def _read_begin(frame: bytes) -> tuple[Message, tuple[int, ...], int]:
    """Read such a frame: the message without its buffers, their sizes, and where they begin.

    Raises:
        Malformed: these bytes are not a message.
    """
    if len(frame) < _BEGIN.size:
        raise Malformed("a message without a layout")
    _, _, kind, call, name_nbytes, count, head_nbytes = _BEGIN.unpack_from(frame)
    sizes_at = _BEGIN.size + name_nbytes
    head_at = sizes_at + 8 * count
    end = head_at + head_nbytes
    if count > MOST_BUFFERS + 1 or end > len(frame):
        raise Malformed(f"a layout of {end} bytes in a frame of {len(frame)}")
    try:
        service = decode_service(frame[_BEGIN.size : sizes_at])
        message = Message(_KINDS[kind], call, service, frame[head_at:end], [])
    except (UnicodeDecodeError, KeyError) as error:
        raise Malformed(f"a layout that cannot be read: {error}") from error
    return message, struct.unpack_from(f"!{count}Q", frame, sizes_at) if count else (), end


def _small_message(frame: bytes) -> Message:
    """Read the frame of a small message.

    Raises:
        Malformed: these bytes are not a message.
    """
    message, sizes, at = _read_begin(frame)
    if len(frame) - at != sum(sizes):
        raise Malformed(f"{len(frame) - at} bytes of buffers, and not {sum(sizes)}")
    if sizes:
        ends = itertools.accumulate(sizes, initial=at)
        places = zip(ends, sizes, strict=False)  # the last end is that of the frame
        message.buffers = [memoryview(bytearray(frame[start : start + size])) for start, size in places]
    return message


def pieces_of(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """Cut the buffers' bytes into pieces of at most ``PIECE_BYTES``. No piece has bytes of two buffers."""
    for buffer in buffers:
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _check_sizes(sizes: Sequence[int]) -> None:
    """Refuse a large message that this machine cannot hold.

    Raises:
        Malformed: it says that it is larger than the machine's memory, or it has no head.
    """
    if not sizes:
        raise Malformed("a large message without a head")
    if sum(sizes) > _MOST_BYTES:
        raise Malformed(f"a message of {sum(sizes)} bytes, and this machine has {_MOST_BYTES} bytes of memory")


def _room_for(nbytes: int) -> memoryview:
    """Take memory for a buffer that will arrive. What does not arrive takes none.

    Raises:
        Malformed: the system refuses as much.
    """
    if nbytes < _MAPPED_BYTES:
        return memoryview(bytearray(nbytes))
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, OverflowError, ValueError) as error:
        raise Malformed(f"a message with {nbytes} bytes in one piece, for which there is no memory: {error}") from error


class Assembler:
    """The receiving end of one connection, for one thread at a time.

    Args:
        sock: the connection.
        session: the digests of its frames.

    Attributes:
        left: whether the other side has said that it leaves. What follows is not read.
    """

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.left = False
        self._sock, self._session = sock, session
        block = ctypes.create_string_buffer(_BLOCK_BYTES)
        self._come = memoryview(block).cast("B")
        self._receive: Callable[[], int] = partial(
            _receive, sock.fileno(), block, c_size_t(_BLOCK_BYTES), socket.MSG_DONTWAIT
        )
        self._data = b""
        self._piece: memoryview | None = None  # of the large message that is coming: it is received where it belongs
        self._got = 0  # bytes of it, and of the digest and the prefix behind it, that have come
        self._prefix = b""
        self._tail = bytearray(TAG_BYTES + PREFIX.size)
        self._message: Message | None = None  # the large one that is coming
        self._sizes: tuple[int, ...] = ()  # of its head and its buffers
        self._buffers: list[Buffer] = []  # these, so far
        self._filled = 0  # bytes of the last of those so far

    def receive(self) -> bool:
        """Take what the socket has, once; return whether there may be more.

        Raises:
            BlockingIOError: nothing has come.
            EOFError: it has ended.
            OSError: the connection was lost.
        """
        if (piece := self._piece) is not None:
            places = [piece[self._got :], memoryview(self._tail)[max(0, self._got - len(piece)) :]]
            wanted = len(places[0]) + len(places[1])
            came = self._sock.recvmsg_into(places)[0]
            self._got += came
        else:
            wanted, came = _BLOCK_BYTES, self._receive()
            if came < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            self._data = self._data + self._come[:came] if self._data else bytes(self._come[:came])
        if not came:
            raise EOFError
        return came == wanted

    def take(self, messages: deque[Message]) -> None:
        """Append the messages that are complete.

        Raises:
            Malformed: the other side did not send this, or it is no message. What was appended before is right.
        """
        if self._piece is not None:
            self._take_piece(self._piece, messages)
            if self._piece is not None:
                return
        start, data = 0, self._data
        nbytes = len(data)
        while nbytes >= start + PREFIX.size and self._piece is None and not self.left:
            length, kind = PREFIX.unpack_from(data, start)
            if not 1 <= length <= LONGEST_FRAME:
                raise Malformed(f"a frame of {length} bytes")
            end = start + LENGTH_BYTES + length
            if nbytes < end + TAG_BYTES:
                if kind in _PIECES:
                    self._begin_piece(length - 1, memoryview(data)[start:])
                    start = nbytes
                break
            tag = data[end : end + TAG_BYTES]
            frame = self._session.opened(data[start:end], tag, PREFIX.size, sha=kind == HASHED)
            if kind == SMALL:
                messages.append(_small_message(frame))
            else:
                self._take_frame(kind, frame, messages)
            start = end + TAG_BYTES
        self._data = data[start:] if start < nbytes else b""

    def _begin_piece(self, nbytes: int, come: memoryview) -> None:
        """Receive the rest of a piece where it belongs. Its bytes count only once its digest has been found right."""
        self._prefix, body = bytes(come[: PREFIX.size]), come[PREFIX.size :]
        place = self._place_of(nbytes)
        self._got = len(body)
        place[: min(nbytes, len(body))] = body[:nbytes]
        self._tail[: len(body[nbytes:])] = body[nbytes:]
        self._piece = place

    def _take_piece(self, piece: memoryview, messages: deque[Message]) -> None:
        nbytes = len(piece)
        if self._got < nbytes + TAG_BYTES:
            return
        sha = self._prefix[-1] == HASHED
        self._session.open_in_place(bytes(self._tail[:TAG_BYTES]), self._prefix, piece, sha=sha)
        self._data = bytes(self._tail[TAG_BYTES : self._got - nbytes])
        self._piece = None
        self._filled += nbytes
        self._finish_if_full(messages)

    def _take_frame(self, kind: int, frame: bytes, messages: deque[Message]) -> None:
        if kind in _PIECES:
            body = frame[PREFIX.size :]
            self._place_of(len(body))[:] = body
            self._filled += len(body)
            self._finish_if_full(messages)
        elif kind == LARGE:
            self._message, self._sizes, _ = _read_begin(frame)
            _check_sizes(self._sizes)
            self._buffers, self._filled = [], 0
            self._finish_if_full(messages)
        elif kind == DROP:
            self._message, self._buffers = None, []
        elif kind == END:
            self.left = True
        else:
            raise Malformed(f"a frame of kind {kind}")

    def _place_of(self, nbytes: int) -> memoryview:
        """Return where the next piece of the large message belongs."""
        if self._message is None:
            raise Malformed("a piece of no message")
        buffer = self._buffers[-1]
        if not 1 <= nbytes <= len(buffer) - self._filled:
            raise Malformed("a piece of a wrong length")
        return buffer[self._filled : self._filled + nbytes]

    def _finish_if_full(self, messages: deque[Message]) -> None:
        message, buffers = self._message, self._buffers
        while message is not None and (not buffers or self._filled == len(buffers[-1])):
            if len(buffers) == len(self._sizes):
                message.head, *message.buffers = buffers
                messages.append(message)
                self._message, self._buffers = None, []
                return
            buffers.append(_room_for(self._sizes[len(buffers)]))
            self._filled = 0
