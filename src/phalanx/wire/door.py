"""The listening side: a socket that accepts connections, and those of them that have not proven the key yet.

An unproven connection is a stranger. It gets a challenge and ``PATIENCE_S`` seconds; at most ``LONGEST_PROOF`` of its
bytes are kept, and none is interpreted before its digest was found right (``proof.py``). When there are too many of
them, the oldest is sent away for each that comes. Nothing here waits: the user of a door waits with its own selector.
"""

from __future__ import annotations

import contextlib
import functools
import math
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from phalanx.wire.key import Key
from phalanx.wire.proof import LONGEST_PROOF, Address, Challenge, NoProof, PassedOn, Proven, WrongKey
from phalanx.wire.sockets import KeepAlive

# An honest process answers the challenge at once, unless its machine is very busy.
PATIENCE_S = 10.0
# For how long no connection is accepted after the process has run out of file descriptors.
DEAF_S = 0.2
# How many connections are accepted in a row before those accepted earlier are served.
_AT_ONCE = 64


class Acceptor:
    """Accept connections on a listening socket. The functions are called by whoever waits with the selector.

    Args:
        listener: the listening socket, which is closed with this.
        selector: the data of a registration is a function to call when its socket is ready.
        take: takes each socket, non-blocking, and the addresses of its two ends.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        take: Callable[[socket.socket, Address, Address], object],
    ) -> None:
        self._listener, self._selector, self._take = listener, selector, take
        self._deaf_until = math.inf
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def tend(self, now: float) -> float:
        """Listen again after a shortage of descriptors; return when to call this again, infinity for never."""
        if self._deaf_until <= now:
            self._deaf_until = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        return self._deaf_until

    def close(self) -> None:
        """Accept no further connection; the port is free at once."""
        self._deaf_until = math.inf
        with contextlib.suppress(KeyError, ValueError):  # it is closed, or deaf
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it has gone again
            except OSError:
                if self._listener.fileno() < 0:
                    return  # it was closed by what has come first
                # Most likely too many open files. The kernel queues connections until there is room again.
                self._selector.unregister(self._listener)
                self._deaf_until = monotonic() + DEAF_S
                return
            sock.setblocking(False)
            self._take(sock, address[:2], sock.getsockname()[:2])


@dataclass(frozen=True)
class Arrival:
    """A connection that has proven the key; ``rest`` came after its proof.

    Its socket, non-blocking and in no selector, belongs to the function that is called with this.
    """

    sock: socket.socket
    peer: str
    proven: Proven
    rest: bytearray

    def answer(self, verdict: bytes) -> None:
        """Send the verdict. A peer that has gone is noticed when receiving."""
        # Nothing else is under way to this peer, so the kernel takes all of it.
        with contextlib.suppress(OSError):
            self.sock.send(self.proven.answer(verdict))


@dataclass(eq=False)
class _Stranger:
    sock: socket.socket
    peer: str
    here: Address
    challenge: Challenge
    until: float
    data: bytearray = field(default_factory=bytearray)


class Door:
    """A listening socket, and the strangers that came in by it; for one thread at a time.

    Args:
        listener: the listening socket; the door closes it.
        key: the job's key.
        role: what kind of listener this is (``proof.py``).
        keep_alive: when an accepted connection counts as lost.
        selector: where the user waits; the data of a registration is a function to call when its socket is ready.
        admit: takes each connection that has proven the key.
        refused: takes each peer that was sent away, and why: :class:`NoProof`, :class:`WrongKey` or :class:`PassedOn`.
        most: how many strangers there may be at a time.
        announced: addresses and ports that callers dial and that are not this host's own, as behind a NAT.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        role: str,
        keep_alive: KeepAlive,
        selector: selectors.BaseSelector,
        admit: Callable[[Arrival], None],
        refused: Callable[[str, Exception], None] = lambda peer, why: None,
        most: int = 512,
        announced: Sequence[Address] = (),
    ) -> None:
        self._key, self._role, self._keep_alive = key, role, keep_alive
        self._selector, self._admit, self._refused = selector, admit, refused
        self._most, self._announced = most, announced
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._acceptor = Acceptor(listener, selector, self._challenge)

    def tend(self, now: float) -> float:
        """Send silent strangers away; return when to call this again, by ``time.monotonic``, infinity for never."""
        for stranger in [stranger for stranger in self._strangers if stranger.until <= now]:
            self._dismiss(stranger, NoProof())
        return min(self._acceptor.tend(now), *(stranger.until for stranger in self._strangers), math.inf)

    def stop_listening(self) -> None:
        """Accept no further connection; the port is free at once. Strangers may still prove themselves."""
        self._acceptor.close()

    def close(self) -> None:
        """Stop listening, and close the connections of all strangers."""
        self.stop_listening()
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.sock.close()

    def _challenge(self, sock: socket.socket, peer: Address, here: Address) -> None:
        if len(self._strangers) >= self._most:
            self._dismiss(next(iter(self._strangers)), NoProof())
        stranger = _Stranger(sock, str(peer[0]), here, Challenge(self._key, self._role), monotonic() + PATIENCE_S)
        with contextlib.suppress(OSError):  # it may have gone already, which is noticed when receiving
            self._keep_alive.apply(sock)
            sock.send(stranger.challenge.greeting)
        self._strangers[stranger] = None
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._hear, stranger))

    def _hear(self, stranger: _Stranger) -> None:
        if stranger not in self._strangers:
            return  # it was sent away after the selector had found its socket ready
        try:
            data = stranger.sock.recv(LONGEST_PROOF - len(stranger.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(stranger)
            stranger.sock.close()
            return
        stranger.data += data
        try:
            proven = stranger.challenge.check(stranger.data, (stranger.here, *self._announced))
        except (NoProof, WrongKey, PassedOn) as error:
            if isinstance(error, WrongKey):
                with contextlib.suppress(OSError):
                    stranger.sock.send(error.answer)
            self._dismiss(stranger, error)
            return
        if proven is not None:
            self._forget(stranger)
            self._admit(Arrival(stranger.sock, stranger.peer, proven, stranger.data[proven.nbytes :]))

    def _dismiss(self, stranger: _Stranger, why: Exception) -> None:
        self._forget(stranger)
        stranger.sock.close()
        self._refused(stranger.peer, why)

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger.sock)
