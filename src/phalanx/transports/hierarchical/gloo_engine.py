"""Gloo as the engine between hosts: it comes with torch, and needs no setup. It neither authenticates nor encrypts."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import profiler

from phalanx.system.threads import AwakeClock, TimedQueue, ended_early, start, within
from phalanx.transports.hierarchical.gloo import GlooOnDemand
from phalanx.transports.hierarchical.lane import SHORT_BYTES, Engine, Transfer, TransferFailed, TransferLate
from phalanx.transports.hierarchical.short_sends import GONE, ShortSends, copy_of

__all__ = ["UNLIMITED", "GlooEngine"]

UNLIMITED = timedelta(days=365)

_T = TypeVar("_T")

_LOOK_S = 0.1
_CLOSING_S = 1.0
# How long a rank that leaves waits for the next of its last short sends to be gone, which it is at once, unless much
# lies in front of it or the other host is not there any more.
_FLUSHED_S = 2.0
# How long an abort waits for connections that are being made. The other rank makes them at once if it comes to the same
# call, and not at all once it knows that the group is broken, which it learns in milliseconds.
_CONNECTING_S = 0.7
_SOON = timedelta(milliseconds=1)
_NEVER_TAG = 1 << 30  # nothing is sent with it


class _GlooTransfer(Transfer):
    __slots__ = ("_engine", "_peer", "_tensor", "_work")

    def __init__(self, engine: GlooEngine, peer: int, work: dist.Work, tensor: torch.Tensor) -> None:
        self._engine, self._peer, self._work, self._tensor = engine, peer, work, tensor

    def wait(self) -> None:
        engine = self._engine
        try:
            if self._tensor.nbytes <= SHORT_BYTES:
                self._work.wait(engine.timeout)
            else:
                engine.apart(self._peer, lambda: self._work.wait(engine.timeout))
        except RuntimeError as error:
            raise engine.failure(self._peer, error) from error

    def let_go(self) -> None:
        """Return when Gloo does not need the tensor any more, or raise its RuntimeError."""
        self._work.wait(self._engine.timeout)

    def finish(self) -> None:
        try:
            self._work.wait(self._engine.timeout)
        except RuntimeError as error:
            raise self._engine.failure(self._peer, error) from error

    def wait_with(self, others: Sequence[Transfer], meanwhile: Callable[[], None] | None = None) -> None:
        # One wait for all: each wait that is made apart costs two switches of threads.
        others = [each for each in others if each is not GONE]
        if not others and meanwhile is None:
            self.wait()
            return
        engine, at = self._engine, self._peer

        def wait() -> None:
            nonlocal at
            for each in (self, *cast(Sequence[_GlooTransfer], others)):
                at = each._peer
                each._work.wait(engine.timeout)

        short = max(each._tensor.nbytes for each in (self, *cast(Any, others))) <= SHORT_BYTES
        outcome = None if short else engine.begin_apart(wait)
        if meanwhile is not None:
            meanwhile()  # not in the `try`: its errors are not those of a transfer
        try:
            if outcome is None:
                wait()
            else:
                engine.await_apart(at, outcome)
        except RuntimeError as error:
            raise engine.failure(at, error) from error


class _Apart:
    """A thread that does one thing after the other in Gloo, so that who waits for it can stop waiting.

    Gloo ends its waits when a connection ends, but not that for a message of which a part has been moved.
    """

    def __init__(self) -> None:
        self._tasks: TimedQueue[tuple[Callable[[], Any], TimedQueue[Any]] | None] = TimedQueue()
        self.thread = threading.Thread(target=self._run, name="phalanx-lanes", daemon=True)
        start(self.thread)

    def begin(self, task: Callable[[], Any]) -> TimedQueue[Any]:
        """Have it done; what it returns or raises is put into the queue."""
        outcome: TimedQueue[Any] = TimedQueue()
        self._tasks.put((task, outcome))
        return outcome

    @staticmethod
    def begin_alone(task: Callable[[], Any]) -> TimedQueue[Any]:
        """Have it done on a thread of its own, since it may wait for one rank while others are talked to."""
        outcome: TimedQueue[Any] = TimedQueue()
        start(threading.Thread(target=_Apart._do, args=(task, outcome), name="phalanx-lane", daemon=True))
        return outcome

    def end(self) -> None:
        """End the thread when it has done what was begun."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (order := self._tasks.get()) is not None:
            self._do(*order)
            del order

    @staticmethod
    def _do(task: Callable[[], Any], outcome: TimedQueue[Any]) -> None:
        try:
            outcome.put(task())
        except (RuntimeError, TransferFailed) as error:
            outcome.put(error)


class GlooEngine(Engine):
    """A Gloo group of its own, over all ranks; it connects two ranks when they first have something to exchange.

    Args:
        gloo: makes the group when it is first used.
        timeout: how long a transfer may take.
    """

    name = "Gloo"

    def __init__(self, gloo: GlooOnDemand, timeout: timedelta) -> None:
        self._gloo = gloo
        self.timeout = timeout
        self._connected: set[int] = set()  # only added to, by the threads that connect
        self._apart: _Apart | None = None  # written once, under the lock below, by the first thread that needs it
        self._making_apart = threading.Lock()
        self._short = ShortSends(self.begin_apart)
        # Guards the three words below. A thread that connects counts itself before it begins, unless the engine has
        # been aborted, and notifies when it is done; who aborts waits for that.
        self._connects = threading.Condition()
        self._connecting = 0
        self._aborted = False  # written once; read without the lock by those who do not connect
        self._closes = False  # written once: from then on a connection that is made late is closed by who has made it

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        if tensor.nbytes > SHORT_BYTES:
            return self._start("send", tensor, peer, tag)
        self._short.keep([self._start("send", copy_of(tensor), peer, tag).let_go])
        return GONE

    def send_kept(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start("send", tensor, peer, tag)

    def outlive(self, transfers: Sequence[Transfer]) -> None:
        self._short.keep([each.let_go for each in cast(Sequence[_GlooTransfer], transfers)])

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start("recv", tensor, peer, tag)

    def _start(self, verb: str, tensor: torch.Tensor, peer: int, tag: int) -> _GlooTransfer:
        def start() -> dist.Work:
            work: dist.Work = getattr(self._gloo.get(), verb)([tensor], peer, tag)
            return work

        if self._aborted:
            raise TransferFailed(peer, "the group was aborted")
        began = time.monotonic()
        try:
            # To the first transfer with a rank Gloo connects, and waits for that. A profiler records the threads on
            # which it was started, and a transfer that outlives it would write into what it has freed.
            if peer not in self._connected:
                work = self.await_apart(peer, self._begin_to_connect(peer, start), self.timeout)
            else:
                work = self.apart(peer, start) if profiler._is_profiler_enabled else start()
        except RuntimeError as error:
            # Gloo calls it a timeout as well if the other rank's port refuses it a few times.
            early = ended_early(began, self._gloo.timeout.total_seconds())
            raise self.failure(peer, error, early) from error
        return _GlooTransfer(self, peer, self.watched(work, verb, tensor, peer, tag), tensor)

    def watched(self, work: dist.Work, verb: str, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Give what a transfer waits for. An engine that shows what it carries puts something of its own in front."""
        return work

    def _begin_to_connect(self, peer: int, start: Callable[[], dist.Work]) -> TimedQueue[Any]:
        with self._connects:
            if self._aborted:
                raise TransferFailed(peer, "the group was aborted")
            self._connecting += 1

        def connect() -> dist.Work:
            try:
                self._await_peer(peer)
                work = start()
                self._connected.add(peer)  # here, since an abort has to find it, though nobody may wait for this
                return work
            finally:
                with self._connects:
                    self._connecting -= 1
                    self._connects.notify_all()
                    late = self._closes
                if late:
                    self._close_connections()

        try:
            return _Apart.begin_alone(connect)
        except RuntimeError:  # there is no thread for it
            with self._connects:
                self._connecting -= 1
            raise

    def _await_peer(self, peer: int) -> None:
        """Return when a rank has come to connect with this one: Gloo prints text of its own if it dials in vain."""
        if self.first_contact is None:
            return
        self.first_contact.meet(peer, lambda: self.timeout.total_seconds(), lambda: self._aborted)
        with self._connects:
            if self._aborted:  # from now on an abort waits for this
                raise TransferFailed(peer, "the group was aborted")

    def apart(self, peer: int, task: Callable[[], _T]) -> _T:
        """Do something in Gloo that :meth:`abort` may be unable to end, and wait for it.

        Raises:
            TransferFailed: the engine was aborted meanwhile.
        """
        return cast(_T, self.await_apart(peer, self.begin_apart(task)))

    def begin_apart(self, task: Callable[[], Any]) -> TimedQueue[Any]:
        """The first half of :meth:`apart`."""
        with self._making_apart:
            if self._apart is None:
                self._apart = _Apart()
        return self._apart.begin(task)

    def await_apart(self, peer: int, outcome: TimedQueue[Any], limit: timedelta = UNLIMITED) -> Any:
        """The second half of :meth:`apart`.

        Raises:
            TransferLate: it took longer than the limit. It goes on.
        """
        clock = AwakeClock()
        while not self._aborted:
            if clock.now() >= limit.total_seconds():
                raise TransferLate(peer, f"timed out after {limit.total_seconds():g} s: it did not connect")
            with contextlib.suppress(Empty):
                done = outcome.get(_LOOK_S)
                if isinstance(done, (RuntimeError, TransferFailed)):
                    raise done
                return done
        raise TransferFailed(peer, "the group was aborted")

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def abort(self) -> None:
        with self._connects:
            if self._aborted:
                return
            self._aborted = True
            # Gloo ends the process if a connection is made that it has already taken for broken. The other rank may
            # still make it, until that one knows that the group is broken.
            self._connects.wait_for(lambda: not self._connecting, _CONNECTING_S)
            self._closes = True
        self._close_connections()

    def _close_connections(self) -> None:
        gloo = self._gloo.made
        if gloo is None:
            return
        # Gloo's own abort ends no wait. A wait that times out does: it closes the connections to all ranks, here and at
        # their other ends. So one is begun for a message that no rank sends, on a connection that is still whole.
        for peer in self._connected.copy():
            try:
                never: dist.Work = getattr(gloo, "recv")([torch.empty(1)], peer, _NEVER_TAG)  # noqa: B009 - not in torch's stubs
                never.wait(_SOON)
            except RuntimeError as error:
                if _is_late(error):
                    return

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

    def close(self) -> None:
        if not self._aborted:
            self._short.flush(_FLUSHED_S)
            # Before the transfers end that are under way: if something came for one that is not there any more, Gloo's
            # thread would look for it without end, and who then gives back the group would wait for that thread.
            self._close_connections()
        if self._apart is not None:
            self._apart.end()
        # A thread that an abort has left alone may be making the group, and wait for a store that cannot be reached.
        with contextlib.suppress(TimeoutError):
            within(_CLOSING_S, self._gloo.release) if self._aborted else self._gloo.release()

    def forget(self, rank: int) -> None:
        self._gloo.forget(rank)

    def give_back(self) -> None:
        if not self._aborted:
            self._short.flush(_FLUSHED_S)
            self.abort()  # as in close(), and a thread may be connecting
        apart = self._apart
        if apart is not None:  # one that ended while the interpreter does would end the process
            apart.end()
            apart.thread.join(2 * _LOOK_S)
        if self._gloo.made is not None:  # so nobody is making it, for which this would wait
            self._gloo.release()


def _is_late(error: RuntimeError) -> bool:
    # torch and Gloo have no type for this.
    text = str(error).lower().replace(os.strerror(errno.ETIMEDOUT).lower(), "")  # that is the connection's end
    return "timed out" in text or "timeout" in text
