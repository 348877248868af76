"""A rank's side of the store: ``torch.distributed.Store`` in Python, over connections that have proven themselves.

torch calls it from C++ too, and from several threads at once (Gloo does, while it connects). So each call has a
connection of its own while it runs, and a ``get`` that waits delays no other call. The connections are kept and reused.

Prior art: torch's ``TCPStore``, whose semantics these are. It sends one request at a time for a whole process, trusts
every process that connects, and listens on every interface.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from phalanx.errors import InitializationError
from phalanx.store import requests
from phalanx.store.claim import KEEP_ALIVE, ROLE, Claim, Verdict
from phalanx.store.company import Company
from phalanx.store.gathering import BEGINS, GIVES_UP, HAS_ALL
from phalanx.store.server import StoreServer
from phalanx.system.threads import wait_awake
from phalanx.wire.dial import Line, dial
from phalanx.wire.framing import Malformed
from phalanx.wire.key import Key
from phalanx.wire.proof import NoProof, WrongKey
from phalanx.wire.session import TAG_BYTES

__all__ = ["Connections", "JobStore", "connect", "end_calls", "underlying"]

# How much longer than the timeout a rank waits for an answer, so that rank 0's answer LATE can arrive, at most and at
# least; and the least time that it waits for an answer that rank 0 gives at once.
MARGIN_S = 30.0
_LEAST_MARGIN_S = 10.0
LONGEST_WAIT_S = 1e8  # sockets accept no longer timeout
_PAUSE_S = 0.05
_Result = tuple[int, int, Sequence[bytes]]


def connect(
    where: tuple[str, int], key: Key, claim: Claim, patience_s: float, source: str = ""
) -> tuple[Line, Verdict]:
    """Connect to rank 0 and ask to join; return the connection and rank 0's verdict.

    Args:
        where: address and port.
        key: the job's key.
        claim: what this process says of itself.
        patience_s: how long connecting may take, in seconds, and then the handshake as long again.
        source: the address to connect from; any of this host's by default.

    Raises:
        OSError: nothing listens there, or the connection was closed.
        TimeoutError: the listener sends nothing.
        NoProof: the listener is not rank 0 of Phalanx.
        WrongKey: the listener is, but proves another key.
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
        first: the one with which this process joined.
        where: address and port of rank 0.
        key: the job's key.
        claim: what this process says of itself.
        source: the address to connect from; any of this host's by default.
        company: the ranks that this process looks at while it waits.
    """

    def __init__(
        self,
        first: Line,
        where: tuple[str, int],
        key: Key,
        claim: Claim,
        source: str = "",
        company: Company | None = None,
    ) -> None:
        self._where = where
        self._key = key
        self._claim = claim
        self._source = source
        self.company = company or Company()
        self._idle = [first]
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ended = False
        self._in_use: dict[int, Line] = {}  # by id: each call adds and removes its own, in one step of Python's
        self._last_answer: _Result | None = None  # LOST: no other follows it
        _all.add(self)

    def call(self, code: int, number: int, fields: Sequence[bytes], timeout_s: float | None) -> _Result:
        """Carry out a request on a connection that no other call uses meanwhile, and return the answer's parts.

        Raises:
            DistStoreError: rank 0 has gone.
        """
        message = requests.pack(code, number, fields)
        if self._last_answer is not None:
            return self._last_answer
        line = self._take(MARGIN_S if timeout_s is None else min(timeout_s, MARGIN_S))
        margin_s = 0.0 if timeout_s is None else _margin_s(code, timeout_s)
        self._in_use[id(line)] = line
        try:
            line.sock.settimeout(None if timeout_s is None else timeout_s + margin_s)
            with contextlib.suppress(ConnectionError):  # what rank 0 has said before it went can still be read
                line.sock.sendall(line.session.seal(message))
            self._await_answer(line, timeout_s, margin_s)
            data = bytearray()
            while True:
                length = requests.length_of(data)
                if length is not None and len(data) >= length + TAG_BYTES:
                    break
                # No more than this message: another one may follow it.
                end = requests.SHORTEST if length is None else length
                part = line.sock.recv(min(end + TAG_BYTES - len(data), 1 << 22))
                if not part:
                    raise ConnectionResetError("the connection was closed")
                data += part
            line.session.check(data, length)
            result = requests.unpack(data, length)
        except (OSError, Malformed) as error:
            line.close()
            self._lost(error)
        except BaseException:
            line.close()  # an answer may still be on its way
            raise
        finally:
            self._in_use.pop(id(line), None)
        with self._lock:
            if result[0] == requests.LOST:
                self._last_answer = result
            elif not self._ended:
                self._idle.append(line)
                return result
        line.close()
        return result

    def _await_answer(self, line: Line, timeout_s: float | None, margin_s: float) -> None:
        """Wait until an answer comes, and look meanwhile whether a rank is stopped.

        Raises:
            TimeoutError: none came in time, nor in the margin, which a rank 0 that is seen stopped does not get.
        """

        def has_come(slice_s: float) -> bool:
            if _readable(line.sock, slice_s):
                return True
            self.company.look()
            return False

        waited_s = timeout_s
        while not wait_awake(has_come, waited_s):
            if margin_s == 0.0 or self.company.rank_0_is_stopped():
                raise TimeoutError(f"no answer came for {timeout_s:.0f} s")
            timeout_s, waited_s, margin_s = (timeout_s or 0.0) + margin_s, margin_s, 0.0

    def _take(self, patience_s: float) -> Line:
        """A connection that no call uses: an idle one, or a new one, for which rank 0 has so many seconds to answer.

        Rank 0 may send a connection away that has not proven itself yet, when very many others come at the same time,
        so this is tried again for a while, unless nothing listens there any more.
        """
        with self._lock:
            if self._ended:
                raise DistStoreError("the store was closed: phalanx.close() was called, or the world was never opened")
            if self._idle:
                return self._idle.pop()
        claim = replace(self._claim, pid=os.getpid())
        until = time.monotonic() + MARGIN_S
        while True:
            try:
                line, verdict = connect(self._where, self._key, claim, patience_s, self._source)
                break
            except (ConnectionRefusedError, NoProof, WrongKey) as error:
                self._lost(error)
            except OSError as error:
                if time.monotonic() >= until or self.company.rank_0_is_stopped():
                    self._lost(error)
                time.sleep(_PAUSE_S)
        if verdict.kind != "welcome":
            line.close()
            raise DistStoreError(f"rank {claim.rank} was refused when it connected again: {verdict.reason}")
        return line

    def _lost(self, error: BaseException) -> NoReturn:
        why = "rank 0 has ended, or the network to it is cut"
        if isinstance(error, TimeoutError):
            stopped = self.company.find_stopped()
            is_rank_0 = stopped is not None and stopped.rank == 0
            why = str(stopped) if is_rank_0 else "rank 0 is stopped, or the network to it is cut"
        if isinstance(error, Malformed):
            why = "another process has changed what rank 0 sent"
        elif isinstance(error, (NoProof, WrongKey)):
            why = "rank 0 has ended, and another program listens there now"
        raise DistStoreError(
            f"rank {self._claim.rank} lost the store of rank 0 at {self._where[0]} port {self._where[1]} ({error}): "
            f"{why}; see what rank 0 printed"
        ) from error

    def end(self) -> None:
        """Close all connections; one that is in use is closed when its request has been answered."""
        with self._lock:
            self._ended = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def cut(self) -> None:
        """:meth:`end`, and end the requests that are under way, too: they raise that rank 0 is lost."""
        self.end()
        for line in list(self._in_use.values()):
            with contextlib.suppress(OSError):  # its request has ended meanwhile
                line.sock.shutdown(socket.SHUT_RDWR)

    def let_go(self) -> None:
        """In a forked child: close the parent's connections, which it still uses. The child makes its own on demand."""
        self._lock = threading.Lock()
        self._in_use = {}
        idle, self._idle = self._idle, []
        for line in idle:
            line.close()


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def end_calls() -> None:
    """End every request to rank 0's store of this process, which is about to end, and take no more.

    One whose connection has been taken in this very moment is not ended, and waits for its answer.
    """
    for connections in list(_all):
        connections.cut()


def _after_fork() -> None:
    for connections in list(_all):
        connections.let_go()


os.register_at_fork(after_in_child=_after_fork)


def _margin_s(code: int, timeout_s: float) -> float:
    if code in requests.WAITING:
        return min(MARGIN_S, max(_LEAST_MARGIN_S, timeout_s))
    return max(0.0, MARGIN_S - timeout_s)


def _readable(sock: socket.socket, patience_s: float) -> bool:
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))


class JobStore(Store):
    """The job's store, as torch takes it. Safe to use from several threads.

    Calls that wait do so for at most :attr:`timeout`, as in torch's stores; 0 means without limit.

    Args:
        peer: rank 0's own server, or the connections to it.
        timeout: how long ``get`` and ``wait`` wait.
    """

    timeout: timedelta  # torch's own property, which its stubs leave out

    def __init__(self, peer: StoreServer | Connections, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._peer = peer
        self.company = peer.company
        if isinstance(peer, StoreServer):
            weakref.finalize(self, peer.retire).atexit = False

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(requests.SET, 0, [key.encode(), _bytes(value)])

    def get(self, key: str) -> bytes:
        return self._wait_for(requests.READ, [key], self.timeout)[0]

    def add(self, key: str, value: int) -> int:
        return self._ask(requests.ADD, value, [key.encode()])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(requests.APPEND, 0, [key.encode(), _bytes(value)])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        given = [key.encode(), _bytes(expected_value), _bytes(desired_value)]
        return _checked(self._ask(requests.COMPARE_SET, 0, given)[1], 1)[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(requests.DELETE, 0, [key.encode()])[0])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(requests.CHECK, 0, [key.encode() for key in keys])[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for(requests.WAIT, keys, self.timeout if timeout is None else timeout)

    def num_keys(self) -> int:
        return self._ask(requests.COUNT, 0, [])[0]

    def list_keys(self) -> list[str]:
        return [key.decode(errors="replace") for key in self._ask(requests.LIST, 0, [])[1]]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._wait_for(requests.READ, keys, self.timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        fields = [field for key, value in zip(keys, values, strict=True) for field in (key.encode(), _bytes(value))]
        self._ask(requests.SET, 0, fields)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> JobStore:
        """The same store: it may be used from several threads as it is."""
        return self

    # Two methods are called from C++ by the names that they have there.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def wait_for_all(self, timeout_s: float) -> str:
        """Wait until every rank has joined; return the ranks that have not in time, for people, or an empty string.

        From then on this rank looks at those of its host that are next to it, until it has all that it needs of them.
        """
        code, _, fields = self._call(requests.EVERYBODY, _milliseconds(timeout_s), [], timeout_s)
        if code == requests.LATE:
            return _text(fields)
        try:
            claims = [Claim.decode(data) for data in fields]
        except NoProof:
            raise DistStoreError("the store has not said which ranks are here: is that rank 0 of this job?") from None
        self.company.meet(claims)
        return ""

    def meeting(self, begins: bool) -> None:
        """Say that this rank begins to exchange with the others what they need to work together, or has all of it.

        In between, all that the others ask of the store ends with InitializationError if this one goes. Ranks that have
        all that they need get it only where they wait.
        """
        if not begins:
            self.company.part()
        self._ask(requests.MEETING, BEGINS if begins else HAS_ALL, [])

    def give_up(self, error: InitializationError) -> None:
        """Say that this rank leaves the others because of the rank that the error names, which is their reason too."""
        about = [str(value).encode() for value in (error.rank, error.pid, error.host)]
        self._ask(requests.MEETING, GIVES_UP, [str(error).encode(), *about])

    def end(self) -> None:
        """Stop using the store. Rank 0's store answers until all other ranks have stopped too, or its process ends."""
        self.company.part()
        if isinstance(self._peer, StoreServer):
            self._peer.retire()
        else:
            self._peer.end()

    def _wait_for(self, code: int, keys: Sequence[str], timeout: timedelta) -> Sequence[bytes]:
        timeout_s, limit = timeout.total_seconds(), self._limit(timeout)
        answered, _, fields = self._call(code, _milliseconds(limit or 0.0), [key.encode() for key in keys], limit)
        if answered == requests.LATE:
            missing = ", ".join(field.decode(errors="replace") for field in fields[:8]) + (
                ", …" if len(fields) > 8 else ""
            )
            raise DistStoreError(f"wait timeout after {timeout_s:g} s, keys: {missing}")
        return _checked(fields, len(keys)) if code == requests.READ else fields

    @staticmethod
    def _limit(timeout: timedelta) -> float | None:
        """A timeout in seconds; None for one without limit."""
        timeout_s = timeout.total_seconds()
        return timeout_s if 0 < timeout_s < LONGEST_WAIT_S else None

    def _ask(self, code: int, number: int, fields: Sequence[bytes]) -> tuple[int, Sequence[bytes]]:
        _, result, said = self._call(code, number, fields, self._limit(self.timeout))
        return result, said

    def _call(self, code: int, number: int, fields: Sequence[bytes], timeout_s: float | None) -> _Result:
        """Carry out a request, and return its answer, DONE or LATE."""
        answer = self._peer.call(code, number, fields, timeout_s)
        if answer[0] == requests.LOST:
            raise _lost(answer[2])
        if answer[0] not in (requests.DONE, requests.LATE):
            raise DistStoreError(_text(answer[2]))
        return answer


def underlying(store: Store) -> Store:
    """The whole of which a store is a part, at any depth."""
    whole: Store = getattr(PrefixStore("", store), "_underlying_non_prefix_store")  # noqa: B009 - not in torch's stubs
    return whole


def _checked(fields: Sequence[bytes], count: int) -> Sequence[bytes]:
    """The values of an answer; without a key anybody may pose as rank 0, and send another number of them."""
    if len(fields) != count:
        raise DistStoreError(f"the store sent {len(fields)} values where {count} belong: is that rank 0 of this job?")
    return fields


def _lost(fields: Sequence[bytes]) -> InitializationError:
    """The error of an answer LOST."""
    if len(fields) == 4:
        with contextlib.suppress(ValueError):  # else that is not rank 0 of this job
            rank, pid, host = int(fields[1]), int(fields[2]), fields[3].decode()
            return InitializationError.of_rank(_text(fields), rank, pid, host)
    return InitializationError(_text(fields))


def _text(fields: Sequence[bytes]) -> str:
    """What the store says for people."""
    return fields[0].decode(errors="replace") if fields else "rank 0 gives no reason"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _milliseconds(timeout_s: float) -> int:
    return max(1, round(timeout_s * 1000)) if timeout_s > 0 else 0
