"""A send or receive through the rings of the shared segment (``native/csrc/p2p.c``)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from phalanx.errors import BackendError, PhalanxError
from phalanx.native.core import Status
from phalanx.transports.contract import Message
from phalanx.watch.calls import dtype_name

if TYPE_CHECKING:
    from phalanx.transports.shm.communicator import SharedMemoryCommunicator

__all__ = ["SharedMemoryMessage"]

GLANCE_S = 0.001


class SharedMemoryMessage(Message):
    """A message of the core. One lock covers waiting for it, finding out what came of it, and giving back its handle.

    ``_handle`` is cleared last, when all the rest stands: whoever finds it cleared needs no lock.
    """

    def __init__(
        self,
        communicator: SharedMemoryCommunicator,
        handle: int | None,
        tensor: torch.Tensor,
        verb: str,
        peer: int | None,
    ) -> None:
        if not handle:
            raise BackendError(f"no memory for a message ({verb} rank {peer})")
        self._communicator = communicator
        self._handle: int | None = handle
        self._tensor: torch.Tensor | None = tensor
        self._verb = verb
        self._peer = peer
        self._source = -1
        self._error: PhalanxError | None = None
        self._lock = threading.Lock()

    def test(self, watch: bool = True) -> bool:
        # Another thread that has the lock tests too, which takes microseconds, or waits, which takes long.
        if self._handle is not None and self._lock.acquire(timeout=GLANCE_S):
            inside = self._communicator._inside
            inside.append(None)
            try:
                comm, handle, core = self._communicator._comm, self._handle, self._communicator._core
                if handle is not None and (not comm or core.phx_message_test(comm, handle, watch)):
                    self._settle(comm, handle, core.phx_message_wait(comm, handle, 1) if comm else Status.UNDER_WAY)
                elif handle is not None and self._communicator._ended:
                    self._settle(comm, handle, Status.UNDER_WAY)
            finally:
                inside.pop()
                self._lock.release()
        return self._outcome()

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._handle is not None:
            if not self._lock.acquire(timeout=timeout_s or -1):
                return False
            inside = self._communicator._inside
            inside.append(None)
            try:
                comm, handle = self._communicator._comm, self._handle
                if handle is not None:
                    status = Status.UNDER_WAY
                    if comm:
                        status = self._communicator._core.phx_message_wait(comm, handle, int((timeout_s or 0) * 1e9))
                    self._settle(comm, handle, status)
            finally:
                inside.pop()
                self._lock.release()
            if self._error is not None and threading.current_thread() is threading.main_thread():
                self._communicator._signals.raise_pending()  # what made the poll function stop the wait
        return self._outcome()

    def expect(self) -> None:
        with self._lock:
            inside = self._communicator._inside
            inside.append(None)
            try:
                comm, handle = self._communicator._comm, self._handle
                if comm and handle is not None:
                    self._communicator._core.phx_message_expect(comm, handle)
            finally:
                inside.pop()

    def _outcome(self) -> bool:
        if self._handle is not None:
            return False
        if self._error is not None:
            raise self._error
        return True

    def _settle(self, comm: int, handle: int, status: int) -> None:
        communicator = self._communicator
        if status == Status.UNDER_WAY:
            if not communicator._ended:
                return
            self._error = communicator.closed()
        elif status:
            whom = "any rank" if self._peer is None else f"rank {self._peer}"
            shape = "" if self._tensor is None else f"{dtype_name(self._tensor.dtype)}{list(self._tensor.shape)}"
            error = PhalanxError(f"{self._verb} {whom} failed, and the group with it")
            try:
                error = communicator.explain(f"{self._verb} {whom}, {shape}")
            finally:  # also when a second Ctrl-C cuts the explanation short
                self._error = error
        else:
            self._source = communicator._core.phx_message_source(handle)
        if comm:
            communicator._core.phx_message_free(comm, handle)
        self._tensor = None
        self._handle = None

    @property
    def source(self) -> int:
        return self._source
