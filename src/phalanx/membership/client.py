"""A rank's side of rank 0's store: ``torch.distributed.Store`` in Python, over connections that have proven themselves.

torch calls it from C++ too, and from several threads at once. So each call has a connection of its own while it runs,
and a ``get`` that waits delays no other call. The connections are kept and reused. The semantics are those of torch's
``TCPStore``, which trusts every process that connects, and listens on every interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from phalanx.errors import InitializationError
from phalanx.membership.launcher_store import ENDED, EndedRank
from phalanx.membership.store_protocol import KEEP_ALIVE, ROLE, Claim, Code, Verdict, pack, unpack
from phalanx.membership.store_server import StoreServer
from phalanx.system.processes import state_text
from phalanx.system.threads import wait_awake
from phalanx.topology.place import Place
from phalanx.wire.dial import Line, dial
from phalanx.wire.framing import Malformed
from phalanx.wire.key import Key
from phalanx.wire.proof import NoProof, WrongKey
from phalanx.words import format_named

__all__ = ["Connections", "JobStore", "WaitTimeout", "connect", "ended_ranks", "kept_store", "peek", "underlying"]

# How long rank 0 may take, at least, for an answer that it gives at once; and to let another connection in.
_ANSWER_S = 30.0
_PAUSE_S = 0.05
_GIVING_UP_S = 3.0  # how long rank 0 that gives up may wait for the others to ask why
_LONGEST_WAIT_S = 1e8  # a longer timeout is none
_WAITING = (Code.READ, Code.WAIT)
_Answer = tuple[int, Sequence[bytes]]


class WaitTimeout(DistStoreError):
    """Keys have not come in time, although the store answers."""


def connect(
    where: tuple[str, int], key: Key, claim: Claim, patience_s: float, source: str = ""
) -> tuple[Line, Verdict]:
    """Connect to rank 0 and ask to join; return the connection and rank 0's verdict.

    The other arguments and the errors are those of :func:`~phalanx.wire.dial.dial`.
    """
    line, answer = dial(where, key, ROLE, claim.encode(), patience_s=patience_s, keep_alive=KEEP_ALIVE, source=source)
    try:
        return line, Verdict.decode(answer)
    except BaseException:
        line.close()
        raise


class Connections:
    """Connections to rank 0, one for each request that is under way.

    Args:
        first, verdict: that with which this process joined, and rank 0's answer.
        where, key, claim, source: see :func:`connect`.
    """

    def __init__(
        self, first: Line, verdict: Verdict, where: tuple[str, int], key: Key, claim: Claim, source: str = ""
    ) -> None:
        self.rank_0, self.where = verdict.rank_0, where
        self._key, self._claim, self._source = key, claim, source
        self._idle = [first]
        self._lock = threading.Lock()  # guards the list above and the flag below
        self._ended = False
        _all.add(self)

    def call(self, code: int, number: int, fields: Sequence[bytes], timeout_s: float | None) -> _Answer:
        """Carry out a request on a connection that no other call uses; return the answer's number and fields.

        Raises:
            WaitTimeout: a request that waits has waited for so long; a timeout of None is none.
            DistStoreError: rank 0 has gone, or has answered with this reason.
        """
        message = pack(code, number, fields)
        line = self._take(_ANSWER_S if timeout_s is None else min(timeout_s, _ANSWER_S))
        try:
            line.sock.settimeout(None if timeout_s is None else max(timeout_s, _ANSWER_S))
            with contextlib.suppress(ConnectionError):  # what rank 0 has said before it went can still be read
                line.sock.sendall(line.session.seal(message))
            if not self._has_come(line, code in _WAITING, timeout_s):
                line.close()
                if code in _WAITING and not self.rank_0.stopped_state():
                    raise WaitTimeout
                self._lost(TimeoutError(f"no answer came for {timeout_s:.0f} s"))
            answered, result, said = _receive(line)
        except (OSError, Malformed) as error:
            line.close()
            self._lost(error)
        except BaseException:
            line.close()  # an answer may still be on its way
            raise
        with self._lock:
            if not self._ended:
                self._idle.append(line)
        if self._ended:
            line.close()
        if answered != Code.DONE:
            raise DistStoreError(_text(said))
        return result, said

    def _has_come(self, line: Line, waits: bool, timeout_s: float | None) -> bool:
        """Wait until an answer comes; return whether one has in time."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(line.sock, select.POLLIN)

        def has_come(slice_s: float) -> bool:
            return bool(poll.poll(slice_s * 1000))

        if wait_awake(has_come, timeout_s):
            return True
        if waits or timeout_s is None or self.rank_0.stopped_state():
            return False
        return wait_awake(has_come, _ANSWER_S - timeout_s)  # rank 0 is busy

    def _take(self, patience_s: float) -> Line:
        """Return a connection that no call uses: an idle one, or a new one, for which rank 0 has so many seconds.

        Strangers that come in great numbers may have rank 0 send it away before it has proven itself, so it is tried
        again for a while.
        """
        with self._lock:
            if self._ended:
                raise DistStoreError("the store was closed: phalanx.close() was called, or the world was never opened")
            if self._idle:
                return self._idle.pop()
        claim = replace(self._claim, pid=os.getpid())
        until = time.monotonic() + _ANSWER_S
        while True:
            try:
                line, verdict = connect(self.where, self._key, claim, patience_s, self._source)
                break
            except (OSError, NoProof, WrongKey) as error:
                final = not isinstance(error, OSError) or isinstance(error, ConnectionRefusedError)
                if final or time.monotonic() >= until or self.rank_0.stopped_state():
                    self._lost(error)
                time.sleep(_PAUSE_S)
        if verdict.kind != "welcome":
            line.close()
            raise DistStoreError(f"rank {claim.rank} was refused when it connected again: {verdict.reason}")
        return line

    def _lost(self, error: BaseException) -> NoReturn:
        rank_0 = self.rank_0
        if state := rank_0.stopped_state():
            group = format_named("rank", range(self._claim.world_size))
            raise InitializationError.rank_stopped(0, rank_0.pid, rank_0.host, state_text(state), group) from error
        raise DistStoreError(
            f"rank {self._claim.rank} lost the store of rank 0 at {self.where[0]} port {self.where[1]} "
            f"({str(error) or type(error).__name__}): rank 0 has ended or is stopped, or the network to it is cut; see "
            f"what rank 0 printed"
        ) from error

    def end(self) -> None:
        """Close all connections; one that is in use is closed when its request has been answered."""
        with self._lock:
            self._ended = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def let_go(self) -> None:
        """In a forked child: close the parent's connections, which it still uses. The child makes its own on demand."""
        self._lock = threading.Lock()
        idle, self._idle = self._idle, []
        for line in idle:
            line.close()


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _after_fork() -> None:
    for connections in list(_all):
        connections.let_go()


os.register_at_fork(after_in_child=_after_fork)


def _receive(line: Line) -> tuple[int, int, list[bytes]]:
    """Return the answer to the only request that is under way on a connection."""
    data = bytearray()
    while part := line.sock.recv(1 << 16):
        data += part
        for message in line.session.take_messages(data):
            return unpack(message)
    raise ConnectionResetError("the connection was closed")


class JobStore(Store):
    """The job's store, as torch takes it. Safe to use from several threads.

    Calls that wait do so for at most :attr:`timeout`, as in torch's stores; 0 means without limit.

    Args:
        connections: those to rank 0.
        timeout: how long ``get`` and ``wait`` wait.
        server: rank 0's own store, which ends with this object; None on other ranks.
    """

    timeout: timedelta  # torch's own property, which its stubs leave out

    def __init__(self, connections: Connections, timeout: timedelta, server: StoreServer | None = None) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._server = server
        self.connections = connections
        if server is not None:
            weakref.finalize(self, server.retire).atexit = False

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Code.SET, 0, [key.encode(), _bytes(value)])

    def get(self, key: str) -> bytes:
        return self._wait_for(Code.READ, [key], self.timeout)[0]

    def add(self, key: str, value: int) -> int:
        return self._ask(Code.ADD, value, [key.encode()])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Code.APPEND, 0, [key.encode(), _bytes(value)])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        given = [key.encode(), _bytes(expected_value), _bytes(desired_value)]
        return self._ask(Code.COMPARE_SET, 0, given)[1][0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Code.DELETE, 0, [key.encode()])[0])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Code.CHECK, 0, [key.encode() for key in keys])[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for(Code.WAIT, keys, self.timeout if timeout is None else timeout)

    def num_keys(self) -> int:
        return self._ask(Code.COUNT)[0]

    def list_keys(self) -> list[str]:
        return [key.decode(errors="replace") for key in self._ask(Code.LIST)[1]]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._wait_for(Code.READ, keys, self.timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        fields = [field for key, value in zip(keys, values, strict=True) for field in (key.encode(), _bytes(value))]
        self._ask(Code.SET, 0, fields)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> JobStore:
        """The same store: it may be used from several threads as it is."""
        return self

    # Two methods are called from C++ by the names that they have there.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def describe_missing(self) -> str:
        """Name the ranks that have not joined, for people; the text is empty when all have.

        Raises:
            DistStoreError: rank 0 does not wait for them any more; the text is rank 0's.
        """
        return _text(self._ask(Code.MISSING)[1])

    def end(self) -> None:
        """Stop using the store. Rank 0's store answers until all other ranks have stopped too, or its process ends."""
        self.connections.end()
        if self._server is not None:
            self._server.retire()

    def give_up(self, why: str) -> None:
        """Stop using the store. Rank 0's tells those that wait for others to join why, for a limited time."""
        self.connections.end()
        if self._server is not None:
            self._server.given_up = why
            self._server.linger(time.monotonic() + _GIVING_UP_S)

    def _wait_for(self, code: int, keys: Sequence[str], timeout: timedelta) -> Sequence[bytes]:
        try:
            return self.connections.call(code, 0, [key.encode() for key in keys], _limit(timeout))[1]
        except WaitTimeout:
            missing = sorted(key for key in keys if not self.check([key]))
            named = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            raise WaitTimeout(f"wait timeout after {timeout.total_seconds():g} s, keys: {named}") from None

    def _ask(self, code: int, number: int = 0, fields: Sequence[bytes] = ()) -> _Answer:
        return self.connections.call(code, number, fields, _limit(self.timeout))


# -- any store -----------------------------------------------------------------------------------------


def kept_store(place: Place, timeout_s: float) -> Store:
    """Connect to the store that this process's launcher keeps (``Place.keeps_store``).

    Raises:
        InitializationError: it cannot be reached.
    """
    address, port = str(place.master_addr), int(place.master_port or 0)
    try:
        return TCPStore(address, port, place.world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise InitializationError(
            f"rank {place.rank} could not reach the store that {place.launcher} keeps at {address}:{port} "
            f"(MASTER_ADDR, MASTER_PORT): {error}"
        ) from error


def ended_ranks(store: Store) -> list[EndedRank]:
    """Return the ranks that have ended, in that order, if this store knows: that of ``phalanx run``, or rank 0's."""
    whole = underlying(store)
    return [EndedRank(*each) for each in json.loads(whole.get(ENDED))] if whole.check([ENDED]) else []


def underlying(store: Store) -> Store:
    """Return the whole of which a store is a part, at any depth."""
    whole: Store = getattr(PrefixStore("", store), "_underlying_non_prefix_store")  # noqa: B009 - not in torch's stubs
    return whole


def peek(store: Store, key: str) -> bytes | None:
    """Return the value of a key in any store, or None if it is not there.

    One request, which never waits. A ``get`` after a ``check`` would wait for a key that was deleted in between.
    """
    nothing = "\x00nothing"  # what no key has as its value
    value = store.compare_set(key, nothing, nothing)
    return None if value == nothing.encode() else value


def _limit(timeout: timedelta) -> float | None:
    """Return a timeout in seconds; None for one without limit."""
    timeout_s = timeout.total_seconds()
    return timeout_s if 0 < timeout_s < _LONGEST_WAIT_S else None


def _text(fields: Sequence[bytes]) -> str:
    """Return what the store says for people."""
    return b" ".join(fields).decode(errors="replace")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
