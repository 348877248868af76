"""The relay's services for the ranks, beside watching them: it hands the input on, and hosts the store on demand."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable
from typing import Any

from phalanx.launch.rank.descriptors import Descriptors, release_input
from phalanx.launch.rank.torch_store import host_store
from phalanx.store.ended import EndsChannel
from phalanx.store.torch_server import Referral

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

    Its port is open from the beginning. The process that serves it is forked at the first connection; a script that
    uses MPI alone never makes one. That process asks here, by way of this object, about connections from other hosts.

    Args:
        descriptors: the job's descriptors.
        listener: the store's listening socket.
        selector: where to wait.
        look_up: asks the hosts of the job whether a connection is theirs: takes its number and its two ends.
        lost: called when the process that serves it has ended, with its wait status.
    """

    def __init__(
        self,
        descriptors: Descriptors,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        look_up: Callable[[int, Any, Any], None],
        lost: Callable[[int], None],
    ) -> None:
        self._descriptors = descriptors
        self._listener = listener
        self._selector = selector
        self._look_up = look_up
        self._lost = lost
        self._pid = self._handle = 0
        self._asked, self._asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked.setblocking(False)
        self._ends = EndsChannel()
        selector.register(listener, selectors.EVENT_READ, self._start)

    def found(self, number: int) -> None:
        """One of the job's hosts knows this connection as the user's."""
        with contextlib.suppress(OSError):  # the process that asked has ended
            self._asked.send(str(number).encode())

    def ended(self, rank: int, host: str) -> None:
        """A rank has ended in order on this host; nobody should wait for what it would have written."""
        self._ends.tell(rank, host)

    def _start(self) -> None:
        self._selector.unregister(self._listener)
        relay = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._descriptors.zygote.close()
            self._descriptors.close_rank_ends()
            self._asked.close()
            host_store(self._listener, relay, self._ends, Referral(self._asking))
        self._asking.close()
        self._ends.keep_writing_end()
        self._selector.register(self._asked, selectors.EVENT_READ, self._on_question)
        self._handle = os.pidfd_open(self._pid)
        self._selector.register(self._handle, selectors.EVENT_READ, self._on_end)

    def _on_question(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self._asked.recv(4096)
            if data:
                self._look_up(*json.loads(data))
            else:
                self._selector.unregister(self._asked)  # the process has ended, which _on_end reports

    def _on_end(self) -> None:
        self._selector.unregister(self._handle)
        os.close(self._handle)
        _, status = os.waitpid(self._pid, 0)
        self._lost(status)
