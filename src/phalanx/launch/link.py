"""The link between the supervisor and one agent: its messages, and how it comes about.

To an agent of its own host the supervisor has a socket pair, and nothing else is proven. For all others it listens
(``open_door``), each agent dials (``join``), and both prove the job's key (``wire/proof.py``) before a byte counts as a
message. The key and the addresses reach agents by standard input, or in the environment that MPI's launcher hands on.
Messages are not encrypted, like MPI's traffic.

A message is a frame (``wire/framing.py``) of a kind and bytes. Two kinds carry what a rank prints and one what it
reads, each behind the rank's number; the last carries an order or an event (``protocol.py``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import signal
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.launch.protocol import Event, Order, encode
from phalanx.wire.framing import PREFIX_BYTES, Malformed, end_of_frame, frame
from phalanx.wire.session import TAG_BYTES, Session
from phalanx.wire.sockets import KeepAlive, listen

if TYPE_CHECKING:
    from phalanx.wire.door import Door
    from phalanx.wire.key import Key

__all__ = [
    "ERR",
    "IN",
    "MESSAGE",
    "OUT",
    "ROLE",
    "Link",
    "Lost",
    "dial_address",
    "door_at",
    "join",
    "link_pair",
    "open_door",
    "split_rank",
]

ROLE = "launcher"
OUT, ERR, IN, MESSAGE = b"o", b"e", b"i", b"m"
_RANK_BYTES = 4
# How many agents may be joining at the same time.
_MOST_STRANGERS = 1024
# A link that is cut counts as lost within some 4 s: the supervisor sends a ping every second, which has to be
# acknowledged within three. An agent sends little: after a second of silence its kernel sends probes, one a second.
_KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=3, unacknowledged_s=3)
# What the kernel says of a connection whose other host does not answer any more.
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class Lost(Exception):
    """The connection has ended; ``silent``: the other host does not answer, so not only the process there has ended."""

    def __init__(self, *, silent: bool = False) -> None:
        super().__init__()
        self.silent = silent


class Link:
    """One connection: frames out, frames in, and no call that waits.

    Args:
        sock: the connected socket, non-blocking from here on.
        session: the digests of the messages; None for a socket pair.
        received: what has been received on it already.
    """

    def __init__(self, sock: socket.socket, session: Session | None, received: bytes | bytearray = b"") -> None:
        sock.setblocking(False)
        self._socket = sock
        self._session = session
        #: The other side's address; empty of a socket pair. A connection may be cut as soon as it is there.
        self.peer = ""
        if session is not None:
            try:
                self.peer = str(sock.getpeername()[0])
            except OSError:
                self.peer = "?"
        self._tag_bytes = TAG_BYTES if session is not None else 0
        self._in = bytearray(received)
        self._out = bytearray()
        self._ended = self._silent = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def waiting(self) -> int:
        """Count the bytes that the network has not taken yet; call :meth:`flush` when it can be written to."""
        return len(self._out)

    def send(self, message: Order | Event) -> None:
        """Send an order or an event, at once as far as the network takes it."""
        self._send(frame(MESSAGE, encode(message)))

    def send_block(self, kind: bytes, rank: int, data: bytes) -> None:
        """Send bytes that a rank has written, or is to read."""
        self._send(frame(kind, rank.to_bytes(_RANK_BYTES, "big"), data))

    def _send(self, framed: bytes) -> None:
        self._out += framed if self._session is None else self._session.seal(framed)
        self.flush()

    def flush(self) -> None:
        """Send the bytes that wait. A receiver that has gone is noticed by :meth:`receive`, not here."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._silent |= error.errno in _SILENT  # the kernel says so only once
            self._out.clear()

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Return the whole frames that have come since the last call, in order, each as kind and bytes.

        Raises:
            Lost: nothing more will come, and everything that came has been returned.
        """
        frames: list[tuple[bytes, bytes]] = []
        try:
            data = b"" if self._ended else self._socket.recv(1 << 17)
            self._ended = not data
            self._in += data
        except BlockingIOError:
            pass
        except OSError as error:
            self._silent |= error.errno in _SILENT
            self._ended = True
        try:
            while (end := end_of_frame(self._in, shortest=1)) is not None and len(self._in) >= end + self._tag_bytes:
                if self._session is not None:
                    self._session.check(self._in, end)
                content = bytes(self._in[PREFIX_BYTES:end])
                frames.append((content[:1], content[1:]))
                del self._in[: end + self._tag_bytes]
        except Malformed:
            self._ended = True  # nothing that comes after it can be read
            self._in.clear()
        if self._ended and not frames:
            raise Lost(silent=self._silent)
        return frames

    def continue_when_called(self) -> None:
        """Have the kernel continue this process, if somebody has stopped it, when anything comes, or the end."""
        fcntl.fcntl(self._socket, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._socket, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(self._socket, fcntl.F_SETFL, fcntl.fcntl(self._socket, fcntl.F_GETFL) | os.O_ASYNC)

    def finish(self, timeout_s: float) -> None:
        """Send the bytes that wait, for at most ``timeout_s`` seconds, and close."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(timeout_s)
            self._socket.sendall(self._out)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def split_rank(data: bytes) -> tuple[int, bytes]:
    """Part a block into the rank and its bytes."""
    return int.from_bytes(data[:_RANK_BYTES], "big"), data[_RANK_BYTES:]


def link_pair() -> tuple[Link, Link]:
    """Make a link between processes of one host: the supervisor's end and its agent's."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Link(mine, None), Link(theirs, None)


def open_door(
    addresses: Sequence[str], selector: selectors.BaseSelector, admit: Callable[[Link], None], secret: str = ""
) -> tuple[Door, str]:
    """Listen for agents: the door, and the invitation that :func:`join` needs.

    Args:
        addresses: those of this host that agents may connect to.
        selector: where the caller waits; see :class:`Door`.
        admit: takes the connection of each process that has proven the key.
        secret: the key; by default a new one.

    Raises:
        OSError: the address is not this host's.
    """
    # Not imported at the top, as in join(): a job on one host needs no network.
    from phalanx.system.interfaces import listening_address
    from phalanx.wire.key import Key, new_key

    secret = secret or new_key()
    listener = listen(listening_address(addresses), 0)
    invitation = f"{','.join(addresses)}:{listener.getsockname()[1]}:{secret}"
    return door_at(listener, Key(secret.encode(), "phalanx run"), selector, admit), invitation


def door_at(
    listener: socket.socket,
    key: Key,
    selector: selectors.BaseSelector,
    admit: Callable[[Link], None],
    refused: Callable[[str, Exception], None] = lambda peer, why: None,
) -> Door:
    """Admit agents that prove the key at a listening socket; ``refused`` is as of :class:`Door`."""
    from phalanx.wire.door import Arrival, Door

    def welcome(arrival: Arrival) -> None:
        arrival.answer(b"")
        admit(Link(arrival.sock, arrival.proven.session(), arrival.rest))

    return Door(listener, key, ROLE, _KEEP_ALIVE, selector, welcome, refused, most=_MOST_STRANGERS)


def join(invitation: str, patience_s: float = 20.0) -> Link:
    """Connect to the launcher's door, at its first address that answers, and prove to belong to the job.

    Args:
        invitation: as :func:`open_door` has made it.
        patience_s: how long connecting to an address may take, in seconds, and then the handshake as long again.

    Raises:
        OSError: nothing listens there, the launcher has ended, or what listens there does not know the job's key.
    """
    from phalanx.wire.key import Key
    from phalanx.wire.proof import NoProof, WrongKey

    addresses, port, secret = invitation.rsplit(":", 2)
    key = Key(secret.encode(), "phalanx run")
    why = OSError("there is no address")
    for address in addresses.split(","):
        try:
            return dial_address(address, int(port), key, patience_s)
        except ConnectionResetError:
            why = ConnectionRefusedError("the connection was closed: phalanx run has ended")
        except (NoProof, WrongKey):
            why = ConnectionRefusedError("what answers there does not know the job's key")
        except OSError as error:
            why = error
    raise why


def dial_address(address: str, port: int, key: Key, patience_s: float) -> Link:
    """Connect to the supervisor's door, and prove the key.

    Raises:
        OSError: as of :func:`phalanx.wire.dial.dial`.
        NoProof: what listens there is not Phalanx.
        WrongKey: it proves another key.
    """
    from phalanx.wire.dial import dial

    line, _ = dial((address, port), key, ROLE, b"", patience_s=patience_s, keep_alive=_KEEP_ALIVE)
    return Link(line.sock, line.session)
