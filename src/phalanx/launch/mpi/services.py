"""The relay's services for the ranks, beside watching them: it hands the input on, and hosts the store on demand."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from phalanx.launch.job.job import Job
from phalanx.launch.rank.descriptors import Descriptors, release_input
from phalanx.launch.rank.torch_store import host_store

__all__ = ["Input", "StoreOnDemand"]

_BLOCK = 1 << 16


class Input:
    """Standard input, which rank 0 reads: a block at a time and on demand, so that no block is taken that is not read.

    It does not go through the MPI launcher, because some MPI launchers lose its end.

    Args:
        selector: where to wait for it.
        deliver: takes each block, the empty one at the end.
        offered: whether it is handed on at all.
    """

    def __init__(self, selector: selectors.BaseSelector, deliver: Callable[[bytes], None], *, offered: bool) -> None:
        self.offered = offered
        self._selector = selector
        self._deliver = deliver
        self._wanted = False

    def want(self) -> None:
        """Deliver the next block when there is one."""
        try:
            self._selector.register(0, selectors.EVENT_READ, self._take)
            self._wanted = True
        except PermissionError:
            self._take()  # a file is always ready, and a selector does not take it

    def _take(self) -> None:
        if self._wanted:
            self._selector.unregister(0)
            self._wanted = False
        try:
            data = os.read(0, _BLOCK)
        except OSError:
            data = b""
        if not data:
            self.release()
        self._deliver(data)

    def release(self) -> None:
        """Close the input, so that its writer notices that nobody reads any more."""
        if self._wanted:
            self._selector.unregister(0)
            self._wanted = False
        release_input()


class StoreOnDemand:
    """The store, for ranks that meet by MASTER_ADDR and MASTER_PORT.

    Its port is open from the beginning. The process that hosts it is forked, and imports torch, which takes a second,
    at the first connection; a script that uses MPI alone never makes one.

    Args:
        job: the job.
        descriptors: its descriptors, the listening socket among them.
        selector: where to wait.
        lost: called when the process that hosts it has ended, with its wait status.
    """

    def __init__(
        self, job: Job, descriptors: Descriptors, selector: selectors.BaseSelector, lost: Callable[[int], None]
    ) -> None:
        self._job = job
        self._descriptors = descriptors
        self._selector = selector
        self._lost = lost
        self._pid = self._handle = 0
        selector.register(descriptors.listener, selectors.EVENT_READ, self._start)

    def _start(self) -> None:
        self._selector.unregister(self._descriptors.listener)
        relay = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._descriptors.zygote.close()
            self._descriptors.close_rank_ends()
            host_store(self._descriptors.listener, self._job.address, self._job.ranks, relay)
        self._handle = os.pidfd_open(self._pid)
        self._selector.register(self._handle, selectors.EVENT_READ, self._on_end)

    def _on_end(self) -> None:
        self._selector.unregister(self._handle)
        os.close(self._handle)
        _, status = os.waitpid(self._pid, 0)
        self._lost(status)
