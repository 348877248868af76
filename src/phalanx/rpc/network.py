"""The thread that accepts connections from other workers.

A process that connects proves the key first (``wire/door.py``). Then it says who it is, and the agent answers whether
it is welcome. From then on the threads of ``links/readers.py`` read the connection.

If this worker encrypts, the claim and the answer also carry the public keys of the two ends (``wire/encryption.py``),
each in ``exchange``. A worker that encrypts and one that does not refuse each other.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.socket import KEEP_ALIVE
from phalanx.system.foreign_values import read_json
from phalanx.system.threads import start
from phalanx.wire.dial import Line, dial
from phalanx.wire.door import Arrival, Door
from phalanx.wire.framing import Malformed
from phalanx.wire.key import Key
from phalanx.wire.session import Session
from phalanx.wire.sockets import listen
from phalanx.words import tell

__all__ = ["ROLE", "EncryptionMismatch", "Network", "answer_of"]

ROLE = "rpc"


class EncryptionMismatch(InitializationError):
    """One of two workers encrypts what goes between them and the other does not, so they do not talk to each other.

    Nothing of a call was sent. All workers of a job have to be started alike.

    Example:
        this worker encrypts what it sends over TCP, and worker1 does not, so nothing was sent to it. Set
        rpc.init(encrypt=...) or PHALANX_RPC_ENCRYPT alike for all workers

    What to do:
        Give every worker the same ``rpc.init(encrypt=...)``, or set PHALANX_RPC_ENCRYPT alike on all hosts.
    """

    def __init__(self, other: str, *, other_encrypts: bool) -> None:
        own, theirs = ("does not", "encrypts") if other_encrypts else ("encrypts", "does not")
        super().__init__(
            f"this worker {own} what it sends over TCP, and {other} {theirs}, so nothing was sent to it. Set "
            f"rpc.init(encrypt=...) or {settings.RPC_ENCRYPT} alike for all workers"
        )


class Network:
    """This process's listening socket, and the threads that read its connections.

    Args:
        address: where to listen; an address of this host.
        key: what every worker of the job knows.
        welcome: takes each connection that has proven the key.
        tend: is called with the time, and says when it is to be called again; also after :meth:`wake`.
        encrypt: encrypt what is sent.

    Attributes:
        address, port: where it listens.
        readers: the threads that read the connections.
    """

    def __init__(
        self,
        address: str,
        key: Key,
        welcome: Callable[[Arrival], None],
        tend: Callable[[float], float],
        *,
        encrypt: bool = False,
    ) -> None:
        self._key = key
        self._encrypt = encrypt
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
        start(self._thread)

    def ask(self, address: str, port: int, question: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """What another worker answers to a question, which is no secret, on a connection of its own.

        Raises:
            OSError, NoProof, WrongKey: see :func:`phalanx.wire.dial.dial`.
        """
        line, said = self._dial(address, port, question, patience_s)
        line.close()
        return said

    def dial(
        self, address: str, port: int, claim: dict[str, Any], patience_s: float, who: str
    ) -> tuple[Line, dict[str, Any]]:
        """Connect to another worker; its answer to the claim comes with the connection.

        Args:
            address, port: where it listens.
            claim: what this worker says.
            patience_s: how long connecting may take, in seconds, and then the handshake as long again.
            who: the other worker, for errors.

        Raises:
            OSError, NoProof, WrongKey: see :func:`phalanx.wire.dial.dial`.
            EncryptionMismatch: one of the two encrypts, and the other does not.
        """
        if not self._encrypt:
            line, said = self._dial(address, port, claim, patience_s)
            if said.get("encrypts"):
                line.close()
                raise EncryptionMismatch(who, other_encrypts=True)
            return line, said
        from phalanx.wire.encryption import Exchange

        exchange = Exchange()
        line, said = self._dial(address, port, {**claim, "exchange": exchange.public}, patience_s)
        try:
            if said.get("encrypts") is False:
                raise EncryptionMismatch(who, other_encrypts=False)
            if "refused" in said:  # nothing follows that could be encrypted
                return line, said
            return Line(line.sock, exchange.session(line.session, said.get("exchange"), is_listener=False)), said
        except Malformed as error:
            line.close()
            raise ConnectionAbortedError(f"it has answered with {error}") from error
        except BaseException:
            line.close()
            raise

    def _dial(self, address: str, port: int, claim: dict[str, Any], patience_s: float) -> tuple[Line, dict[str, Any]]:
        proof = json.dumps(claim).encode()
        line, said = dial((address, port), self._key, ROLE, proof, patience_s=patience_s, keep_alive=KEEP_ALIVE)
        try:
            return line, answer_of(said)
        except ConnectionAbortedError:
            line.close()
            raise

    def session(self, arrival: Arrival, claim: dict[str, Any]) -> tuple[Session, dict[str, Any]] | None:
        """What follows on the connection of a caller, and what the answer to its claim must have beside the rest.

        None if one of the two encrypts and the other does not: then the caller has been told, and sent away.

        Raises:
            ValueError: what the caller has said of encryption makes no sense.
        """
        session = arrival.proven.session()
        if ("exchange" in claim) != self._encrypt:
            arrival.answer(json.dumps({"encrypts": self._encrypt}).encode())
            arrival.sock.close()
            return None
        if not self._encrypt:
            return session, {}
        from phalanx.wire.encryption import Exchange

        exchange = Exchange()
        try:
            return exchange.session(session, claim["exchange"], is_listener=True), {"exchange": exchange.public}
        except Malformed as error:
            raise ValueError(str(error)) from error

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


def answer_of(said: bytes) -> dict[str, Any]:
    """What a worker has answered to a claim.

    Raises:
        ConnectionAbortedError: a worker would not have answered this. Somebody on the way has changed the answer,
            or the claim before it.
    """
    try:
        values = read_json(said)
        if isinstance(values, dict):
            return values
        raise ValueError("a worker answers with an object")
    except ValueError as error:  # the answer to a claim that is not the one that was sent is empty
        raise ConnectionAbortedError("somebody on the way has changed what this worker said") from error
