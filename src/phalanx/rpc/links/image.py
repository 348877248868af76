"""A message as one piece of memory, as it goes through shared memory (``native/csrc/rpc/rpc.h``).

It begins with a header that the core reads, followed by the sizes of the buffers, the service's name, the head, and the
buffers, each at a multiple of ``ALIGN`` bytes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_ssize_t, c_ubyte, c_uint64, c_void_p, py_object
from functools import cache, lru_cache, partial
from typing import Any

from phalanx.rpc.message import Buffer, Kind, Message

__all__ = ["BOX_BYTES", "LARGEST_SMALL", "OWN", "Box", "Damaged", "pack", "pieces", "received"]

ALIGN = 64
LARGEST_SMALL = 126976  # PHX_RPC_SMALL: an image of more bytes does not fit into a ring
_HEADER = struct.Struct("<QIHBxI4xQ")  # struct phx_rpc_image
_BOX = struct.Struct("<QQQ6I16xQIHBxI4xQ")  # struct phx_rpc_box, and the header of the image after it
_BOX_HEAD = 64
BOX_BYTES = _BOX_HEAD + LARGEST_SMALL
OWN = 0xFFFFFFFF  # PHX_RPC_OWN: an image in memory that the core has taken for it alone
_INLINE = 0xFFFFFFFE  # PHX_RPC_INLINE
_PADDING = bytes(ALIGN)
_KINDS = dict(enumerate(Kind, 1))


class Damaged(Exception):
    """What was received is no message."""


@lru_cache(4096)
def _name(service: str) -> bytes:
    return service.encode()


@lru_cache(4096)
def _service(name: bytes) -> str:
    return name.decode()


def _parts(message: Message) -> tuple[int, list[bytes | memoryview]]:
    """How many bytes the image has, and its parts in order."""
    service, head, buffers = _name(message.service), message.head, message.buffers
    at = _HEADER.size + 8 * len(buffers) + len(service) + len(head)
    parts: list[bytes | memoryview] = [b"", service, head]
    sizes = []
    for buffer in buffers:
        padding = -at % ALIGN
        sizes.append(buffer.nbytes)
        parts += (_PADDING[:padding], buffer)
        at += padding + buffer.nbytes
    header = _HEADER.pack(message.call, len(head), len(service), message.kind, len(buffers), at)
    parts[0] = header + struct.pack(f"<{len(sizes)}Q", *sizes) if sizes else header
    return at, parts


def pack(message: Message, small: int) -> bytes | None:
    """The image of a message of at most ``small`` bytes; None if it has more, or its image is no small one."""
    if message.nbytes > small:
        return None
    nbytes, parts = _parts(message)
    return b"".join(parts) if nbytes <= LARGEST_SMALL else None


class _View(Structure):
    """``Py_buffer``."""

    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("suboffsets", c_void_p),
        ("internal", c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [py_object, POINTER(_View), c_int]
_get_buffer.restype = c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [POINTER(_View)]
_release_buffer.restype = None


@contextmanager
def pieces(message: Message) -> Iterator[tuple[int, Any, Any]]:
    """A large image as it lies in several places: their number, their addresses, and their sizes."""
    _, parts = _parts(message)
    views: list[_View] = []
    try:
        for part in parts:
            view = _View()
            _get_buffer(part, byref(view), 0)
            views.append(view)
        number = len(views)
        yield number, (c_void_p * number)(*[v.buf for v in views]), (c_uint64 * number)(*[v.len for v in views])
    finally:
        for view in views:
            _release_buffer(byref(view))


@cache
def _memory_type(order: int) -> type[ctypes.Array[c_ubyte]]:
    """Memory of at most 2**order bytes that somebody else has lent; a type per size would be slow to make."""

    class Lent(c_ubyte * (1 << order)):  # type: ignore[misc]
        give_back: Callable[[], None]

        def __del__(self) -> None:
            self.give_back()

    return Lent


class Box:
    """Where a thread receives: room for a small message.

    Attributes:
        address: where it lies.
        view: its bytes.
        taken: how often the core had put something into it when the thread last took that out.
    """

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(BOX_BYTES)
        self.address = ctypes.addressof(self._memory)
        self.view = memoryview(self._memory).cast("B")
        self.taken = 0

    def open(self) -> tuple[int, ...]:
        """What came last: link, where, nbytes, block, sequence, lane, ended, idle, taken; then of its image call,
        head_bytes, service_bytes, kind, buffers, nbytes.
        """
        return _BOX.unpack_from(self._memory)

    def has_more(self) -> bool:
        """Whether something was put into it that has not been taken out."""
        return self.open()[8] != self.taken


def received(box: Box, values: tuple[int, ...], release: Callable[[int, int, int, int, int], None]) -> Message:
    """The message in a box. A large one lies where it came; ``release`` is called when nobody can reach it any more.

    Raises:
        Damaged: its lengths do not fit together.
    """
    link, where, nbytes, block, sequence, _, _, _, _, call, head_bytes, service_bytes, kind, buffers, _ = values
    at = _HEADER.size + 8 * buffers
    body = at + service_bytes
    end = body + head_bytes
    if block == _INLINE:
        view = box.view[_BOX_HEAD : _BOX_HEAD + nbytes]
        if end > nbytes:
            raise Damaged
        head: Buffer | bytes = bytes(view[body:end])
    else:
        memory = _memory_type((nbytes - 1).bit_length()).from_address(where)
        memory.give_back = partial(release, link, block, sequence, where, nbytes)  # type: ignore[attr-defined]
        view = memoryview(memory).cast("B")[:nbytes]
        if end > nbytes:
            raise Damaged
        head = view[body:end]
    if kind not in _KINDS:  # only now, because a large image is given back by its memory
        raise Damaged
    parts = []
    if buffers:
        for size in struct.unpack_from(f"<{buffers}Q", view, _HEADER.size):
            end += -end % ALIGN
            part = view[end : end + size]
            if len(part) != size:
                raise Damaged
            parts.append(memoryview(bytearray(part)) if block == _INLINE else part)
            end += size
    if end != nbytes:
        raise Damaged
    try:
        service = _service(bytes(view[at:body]))
    except UnicodeDecodeError:
        raise Damaged from None
    return Message(_KINDS[kind], call, service, head, parts)
