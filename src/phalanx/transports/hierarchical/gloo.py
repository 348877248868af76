"""Gloo, between hosts and for what Phalanx leaves to torch: it comes with torch, and needs no setup.

It neither authenticates nor encrypts. ``lazy_gloo`` makes a group, ``GlooOnDemand`` makes it at its first use, and
``GlooEngine`` moves bytes over one for the other files of this room.

What Gloo does, and what follows:

- It writes the address of a rank into the store when the group is made. Another rank reads it when they first have
  something to exchange. So a rank may delete its own address when it ends its side. Who wants to connect then waits for
  the address, as for a rank that has not come.
- It ends the process when a rank is sent more than the memory holds that waits there. So sizes are compared first.
- It cannot be asked whether a transfer is done. A wait that times out closes all connections, here and at their other
  ends; that is how :meth:`GlooEngine.abort` ends the waits of other ranks.
- When a connection ends, waits end, but not those for queued sends, nor those for a message of which a part has come.
  So this thread waits for short receives alone. A thread that may be left behind waits for everything else.
- The first transfer between two ranks connects them, and waits for that. It has a thread of its own.

===========  ===================================  =============================  =====================================
field        writer                               readers                        guard
===========  ===================================  =============================  =====================================
_connecting  threads that connect                 abort, threads that connect    _connects
_aborted     abort, once                          all                            _connects for those that connect; for
                                                                                 others none: it only becomes true
_connected   threads that connect, who closes     all                            none: each change is one step
===========  ===================================  =============================  =====================================
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from queue import Empty
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.autograd import profiler

from phalanx.errors import BackendError, ClosedError
from phalanx.system.interfaces import LOOPBACK, chosen_interface, outward_address
from phalanx.system.threads import AwakeClock, TimedQueue, ended_early, start, within

__all__ = [
    "SHORT_BYTES",
    "AttachedGloo",
    "GlooEngine",
    "GlooOnDemand",
    "PeerAbsent",
    "Transfer",
    "TransferFailed",
    "TransferLate",
    "lazy_gloo",
]

# For this many times the timeout Gloo waits for a rank that should connect to this one (its ``Pair::waitUntil``).
CONNECT_FACTOR = 5
_FORGETTING_S = 0.7  # how long the store may take to delete an address; where it can be reached, it does so at once
# Up to so many bytes a message comes in one piece, or very few, so a wait for it does not begin in the middle of it.
SHORT_BYTES = 40 * 1024
_UNLIMITED = timedelta(days=365)

_T = TypeVar("_T")
_LOOK_S = 0.1
_CLOSING_S = 1.0
_FLUSHED_S = 2.0  # how long a rank that leaves waits until its last frames are on the wire
# How long an abort waits for connections that are being made. The other rank makes them at once if it comes to the same
# call, and not at all once it knows that the group is broken, which it learns in milliseconds.
_CONNECTING_S = 0.7
_SOON = timedelta(milliseconds=1)
_CONNECT_TAG = 3
_NEVER_TAG = 1 << 30  # nothing is sent with it


class AttachedGloo(ProcessGroupGloo):
    """Gloo that passes a new timeout on: torch's ``_set_pg_timeout`` gives it only to the backends that torch knows.

    Attributes:
        on_timeout: returns what is called with the new timeout, or None; set once, before the group is used.
    """

    on_timeout: Callable[[], Callable[[timedelta], None] | None] = staticmethod(lambda: None)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        if (tell := self.on_timeout()) is not None:
            tell(timeout)


def lazy_gloo(store: Store, rank: int, size: int, timeout: timedelta, *, one_host: bool) -> AttachedGloo:
    """A Gloo group that listens on one address and connects when it is used.

    Args:
        store: where its ranks exchange addresses.
        rank, size: this process's place in the group.
        timeout: for connecting and for every operation.
        one_host: listen on loopback, which other hosts cannot reach. Otherwise listen on the interface that
            GLOO_SOCKET_IFNAME or PHALANX_INTERFACE names, or on the address by which others reach this host.
    """
    options = ProcessGroupGloo._Options()
    # The connections take over the timeout that holds when the group is made.
    options._timeout = max(timeout / CONNECT_FACTOR, timedelta(milliseconds=1))  # 0 would be without limit
    if one_host:
        device = ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=True)
    elif named := os.environ.get("GLOO_SOCKET_IFNAME"):
        # torch reads the variable only where it makes the group's options itself; it may name several.
        device = ProcessGroupGloo.create_device(interface=named.split(",")[0], lazy_init=True)
    elif (chosen := chosen_interface()) is not None:
        device = ProcessGroupGloo.create_device(interface=chosen[0], lazy_init=True)
    else:
        # Not Gloo's default, the address that the host's name resolves to: that may be loopback.
        device = ProcessGroupGloo.create_device(hostname=outward_address(), lazy_init=True)
    options._devices = [device]
    gloo = AttachedGloo(store, rank, size, options)
    gloo._set_default_timeout(timeout)
    return gloo


class GlooOnDemand:
    """A Gloo group that is made when it is first used: until then this process has none of its ports and threads.

    ``made``, ``timeout`` and whether it has ended are written under a lock, which a signal handler can take again. They
    are also read without it, because each is one reference that Python reads whole.

    Args:
        make: makes it, given its timeout; every rank of the group finds the others in the same place.
        timeout: for connecting and for every operation.
        addresses: the part of the store in which its ranks find each other, and nothing else is; None if there is no
            need to delete anything there.
        own: the rank of which the address is deleted when the group ends, if there are ``addresses``.

    Attributes:
        made: the Gloo group, once it has been used, until it is released.
        timeout: the one that holds now.
        on_timeout: called with the new timeout if somebody changes Gloo's; set once, before the group is used.
    """

    def __init__(
        self,
        make: Callable[[timedelta], AttachedGloo],
        timeout: timedelta,
        addresses: Store | None = None,
        own: int | None = None,
    ) -> None:
        self._make = make
        self._addresses, self._own = addresses, own
        self._ended = False
        self._lock = threading.RLock()
        self.made: AttachedGloo | None = None
        self.timeout = timeout
        self.on_timeout: Callable[[timedelta], None] | None = None

    def get(self) -> AttachedGloo:
        """The Gloo group, made now if this is its first use. It waits for no other rank.

        Raises:
            ClosedError: its process group was destroyed or aborted.
        """
        with self._lock:
            if self._ended:
                raise ClosedError("a process group was used after it had been destroyed or aborted")
            if self.made is None:
                self.made = self._make(self.timeout)
                # Weakly: a Gloo group that lives until garbage is collected has threads when the interpreter ends, and
                # one that then asks for the interpreter aborts the process.
                self.made.on_timeout = weakref.WeakMethod(self._changed)
            return self.made

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of operations that start from now on; ``on_timeout`` is not called."""
        with self._lock:
            self.timeout = timeout
            if self.made is not None:
                ProcessGroupGloo._set_default_timeout(self.made, timeout)

    def shutdown(self) -> None:
        """End it if it was made, and never make it."""
        with self._lock:
            self._ended = True
            if self.made is not None:
                self.made.shutdown()
                own, addresses, self._own = self._own, self._addresses, None
                if own is not None and addresses is not None:
                    # It listens on one device, which Gloo counts from 0. The store may have gone, or be out of reach.
                    with contextlib.suppress(RuntimeError, TimeoutError):
                        within(_FORGETTING_S, lambda: addresses.delete_key(f"0/{own}"))

    def release(self) -> None:
        """:meth:`shutdown`, and give back its connections and threads now.

        Otherwise they wait for the last reference, which may be an error's traceback, until the interpreter ends.
        """
        with self._lock:
            self.shutdown()
            self.made = None

    def abort(self) -> None:
        """Abort it if it was made, and never make it."""
        with self._lock:
            self._ended = True
            if self.made is not None:
                self.made.abort()

    def _changed(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self.on_timeout is not None:
            self.on_timeout(timeout)


class TransferFailed(Exception):
    """The rank at the other end of a transfer is gone, or the connection to it; or the engine was aborted here.

    Attributes:
        peer: that rank.
    """

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class TransferLate(TransferFailed):
    """The rank at the other end has not come within the group's timeout."""


class PeerAbsent(TransferFailed):
    """The rank at the other end has left the group in order, and takes no part in anything any more."""


class Transfer:
    """A send or receive under way. It keeps its tensor alive."""

    __slots__ = ("_engine", "is_short_receive", "peer", "tensor", "work")

    def __init__(self, engine: GlooEngine, verb: str, tensor: torch.Tensor, peer: int, work: dist.Work) -> None:
        self._engine, self.tensor, self.peer, self.work = engine, tensor, peer, work
        self.is_short_receive = verb == "recv" and tensor.nbytes <= SHORT_BYTES

    def wait(self) -> None:
        """Return when it is done, or raise :class:`TransferFailed`."""
        if self.is_short_receive:
            self.finish()
        else:
            self._engine.wait([self])

    def finish(self) -> None:
        """Return when it is done, where what has come from the peer shows that it is: so no wait for it can last."""
        try:
            self.work.wait(self._engine.timeout)
        except RuntimeError as error:
            raise self._engine.failure(self.peer, error) from error


class GlooEngine:
    """Transfers between the ranks of a group, over a Gloo group of its own.

    ``send`` and ``recv`` take contiguous tensors, and move them in the order of the calls with one tag. A tensor may
    not change until its transfer is done. What is sent may be shorter than what waits for it, never longer.

    Args:
        gloo: makes the group when it is first used.
        timeout: how long a transfer may take.

    Attributes:
        first_contact: returns when a rank has come to connect with this one as well, and raises what says why it does
            not. It is given the rank, the time for that, and whether to stop. Set once, before the engine is used.
    """

    name = "Gloo"
    first_contact: Callable[[int, Callable[[], float], Callable[[], bool]], None] | None = None

    def __init__(self, gloo: GlooOnDemand, timeout: timedelta) -> None:
        self._gloo = gloo
        self.timeout = timeout
        self._waiter = _Waiter()
        self._connects = threading.Condition()
        self._connecting = 0
        self._aborted = False
        self._connected: set[int] = set()

    # -- transfers ---------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._begin("send", tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._begin("recv", tensor, peer, tag)

    def wait(self, transfers: Sequence[Transfer], meanwhile: Callable[[], None] | None = None) -> None:
        """Return when all of them are done.

        Args:
            transfers: those; one wait for many costs one switch of threads.
            meanwhile: called once, on this thread, while they are under way.

        Raises:
            TransferFailed, TransferLate: one has failed.
        """
        at = -1

        def wait_for_all() -> None:
            nonlocal at
            for each in transfers:
                at = each.peer
                each.work.wait(self.timeout)

        here = all(each.is_short_receive for each in transfers)
        outcome = None if here else self._waiter.begin(wait_for_all)
        if meanwhile is not None:
            meanwhile()  # not in the `try`: its errors are not those of a transfer
        try:
            if outcome is None:
                wait_for_all()
            else:
                self._await(at, outcome)
        except RuntimeError as error:
            raise self.failure(at, error) from error

    def connect(self, peers: Collection[int]) -> None:
        """Connect this rank with others, which call this at the same point."""
        byte, transfers = torch.zeros(1, dtype=torch.uint8), []
        for peer in sorted(set(peers) - self._connected):  # in one order, so that no circle of ranks waits
            transfers.append(self.recv(torch.empty_like(byte), peer, _CONNECT_TAG))
            transfers.append(self.send(byte, peer, _CONNECT_TAG))
        self.wait(transfers)

    def receive_early(self, peers: Collection[int], expect: Callable[[], _T]) -> Callable[[], _T]:
        """Begin to receive before the ranks compare their calls, if that is safe, else after it.

        A sender need not ask first where the receive has begun. Ranks that have never talked connect only once their
        calls are known to be equal: else they might wait for each other for ever.

        Args:
            peers: the ranks with which this one exchanges data in this call; it is one of theirs.
            expect: begins the receives, and sends nothing.

        Returns:
            To be called once the calls are equal; it returns what ``expect`` returns.
        """
        if self._connected.issuperset(peers):
            begun = expect()
            return lambda: begun

        def connect_and_expect() -> _T:
            self.connect(peers)
            return expect()

        return connect_and_expect

    def flush(self, sent: Sequence[Transfer]) -> None:
        """Return when these sends are on the wire, or cannot be: this rank leaves, and nobody waits for them."""

        def wait_for_each() -> None:
            for each in sent:
                with contextlib.suppress(RuntimeError):
                    each.work.wait(self.timeout)

        if sent and not self._aborted:
            with contextlib.suppress(Empty, RuntimeError, BackendError):  # late, or no thread can be started
                self._waiter.begin(wait_for_each).get(_FLUSHED_S)

    def _begin(self, verb: str, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        def begin() -> dist.Work:
            work: dist.Work = getattr(self._gloo.get(), verb)([tensor], peer, tag)
            return work

        if self._aborted:
            raise TransferFailed(peer, "the group was aborted")
        began = time.monotonic()
        try:
            if peer not in self._connected:
                work = self._connect(peer, begin)
            elif profiler._is_profiler_enabled:
                # It records the threads on which it was started. A transfer that outlives it would write into what it
                # has freed.
                work = self._await(peer, self._waiter.begin(begin))
            else:
                work = begin()
        except RuntimeError as error:
            # Gloo calls it a timeout as well if the other rank's port refuses it a few times.
            early = ended_early(began, self._gloo.timeout.total_seconds())
            raise self.failure(peer, error, early) from error
        return Transfer(self, verb, tensor, peer, work)

    def _connect(self, peer: int, begin: Callable[[], dist.Work]) -> dist.Work:
        """Begin the first transfer with a rank."""
        self._count_in(peer, 1)

        def connect() -> dist.Work:
            try:
                if self.first_contact is not None:  # Gloo prints text of its own if it dials in vain
                    self.first_contact(peer, lambda: self.timeout.total_seconds(), lambda: self._aborted)
                    self._count_in(peer, 0)  # from now on an abort waits for this
                work = begin()
                self._connected.add(peer)
                return work
            finally:
                with self._connects:
                    self._connecting -= 1
                    self._connects.notify_all()
                    is_last = self._aborted and not self._connecting
                if is_last:
                    self._close_connections()

        work: dist.Work = self._await(peer, _begin_on_thread(connect), self.timeout)
        return work

    def _count_in(self, peer: int, count: int) -> None:
        with self._connects:
            if self._aborted:
                raise TransferFailed(peer, "the group was aborted")
            self._connecting += count

    def _await(self, peer: int, outcome: TimedQueue[Any], limit: timedelta = _UNLIMITED) -> Any:
        """Return or raise what another thread does, unless the engine is aborted meanwhile."""
        clock = AwakeClock()
        while not self._aborted:
            if clock.now() >= limit.total_seconds():
                raise TransferLate(peer, f"timed out after {limit.total_seconds():g} s: it did not connect")
            with contextlib.suppress(Empty):
                done = outcome.get(_LOOK_S)
                if isinstance(done, Exception):
                    raise done
                return done
        raise TransferFailed(peer, "the group was aborted")

    def failure(self, peer: int, error: RuntimeError, early: bool = False) -> TransferFailed:
        """The error of a transfer that has failed.

        Args:
            peer: the rank at its other end.
            error: what Gloo raised.
            early: it did so before the time was over, whatever it says.
        """
        text = " ".join(str(error).split())
        late = _is_late(error) and not early and not self._aborted
        return TransferLate(peer, text) if late else TransferFailed(peer, text)

    # -- its life ----------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Let a transfer that is waited for from now on take so long."""
        self.timeout = timeout

    def abort(self) -> None:
        """End all transfers, here and at the peers, with an error. Any thread may call it."""
        with self._connects:
            if self._aborted:
                return
            self._aborted = True
            # Gloo ends the process if a connection is made that it has already taken for broken.
            self._connects.wait_for(lambda: not self._connecting, _CONNECTING_S)
        self._close_connections()

    def _close_connections(self) -> None:
        """Have a wait time out, for a message that no rank sends, on a connection that is still whole."""
        connected, self._connected = self._connected, set()
        gloo = self._gloo.made
        for peer in tuple(connected) if gloo is not None else ():  # a late thread may still add one
            try:
                never: dist.Work = getattr(gloo, "recv")([torch.empty(1)], peer, _NEVER_TAG)  # noqa: B009 - not in torch's stubs
                never.wait(_SOON)
            except RuntimeError as error:
                if _is_late(error):
                    return

    def close(self) -> None:
        """Give back connections and threads."""
        was_aborted = self._aborted
        self.abort()  # first: else Gloo's thread would look without end for the transfer to which something comes
        self._waiter.end()
        # A thread that an abort has left alone may be making the group, and wait for a store that cannot be reached.
        with contextlib.suppress(TimeoutError):
            within(_CLOSING_S, self._gloo.release) if was_aborted else self._gloo.release()

    def give_back(self) -> None:
        """Give back what would disturb the interpreter's end; no call follows."""
        self.abort()
        self._waiter.end(2 * _LOOK_S)  # one that ended while the interpreter does would end the process
        if self._gloo.made is not None:  # so nobody is making it, for which this would wait
            self._gloo.release()


class _Waiter:
    """A thread that waits in Gloo, one wait after the other, in place of threads that may have to stop waiting."""

    def __init__(self) -> None:
        self._tasks: TimedQueue[tuple[Callable[[], Any], TimedQueue[Any]] | None] = TimedQueue()
        self._making = threading.Lock()
        self._thread: threading.Thread | None = None  # made by the first that needs it, under the lock

    def begin(self, task: Callable[[], Any]) -> TimedQueue[Any]:
        """Have something done; what it returns or raises is put into the queue."""
        with self._making:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="phalanx-lanes", daemon=True)
                start(thread)
                self._thread = thread
        outcome: TimedQueue[Any] = TimedQueue()
        self._tasks.put((task, outcome))
        return outcome

    def end(self, patience_s: float = 0.0) -> None:
        """End the thread when it has done what was begun, and wait for that for so long."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (order := self._tasks.get()) is not None:
            _do(*order)
            del order  # it keeps tensors


def _begin_on_thread(task: Callable[[], Any]) -> TimedQueue[Any]:
    outcome: TimedQueue[Any] = TimedQueue()
    start(threading.Thread(target=_do, args=(task, outcome), name="phalanx-lane", daemon=True))
    return outcome


def _do(task: Callable[[], Any], outcome: TimedQueue[Any]) -> None:
    try:
        outcome.put(task())
    except (RuntimeError, TransferFailed) as error:
        outcome.put(error)


def _is_late(error: RuntimeError) -> bool:
    # torch and Gloo have no type for this.
    text = str(error).lower().replace(os.strerror(errno.ETIMEDOUT).lower(), "")  # that is the connection's end
    return "timed out" in text or "timeout" in text
