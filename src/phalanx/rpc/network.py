"""The thread that accepts connections from other workers.

A process that connects proves the key first (``wire/door.py``). Then it says who it is, and the agent answers whether
it is welcome. From then on the threads of ``links/readers.py`` read the connection.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import threading
import time
from collections.abc import Callable

from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.socket import KEEP_ALIVE
from phalanx.wire.dial import Line, dial
from phalanx.wire.door import Arrival, Door
from phalanx.wire.key import Key
from phalanx.wire.sockets import listen
from phalanx.words import tell

__all__ = ["ROLE", "Network"]

ROLE = "rpc"


class Network:
    """This process's listening socket, and the threads that read its connections.

    Args:
        address: where to listen; an address of this host.
        key: what every worker of the job knows.
        welcome: takes each connection that has proven the key.
        tend: is called with the time, and says when it is to be called again; also after :meth:`wake`.

    Attributes:
        address, port: where it listens.
        readers: the threads that read the connections.
    """

    def __init__(
        self, address: str, key: Key, welcome: Callable[[Arrival], None], tend: Callable[[float], float]
    ) -> None:
        self._key = key
        self._tend = tend
        self._selector = selectors.DefaultSelector()
        listener = listen(address, 0)
        self.address, self.port = listener.getsockname()[:2]
        self.readers = Readers()
        self._door = Door(listener, key, ROLE, KEEP_ALIVE, self._selector, welcome)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._lock = threading.Lock()  # held for ringing it, so that nobody rings it when it has been closed
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="phalanx-rpc-network", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def dial(self, address: str, port: int, claim: bytes, patience_s: float) -> tuple[Line, bytes]:
        """Connect to another worker; its answer to the claim comes with the connection.

        Raises:
            OSError, NoProof, WrongKey: see :func:`phalanx.wire.dial.dial`.
        """
        return dial((address, port), self._key, ROLE, claim, patience_s=patience_s, keep_alive=KEEP_ALIVE)

    def hear(self, arrival: Arrival, nbytes: int, heard: Callable[[], None]) -> None:
        """Receive what a caller says next, before its connection is read as others are. Call it from ``welcome``.

        Args:
            arrival: the connection; what comes is added to its ``rest``.
            nbytes: how much is to come.
            heard: is called on the network's thread when that has come, or the caller has gone.
        """

        def hear() -> None:
            with contextlib.suppress(BlockingIOError):
                try:
                    data = arrival.sock.recv(max(0, nbytes - len(arrival.rest)))
                except ConnectionError:
                    data = b""
                arrival.rest.extend(data)
                if not data or len(arrival.rest) >= nbytes:
                    self._selector.unregister(arrival.sock)
                    heard()

        self._selector.register(arrival.sock, selectors.EVENT_READ, hear)

    def wake(self) -> None:
        """Have ``tend`` called soon. Any thread may call it."""
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """Stop listening and reading. Call it from another thread; the connections are closed by their links."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self.readers.close()
        self._door.close()
        self._selector.close()
        with self._lock:
            bell, self._bell = self._bell, -1
        os.close(bell)

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _run(self) -> None:
        while not self._stopping:
            now = time.monotonic()
            due = min(self._door.tend(now), self._tend(now))
            for key, _ in self._selector.select(None if due == math.inf else max(0.0, due - now)):
                try:
                    key.data()
                except Exception as error:  # the other connections go on
                    tell(f"warning: a connection of RPC failed: {error!r}")
