"""The supervisor's services for the ranks, beside watching them: it hands the input on, and hosts the store."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from phalanx.system.processes import die_with_parent, release_input, set_name

__all__ = ["Input", "StoreOnDemand"]


class Input:
    """Standard input, which a rank of another host reads: a block at a time and on demand.

    So no block is taken that is not read. It does not go through MPI's launcher, because some lose its end.

    Args:
        selector: where to wait for it.
        deliver: takes each block, the empty one at the end.
    """

    def __init__(self, selector: selectors.BaseSelector, deliver: Callable[[bytes], None]) -> None:
        self._selector = selector
        self._deliver = deliver

    def want(self) -> None:
        """Deliver the next block when there is one."""
        try:
            self._selector.register(0, selectors.EVENT_READ, self._take)
        except PermissionError:
            self._take()  # a file is always ready, and a selector does not take it

    def _take(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except OSError:
            data = b""
        if data:
            self._forget()
        else:
            self.release()
        self._deliver(data)

    def _forget(self) -> None:
        with contextlib.suppress(KeyError):  # nothing is wanted, or it is a file
            self._selector.unregister(0)

    def release(self) -> None:
        """Close the input, so that its writer notices that nobody reads any more."""
        self._forget()
        release_input()


class StoreOnDemand:
    """The job's store, for scripts that use ``env://`` and for all that speak to MASTER_PORT.

    It should not be a rank: when rank 0 hosts the store, the other ranks lose it as soon as rank 0 ends. Its port is
    open from the beginning. The process that serves it is forked at the first connection; a script that uses MPI alone
    never makes one.

    Args:
        listener: the store's listening socket.
        selector: where to wait.
        look_up: asks the hosts of the job whether a connection is theirs: takes its number and its two ends; None if
            the job is on this host alone.
        lost: called when the process that serves it has ended.
        forget: closes in that process what is the supervisor's.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        look_up: Callable[[int, Any, Any], None] | None,
        lost: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        self._listener, self._selector = listener, selector
        self._look_up, self._lost, self._forget = look_up, lost, forget
        self._pid = 0
        # On the second end the process hears of ranks that have ended, and asks about connections from other hosts.
        self._asked, self._asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        selector.register(listener, selectors.EVENT_READ, self._start)

    def found(self, number: int) -> None:
        """Let a connection in that one of the job's hosts knows as the user's."""
        with contextlib.suppress(OSError):  # the process that asked has ended, or does not keep up
            self._asked.send(str(number).encode(), socket.MSG_DONTWAIT)

    def ended(self, rank: int, pid: int, host: str, how: str) -> None:
        """Tell it that a rank has ended (``launcher_store.EndedRank``), so that nobody waits to meet it."""
        with contextlib.suppress(OSError):  # the process has ended, or nobody has used the store
            self._asked.send(json.dumps([rank, pid, host, how]).encode(), socket.MSG_DONTWAIT)

    def _start(self) -> None:
        self._selector.unregister(self._listener)
        supervisor, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._pid = os.fork()
        if self._pid == 0:
            self._asked.close()
            self._forget()
            _serve(self._listener, supervisor, self._asking, refers=self._look_up is not None)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._asking.close()
        self._listener.close()
        self._selector.register(self._asked, selectors.EVENT_READ, self._on_question)

    def _on_question(self) -> None:
        data = self._asked.recv(4096)
        if data and self._look_up is not None:
            self._look_up(*json.loads(data))
        else:  # the process has ended
            self.close()
            self._lost()

    def close(self) -> None:
        """End the process, and close everything."""
        if self._pid:
            self._selector.unregister(self._asked)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = 0
        self._listener.close()
        self._asked.close()
        self._asking.close()


def _serve(listener: socket.socket, parent: int, asking: socket.socket, *, refers: bool) -> NoReturn:
    """Be the process of the store, until it is killed. Clients that have connected before wait in the queue."""
    try:
        die_with_parent(parent)
        os.setsid()
        set_name("phalanx-store")
        from phalanx.membership.launcher_store import SupervisorLine, TorchStoreServer

        server = TorchStoreServer(listener, supervisor=SupervisorLine(asking, refers=refers))
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        server.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        # After an error too, this copy of the launcher must not go on as the launcher.
        os._exit(1)
