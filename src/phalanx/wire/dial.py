"""The calling side: connect, prove the key, and read the listener's verdict. It blocks, for a limited time."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from phalanx.wire.key import Key
from phalanx.wire.proof import GREETING, GREETING_BYTES, NoProof, Response
from phalanx.wire.session import Session
from phalanx.wire.sockets import KeepAlive, connect


class NoAnswer(TimeoutError):
    """The listener's host has accepted the connection, but the listener says nothing: it is busy, or stopped."""


@dataclass(frozen=True, eq=False)
class Line:
    """A proven connection, from the caller's side."""

    sock: socket.socket
    session: Session

    def close(self) -> None:
        self.sock.close()


def dial(
    where: tuple[str, int],
    key: Key,
    role: str,
    claim: bytes,
    *,
    patience_s: float,
    keep_alive: KeepAlive,
    source: str = "",
) -> tuple[Line, bytes]:
    """Connect to a :class:`phalanx.wire.door.Door`, and return the proven connection and the verdict.

    Args:
        where: the address and the port.
        key, role, claim: see :class:`~phalanx.wire.proof.Response`.
        patience_s: how long connecting may take, and then the handshake as long again.
        keep_alive: when the listener counts as lost afterwards.
        source: the address to connect from; any of this host's by default.

    Raises:
        OSError: nothing listens there, or the connection was closed.
        TimeoutError: the host does not answer.
        NoAnswer: the host does, and the listener sends nothing.
        NoProof: the listener is not Phalanx.
        WrongKey: the listener is Phalanx, but proves another key.
    """
    sock = connect(where, patience_s, keep_alive, source)
    try:
        until = time.monotonic() + patience_s
        greeting = b""
        while len(greeting) < GREETING_BYTES:
            greeting += _receive(sock, GREETING_BYTES - len(greeting), until)
            # Another program may send less than a whole greeting and then wait, so what has come is checked already.
            if not greeting.startswith(GREETING[: len(greeting)]):
                raise NoProof
        response = Response(key, role, greeting, sock.getpeername()[:2], claim)
        sock.sendall(response.message)
        answer = b""
        while missing := response.missing(answer):
            answer += _receive(sock, missing, until)
        verdict = response.check(answer)
        return Line(sock, response.session()), verdict
    except BaseException:
        sock.close()
        raise


def _receive(sock: socket.socket, most: int, until: float) -> bytes:
    sock.settimeout(max(0.001, until - time.monotonic()))
    try:
        data = sock.recv(most)
    except TimeoutError as error:
        if error.errno is not None:
            raise  # the connection was lost
        raise NoAnswer("timed out") from error
    if not data:
        raise ConnectionResetError("the connection was closed")
    return data
