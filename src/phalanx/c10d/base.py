"""A process group without its collectives: its name, the order of its operations, its messages, its end."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed.distributed_c10d import GroupName

from phalanx.c10d.backward import raise_in_backward
from phalanx.c10d.by_device import by_device
from phalanx.c10d.checks import SUM, Checks
from phalanx.c10d.leaving import LAST_CALLS_S, compare_at_exit
from phalanx.c10d.messages import DoneWork, Messages, MessageWork
from phalanx.c10d.progress import Progress
from phalanx.c10d.stand_ins import dense
from phalanx.c10d.work import PhalanxWork
from phalanx.errors import PhalanxError
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.layout import DTYPES

__all__ = ["BaseProcessGroup"]

SMALL_BYTES = 64 * 1024  # up to here an asynchronous operation takes less time than waking a thread for it


class BaseProcessGroup(dist.ProcessGroup):
    """A process group over a communicator, without its collectives.

    Args:
        name: the backend's name, for ``dist.get_backend`` and messages.
        communicator: moves the bytes.
        gloo: the attached Gloo group, which serves the rest (``process_group.py``); shut down with this group.
        group_name: torch's name for the group.
    """

    def __init__(self, name: str, communicator: Communicator, gloo: ProcessGroupGloo, group_name: str) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._backend_name = name
        self._communicator = communicator
        self._rank, self._size = communicator.rank, communicator.size
        self._check = Checks(name, communicator)
        self._progress = Progress(group_name)
        self._messages = Messages(group_name, communicator)
        self._gloo = gloo
        self._summed = frozenset(dtype for dtype in DTYPES if communicator.can_reduce(dtype, SUM))
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._set_group_name(GroupName(group_name))
        compare_at_exit(self)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    @property
    def engine(self) -> str:
        """The library whose connections carry the bytes, as ``Gloo``; empty if they are the transport's own."""
        return self._communicator.engine

    def _start(self, asynchronous: bool, result: list[torch.Tensor], body: Callable[[], None]) -> Any:
        """Run an operation here and now, or queue it and return its ``Work``."""
        if not asynchronous:
            return self._progress.run(body)
        urgent = sum(tensor.nbytes for tensor in result) > SMALL_BYTES
        work = PhalanxWork(self._progress, self._progress.submit(body, result, urgent))
        raise_in_backward(work, sys._getframe(1))
        return work

    # -- point to point ----------------------------------------------------------------------------

    @by_device()
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        (tensor,) = self._check.one("send", tensors)
        self._check.on_cpu(tensors)
        self._messages.refuse_if_closed()
        self._check.peer(dst)
        return self._message(self._communicator.send(dense(tensor), dst, tag), tensors, [])

    @by_device()
    def recv(self, tensors: list[torch.Tensor], src: int | None, tag: int = 0) -> Any:
        (tensor,) = self._check.one("recv", tensors)
        self._check.on_cpu(tensors)
        self._messages.refuse_if_closed()
        self._check.peer(src)
        buffer = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
        write_back = [] if buffer is tensor else [tensor, buffer]
        return self._message(self._communicator.recv(buffer, src, tag), tensors, write_back)

    @by_device()
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        return self.recv(tensors, None, tag)

    def _message(self, message: Message, tensors: list[torch.Tensor], write_back: list[torch.Tensor]) -> dist.Work:
        if message.done:
            return DoneWork(tensors)
        work = MessageWork(message, tensors, write_back)
        self._messages.look_after(work)
        return work

    # -- lifetime ----------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: the operations of a group run one after the other in any case."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._start(True, [], _nothing)

    def shutdown(self) -> None:
        """Finish what is queued and give back the communicator. ``destroy_process_group`` calls it.

        Called by a signal handler that has interrupted an operation of this group, it ends that operation with an
        error, and gives back the communicator once the operation has left it. In a process that was forked from the
        group's own it does nothing.

        Raises:
            CollectiveMismatch, PeerLost: the ranks' last calls differ, which no call before could find: a broadcast's
                root waits for nobody. The group is given back all the same. While another exception is on its way out
                nothing is compared.
        """
        if self._progress.inherited:
            # Gloo's destructor would wait for threads that are not in this process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))
            return
        if self._progress.interrupted():
            self.abort()
            # The thread waits for the group's lock, which the interrupted operation holds. It is not a daemon, so that
            # an exit waits for it.
            threading.Thread(target=self.shutdown, name="phalanx-closing").start()
            return
        self._progress.close()
        self._messages.close()
        try:
            if sys.exc_info()[0] is None:
                self._communicator.compare_rest(LAST_CALLS_S)
        finally:
            self._communicator.close()
            self._gloo.shutdown()

    def compare_at_exit(self, patience_s: float) -> PhalanxError | None:
        """Compare the ranks' last calls in a process that exits without shutting the group down."""
        running = self._progress.running
        if not running.acquire(blocking=False):
            return None  # an operation is under way, and stays so
        try:
            if not self._progress.busy and not self._progress.queue:
                self._communicator.compare_rest(patience_s)
        except PhalanxError as error:
            return error
        finally:
            running.release()
        return None

    def abort(self) -> None:
        """End operations under way on every rank with an error; the group cannot be used afterwards."""
        if self._progress.inherited:
            return  # it is the parent's
        self._communicator.abort()
        self._gloo.abort()


def _nothing() -> None:
    pass
