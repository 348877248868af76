"""One end of a TCP connection in the core (``native/csrc/rpc_socket.c``): a small message is one call there each way.

The call that receives watches the connection for a short time before it sleeps, because to sleep and to be woken takes
longer than a quick call does. So a caller that waits for an answer, and a thread that has just served a request, look
again and again for twice as long as such waits have taken lately: without the interpreter's lock, giving the core away
between two looks, only while this process has fewer connections than cores, and of the threads that serve one at a
time. The rules are those of shared memory (``rpc_receive.c``).
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, addressof, c_int32, c_uint32, c_uint64, c_void_p

from phalanx.native.core import rpc
from phalanx.wire.session import Session

__all__ = ["BLOCK_BYTES", "WHOLE", "Endpoint", "Watch"]

BLOCK_BYTES = 1 << 14
WHOLE = 1 << 32  # PHX_RPC_WHOLE
_UNCHECKED = (1 << 64) - 1


class Watch(Structure):
    """What the connections of one worker have in common (``struct phx_rpc_watch``).

    Attributes:
        connections: how many there are.
    """

    _fields_ = [("connections", c_uint32), ("watched", c_uint32), ("cores", c_uint32)]

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
        ("outgoing", c_uint64 * 8),
        ("incoming", c_uint64 * 8),
    ]


class Endpoint:
    """One end, for one thread at a time that receives, and one that sends.

    Args:
        watch: what it has in common with others.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._memory = ctypes.create_string_buffer(BLOCK_BYTES)
        self._view = memoryview(self._memory).cast("B")
        self._endpoint = _Endpoint(addressof(watch), addressof(self._memory), BLOCK_BYTES)
        self._address = addressof(self._endpoint)
        core = rpc()
        self._key, self._send, self._wait = core.phx_rpc_endpoint_key, core.phx_rpc_write, core.phx_rpc_receive
        self._look = rpc(holding=True).phx_rpc_receive

    def use(self, descriptor: int, session: Session) -> None:
        """Go by this connection from now on. What has come over an earlier one, and was not taken, is dropped."""
        self._session = session
        self._endpoint.came = 0
        self._endpoint.descriptor = descriptor
        self._key(self._address, session.key, len(session.key), session.outgoing_person, session.incoming_person)

    def send(self, frame: bytes) -> int:
        """Send a frame with its digest, as far as the kernel takes it at once.

        Returns:
            How many bytes it took, or a number of errno, negative. If it has not taken all, the caller sends the rest:
            the frame is not counted as one of the session.
        """
        nbytes = len(frame)
        sent: int = self._send(self._address, self._session.sent, frame, nbytes)
        return sent

    def receive(self, *, serves: bool, watches: bool, sleep_ms: int, whole: bool) -> int:
        """Receive what has come, or comes soon. It stays here until :meth:`take`, also if a signal interrupts the caller.

        Args:
            serves: the thread waits for requests, and leaves when :meth:`want` is called.
            watches: it watches the connection for a short time.
            sleep_ms: for how long it sleeps then, if nothing has come.
            whole: nothing that came before is incomplete.

        Returns:
            How many bytes there are, with ``WHOLE`` if they are one small message whose digest is right; 0 at the end
            of the connection; a number of errno, negative: EAGAIN if nothing has come.
        """
        receive = self._wait if watches or sleep_ms else self._look
        came: int = receive(self._address, serves, watches, sleep_ms, self._session.received if whole else _UNCHECKED)
        return came

    def take(self, nbytes: int) -> bytes:
        """What has come."""
        data = bytes(self._view[:nbytes])
        self._endpoint.came = 0
        return data

    def has_come(self) -> bool:
        """Whether something has come and was not taken, because a signal interrupted the caller."""
        return self._endpoint.came != 0

    def want(self, wanted: bool) -> None:
        """Have a thread that serves leave soon, because a caller is to read; until this is taken back."""
        self._endpoint.wanted = wanted
