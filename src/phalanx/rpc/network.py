"""The thread that accepts connections from other workers and reads all of them.

Who connects proves the key first (``wire/door.py``). Then it says who it is, and the agent answers whether it is
welcome.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from phalanx.rpc.links.socket import KEEP_ALIVE, SocketLink
from phalanx.wire.dial import Line, dial
from phalanx.wire.door import Arrival, Door
from phalanx.wire.key import Key
from phalanx.wire.sockets import listen
from phalanx.words import tell

__all__ = ["ROLE", "Network"]

ROLE = "rpc"


class Network:
    """This process's listening socket and its connections.

    Args:
        address: where to listen; an address of this host.
        key: what every worker of the job knows.
        welcome: takes each connection that has proven the key.
        tend: is called with the time, and says when it is to be called again; also after :meth:`wake`.
    """

    def __init__(
        self, address: str, key: Key, welcome: Callable[[Arrival], None], tend: Callable[[float], float]
    ) -> None:
        self._key = key
        self._tend = tend
        self._selector = selectors.DefaultSelector()
        listener = listen(address, 0)
        self.address, self.port = listener.getsockname()[:2]
        self._door = Door(listener, key, ROLE, KEEP_ALIVE, self._selector, welcome)
        self._orders: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="phalanx-rpc-network", daemon=True)

    def start(self) -> None:
        """Begin to accept and to read."""
        self._thread.start()

    def dial(self, address: str, port: int, claim: bytes, patience_s: float) -> tuple[Line, bytes]:
        """Connect to another worker; its answer to the claim comes with the connection.

        Raises:
            OSError, NoProof, WrongKey: see :func:`phalanx.wire.dial.dial`.
        """
        return dial((address, port), self._key, ROLE, claim, patience_s=patience_s, keep_alive=KEEP_ALIVE)

    def add(self, link: SocketLink) -> None:
        """Read a connection from now on."""

        def begin() -> None:
            link.begin()
            with contextlib.suppress(ValueError, KeyError, OSError):  # it may have ended meanwhile
                self._selector.register(link.sock, selectors.EVENT_READ, link.read)

        self._order(begin)

    def forget(self, link: SocketLink) -> None:
        """Read a connection no more. Its socket is closed afterwards, by the caller."""
        with contextlib.suppress(ValueError, KeyError):
            self._selector.unregister(link.sock)

    def wake(self) -> None:
        """Have ``tend`` called soon."""
        self._order(lambda: None)

    def stop(self) -> None:
        """Stop listening and reading. Call it from another thread; the connections are closed by their links."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._door.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _order(self, what: Callable[[], None]) -> None:
        self._orders.append(what)
        with contextlib.suppress(BlockingIOError):  # it is full, so the thread is awake
            self._wake_write.send(b"x")

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        while self._orders:
            self._orders.popleft()()

    def _run(self) -> None:
        while not self._stopping:
            now = time.monotonic()
            due = min(self._door.tend(now), self._tend(now))
            for key, _ in self._selector.select(None if due == math.inf else max(0.0, due - now)):
                try:
                    key.data()
                except Exception as error:  # the other connections go on
                    tell(f"warning: a connection of RPC failed: {error!r}")
