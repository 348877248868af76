"""One end of a TCP connection in the core (``native/csrc/rpc/socket.c``): a small message is one call there each way.

A thread that waits sleeps at once, other than with shared memory, where it watches for a short time first. Watching a
connection was tried. It made an empty call 10 to 20 us quicker while other programs left the cores alone, and many
times slower while they did not: a thread that gives its core away between two looks gets it back late. Rules that had
threads rest after such a loss cost what watching brought.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, addressof, c_int32, c_uint32, c_uint64, c_void_p
from functools import partial

from phalanx.native.core import rpc
from phalanx.wire.session import Session

__all__ = ["BLOCK_BYTES", "UNCHECKED", "WHOLE", "Endpoint"]

BLOCK_BYTES = 1 << 14
WHOLE = 1 << 32  # PHX_RPC_WHOLE
UNCHECKED = (1 << 64) - 1  # in the place of a number: what has come before is incomplete, so this is no message


class _Endpoint(Structure):
    """``struct phx_rpc_endpoint``."""

    _fields_ = [
        ("data", c_void_p),
        ("size", c_uint32),
        ("came", c_uint32),
        ("descriptor", c_int32),
        ("outgoing", c_uint64 * 8),
        ("incoming", c_uint64 * 8),
    ]


class Endpoint:
    """One end, for one thread at a time that receives, and one that sends.

    Attributes:
        send: sends a frame with its digest as far as the kernel takes it at once: ``send(number, frame, len(frame))``.
            It returns how many bytes the kernel took, or a number of errno, negative.
        wait: receives what has come, or comes soon: ``wait(sleep_ms, number)``. What has come stays here until
            :meth:`take`, also if a signal interrupts the caller. It returns how many bytes there are, with ``WHOLE`` if
            they are one small frame with the digest of that number; 0 at the end of the connection; a number of errno,
            negative: EAGAIN if nothing has come.
        look: the same for a thread that does not sleep, and keeps the interpreter's lock.
    """

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(BLOCK_BYTES)
        self._view = memoryview(self._memory).cast("B")
        self._endpoint = _Endpoint(addressof(self._memory), BLOCK_BYTES)
        address, core = addressof(self._endpoint), rpc()
        self._key = partial(core.phx_rpc_endpoint_key, address)
        self.send: Callable[[int, bytes, int], int] = partial(core.phx_rpc_write, address)
        self.wait: Callable[[int, int], int] = partial(core.phx_rpc_receive, address)
        self.look: Callable[[int, int], int] = partial(rpc(holding=True).phx_rpc_receive, address)

    def use(self, descriptor: int, session: Session) -> None:
        """Go by this connection from now on. What has come over an earlier one, and was not taken, is dropped."""
        self._endpoint.came = 0
        self._endpoint.descriptor = descriptor
        self._key(session.key, len(session.key), session.outgoing_person, session.incoming_person)

    def take(self, nbytes: int) -> bytes:
        """What has come, or its beginning; the rest of it is dropped."""
        data = bytes(self._view[:nbytes])
        self._endpoint.came = 0
        return data

    def has_come(self) -> bool:
        """Whether something has come and was not taken, because a signal interrupted the caller."""
        return bool(self._endpoint.came)
