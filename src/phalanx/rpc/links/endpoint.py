"""One end of a TCP connection in the core (``native/csrc/rpc_socket.c``): a small message is one call there each way.

The call that receives watches the connection for a short time before it sleeps, because to sleep and to be woken takes
longer than a quick call does. So a caller that waits for an answer, and a thread that has just served a request, look
again and again for twice as long as such waits have taken lately: without the interpreter's lock, giving the core away
between two looks, only while this process has fewer connections than cores, and of the threads that serve one at a
time. These are the rules of shared memory (``rpc_receive.c``). TCP has one more: if a thread that gave its core away
got it back late, somebody else needs the core, and all threads of the process sleep at once for a while.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, addressof, c_int32, c_uint32, c_uint64, c_void_p
from functools import partial

from phalanx.native.core import rpc
from phalanx.wire.session import Session

__all__ = ["BLOCK_BYTES", "UNCHECKED", "WHOLE", "Endpoint", "Watch"]

BLOCK_BYTES = 1 << 14
WHOLE = 1 << 32  # PHX_RPC_WHOLE
UNCHECKED = (1 << 64) - 1  # in the place of a number: what has come before is incomplete, so this is no message


class Watch(Structure):
    """What the connections of one worker have in common (``struct phx_rpc_watch``).

    Attributes:
        connections: how many there are.
    """

    _fields_ = [
        ("connections", c_uint32),
        ("watched", c_uint32),
        ("cores", c_uint32),
        ("unused", c_uint32),
        ("busy_until_ns", c_uint64),
    ]

    connections: int

    def __init__(self) -> None:
        super().__init__(cores=rpc().phx_rpc_cores())


class _Endpoint(Structure):
    """``struct phx_rpc_endpoint``."""

    _fields_ = [
        ("watch", c_void_p),
        ("data", c_void_p),
        ("size", c_uint32),
        ("came", c_uint32),
        ("descriptor", c_int32),
        ("usual_ns", c_uint32 * 2),
        ("wanted", c_uint32),
        ("since_ns", c_uint64),
        ("outgoing", c_uint64 * 8),
        ("incoming", c_uint64 * 8),
    ]


class Endpoint:
    """One end, for one thread at a time that receives, and one that sends.

    Args:
        watch: what it has in common with others.

    Attributes:
        send: sends a frame with its digest as far as the kernel takes it at once: ``send(number, frame, len(frame))``.
            It returns how many bytes the kernel took, or a number of errno, negative.
        wait: receives what has come, or comes soon: ``wait(serves, watches, sleep_ms, number)``. If nothing has come,
            the thread may watch the connection for a short time and then sleep; one that waits for requests
            (``serves``) leaves when :meth:`want` is called. What has come stays here until :meth:`take`, also if a
            signal interrupts the caller. It returns how many bytes there are, with ``WHOLE`` if they are one small
            frame with the digest of that number; 0 at the end of the connection; a number of errno, negative: EAGAIN
            if nothing has come.
        look: the same for a thread that does neither, and keeps the interpreter's lock.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._memory = ctypes.create_string_buffer(BLOCK_BYTES)
        self._view = memoryview(self._memory).cast("B")
        self._endpoint = _Endpoint(addressof(watch), addressof(self._memory), BLOCK_BYTES)
        address, core = addressof(self._endpoint), rpc()
        self._key = partial(core.phx_rpc_endpoint_key, address)
        self.send: Callable[[int, bytes, int], int] = partial(core.phx_rpc_write, address)
        self.wait: Callable[[bool, bool, int, int], int] = partial(core.phx_rpc_receive, address)
        self.look: Callable[[bool, bool, int, int], int] = partial(rpc(holding=True).phx_rpc_receive, address)

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

    def want(self, wanted: bool) -> None:
        """Have a thread that serves leave soon, because a caller is to read; until this is taken back."""
        self._endpoint.wanted = wanted
