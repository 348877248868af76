"""Engines over libraries that move bytes only while they are called: MPI and UCX.

A rank that waits for a transfer calls the library. But a rank may also wait for another rank of its own host, while a
rank of another host waits for what this one has begun to send. So each engine has a thread that calls the library in
the meantime: often while a large transfer is under way, now and then as long as the group is in use, and else never.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from phalanx.errors import BackendError
from phalanx.system.threads import start
from phalanx.transports.hosts.lane import SHORT_BYTES, Engine, Transfer, TransferFailed, TransferLate

__all__ = ["SPIN_S", "PolledEngine", "PolledTransfer"]

LARGE_EVERY_S = 0.0005
SMALL_EVERY_S = 0.01  # a library may hold back the end of something small for a socket that was full
IN_USE_S = 1.0
SPIN_S = 0.0002  # then a wait yields its core for longer
END_S = 1.0  # how long the thread may take to end


class PolledTransfer(Transfer):
    """A transfer, as its engine sees it.

    Attributes:
        peer: the rank at the other end.
        tensor: its memory.
        request: the library's handle; None when there is none any more.
        error: why it is not done, once it is settled.
        is_large: it moves quicker if the library is called often while it is under way.
        settled: whether it is over. Written under the engine's lock; read without it, being one reference.
    """

    __slots__ = ("_engine", "error", "is_large", "peer", "receives", "request", "settled", "tensor")

    def __init__(
        self, engine: PolledEngine, peer: int, tensor: torch.Tensor, receives: bool, standing: bool = False
    ) -> None:
        self._engine, self.peer, self.tensor, self.receives = engine, peer, tensor, receives
        self.is_large = tensor.nbytes > SHORT_BYTES and not standing
        self.request: Any = None
        self.error: TransferFailed | None = None
        self.settled = False

    def settle(self, error: TransferFailed | None = None) -> None:
        """It is over. The engine's lock is held."""
        self.error, self.settled, self.request = error, True, None

    def wait(self) -> None:
        if not self.settled:
            self._engine.await_transfer(self)
        if self.error is not None:
            raise self.error


class PolledEngine(Engine):
    """What such engines have in common.

    ``lock`` is held by the thread that is in the library, and by one that writes a field of this object or of a
    transfer. It can be taken again, because a signal handler may end the group in the middle of a call.

    Args:
        timeout: how long a transfer may take.

    Attributes:
        lost: the ranks that can no longer be reached, and why.
        under_way: the transfers that are not settled, by their ids.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.lock = threading.RLock()
        self.lost: dict[int, str] = {}
        self.under_way: dict[int, PolledTransfer] = {}
        self._why_ended = ""
        self._closed = False
        self._waiting = 0
        self._large = 0  # how many of those under way are large
        self._used = 0.0
        self._in_use = threading.Event()
        self._thread: threading.Thread | None = None
        self._at_exit = _weakly(self._stop)
        atexit.register(self._at_exit)

    # -- what an engine has to say -----------------------------------------------------------------

    @abstractmethod
    def _begin(self, transfer: PolledTransfer, tag: int) -> None:
        """Give a transfer to the library: set its request, or settle it. The lock is held."""

    @abstractmethod
    def _advance(self) -> None:
        """Let the library move bytes, and note ranks that are lost. The lock is held."""

    @abstractmethod
    def _look(self, transfer: PolledTransfer) -> None:
        """Settle a transfer if it is done. The lock is held."""

    @abstractmethod
    def _give_up(self, transfer: PolledTransfer) -> None:
        """See to it that the library does not touch a transfer's memory, or keep that for good. The lock is held."""

    @abstractmethod
    def _end(self, *, orderly: bool) -> None:
        """Give back what the library holds, and let the peers know. Called once; the lock is held."""

    def _connect(self, peer: int) -> None:
        """Called without the lock before a rank's first transfer with a peer, and before every later one."""

    def _rest(self, waited_s: float) -> None:
        """Yield the core in a wait that has lasted so long already."""
        if waited_s < SPIN_S:
            os.sched_yield()
        else:
            time.sleep(0.00005 if waited_s < 0.01 else 0.0005)

    # -- the contract ------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start(PolledTransfer(self, peer, tensor, False), tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start(PolledTransfer(self, peer, tensor, True), tag)

    def recv_standing(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start(PolledTransfer(self, peer, tensor, True, standing=True), tag)

    def _start(self, transfer: PolledTransfer, tag: int) -> Transfer:
        self._connect(transfer.peer)
        self._used = time.monotonic()
        with self.lock:
            if self._why_ended:
                raise TransferFailed(transfer.peer, self._why_ended)
            if self._thread is None and not self._closed:
                self._start_thread()  # first, so that nothing is under way if there can be none
            self._begin(transfer, tag)
            if not transfer.settled:
                self.under_way[id(transfer)] = transfer
                self._large += transfer.is_large
        if not self._in_use.is_set():
            self._in_use.set()
        return transfer

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._tend, name="phalanx-engine", daemon=True)
        try:
            start(self._thread)
        except BackendError:
            self._thread = None
            raise

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def abort(self) -> None:
        with self.lock:
            self._finish("the group was aborted", orderly=False)

    def close(self) -> None:
        with self.lock:
            self._finish("the group was destroyed", orderly=True)
        self._stop()
        atexit.unregister(self._at_exit)

    def _stop(self) -> None:
        """End the thread. It must not be in the library when the process ends."""
        with self.lock:
            thread, self._closed = self._thread, True
        self._in_use.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(END_S)

    def _finish(self, why: str, *, orderly: bool) -> None:
        if self._why_ended:
            return
        self._why_ended = why
        for transfer in list(self.under_way.values()):
            self._look(transfer)
            if not transfer.settled:
                self._give_up(transfer)
                transfer.settle(TransferFailed(transfer.peer, why))
        self._forget_settled()
        self._end(orderly=orderly)

    # -- waiting -----------------------------------------------------------------------------------

    def await_transfer(self, transfer: PolledTransfer) -> None:
        """Return when a transfer is settled; settle it if that takes too long."""
        began = time.monotonic()
        with self.lock:
            self._waiting += 1
        try:
            while not transfer.settled:
                with self.lock:
                    if not self._why_ended:
                        self._advance()
                        self._check(transfer)
                    if transfer.settled:
                        return
                    waited = time.monotonic() - began
                    if waited > self.timeout.total_seconds():
                        self._give_up(transfer)
                        late = f"timed out after {self.timeout.total_seconds():g} s over {self.name}"
                        transfer.settle(TransferLate(transfer.peer, late))
                        self._forget(transfer)
                        return
                self._rest(waited)
        finally:
            with self.lock:
                self._waiting -= 1

    def _check(self, transfer: PolledTransfer) -> None:
        self._look(transfer)
        if not transfer.settled and transfer.peer in self.lost:
            self._give_up(transfer)
            transfer.settle(TransferFailed(transfer.peer, self.lost[transfer.peer]))
        if transfer.settled:
            self._forget(transfer)

    def _forget(self, transfer: PolledTransfer) -> None:
        if self.under_way.pop(id(transfer), None) is not None:
            self._large -= transfer.is_large

    def _forget_settled(self) -> None:
        for transfer in list(self.under_way.values()):
            if transfer.settled:
                self._forget(transfer)

    def _tend(self) -> None:
        """The thread: call the library while nobody waits."""
        while not self._closed:
            if not self._waiting:
                with self.lock:
                    if not self._why_ended:
                        self._advance()
                        for transfer in list(self.under_way.values()):
                            if transfer.tensor.nbytes > SHORT_BYTES:
                                self._check(transfer)
            if self._large and not self._why_ended:
                time.sleep(LARGE_EVERY_S)
            elif time.monotonic() - self._used < IN_USE_S:
                time.sleep(SMALL_EVERY_S)
            else:
                self._in_use.clear()
                if time.monotonic() - self._used < IN_USE_S or self._closed:
                    continue
                self._in_use.wait()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls the method as long as its object exists, which this does not keep alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call
