"""Messages over MPI: MPI_Isend and MPI_Irecv, tested for and never waited for inside MPI, so that signals, timeouts and
the group's end come through.

A message's length is compared with the tensor's where it is received; its dtype is not: MPI carries none.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from phalanx.errors import ArgumentError, BackendError, ClosedError, CollectiveMismatch, PhalanxError
from phalanx.transports.contract import SENT, Message
from phalanx.transports.mpi.agreement import LOOK_S, Agreement, pause
from phalanx.transports.mpi.runtime import Runtime
from phalanx.transports.mpi.types import Types
from phalanx.watch.calls import dtype_name

__all__ = ["Mail", "MpiMessage"]

SPINS = 200
LAST_CALL_S = 2.0  # how long a message of a rank that has left may still be on its way
GLANCE_S = 0.001


class Mail:
    """The messages of one group.

    Args:
        runtime, comm, types: MPI under way, the group's communicator, MPI's handles.
        agreement: what knows the group's timeout and whether it is broken.
    """

    def __init__(self, runtime: Runtime, comm: Any, types: Types, agreement: Agreement) -> None:
        self.runtime, self.comm, self.agreement = runtime, comm, agreement
        self.mpi = runtime.mpi
        self.ended = False
        self._types = types
        self._largest_tag: int = runtime.mpi.COMM_WORLD.Get_attr(runtime.mpi.TAG_UB)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        """Start sending; most short messages are done at once."""
        self._refuse(tag)
        request = self.comm.Isend(self._types.tensor(tensor), peer, tag)
        if request.Test():
            return SENT
        return MpiMessage(self, request, tensor, "send to", peer)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        """Start receiving."""
        self._refuse(tag)
        source = self.mpi.ANY_SOURCE if peer is None else peer
        request = self.comm.Irecv(self._types.tensor(tensor), source, tag)
        return MpiMessage(self, request, tensor, "recv from", peer)

    def _refuse(self, tag: int) -> None:
        if self.ended:
            raise _closed()
        if self.agreement.broken is not None:
            raise self.agreement.broken
        if not 0 <= tag <= self._largest_tag:
            raise ArgumentError(f"tag {tag}: this MPI library takes tags from 0 to {self._largest_tag}")


class MpiMessage(Message):
    """One request of MPI's. Its lock covers every call about it; whoever finds it settled needs none."""

    def __init__(self, mail: Mail, request: Any, tensor: torch.Tensor, verb: str, peer: int | None) -> None:
        self._mail = mail
        self._request: Any | None = request
        self._status = mail.mpi.Status()
        self._tensor: torch.Tensor | None = tensor
        self._verb, self._peer = verb, peer
        self._source = -1
        self._error: PhalanxError | None = None
        self._lock = threading.Lock()
        self._since: float | None = None
        mail.runtime.messages.add(self)

    def test(self, watch: bool = True) -> bool:
        if self._request is not None and self._lock.acquire(timeout=GLANCE_S):
            try:
                self._try()
                if watch and self._since is not None:
                    self._look(time.monotonic() - self._since)
            finally:
                self._lock.release()
        return self._outcome()

    def wait(self, timeout_s: float | None = None) -> bool:
        began = looked = time.monotonic()
        spins = SPINS
        while self._request is not None:
            if self._lock.acquire(timeout=GLANCE_S):
                try:
                    if self._try():
                        break
                    if spins:
                        spins -= 1
                        continue
                    now = time.monotonic()
                    if timeout_s and now - began > timeout_s:
                        return False
                    if now - looked > LOOK_S:
                        looked = now
                        self._look(0.0 if timeout_s else now - began)
                finally:
                    self._lock.release()
            pause(began)
        return self._outcome()

    def expect(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    @property
    def source(self) -> int:
        return self._source

    def _outcome(self) -> bool:
        if self._request is not None:
            return False
        if self._error is not None:
            raise self._error
        return True

    def _try(self) -> bool:
        """Whether it is settled, after asking MPI. Its lock is held."""
        request = self._request
        if request is None:
            return True
        if self._mail.ended:
            self._give_up()
            return self._settle(_closed())
        try:
            if not request.Test(self._status):
                return False
        except self._mail.mpi.Exception as error:
            return self._settle(self._explained(error))
        if self._verb == "recv from":
            self._source = self._status.Get_source()
            tensor = self._tensor
            received = self._status.Get_elements(self._mail.mpi.BYTE)
            if tensor is not None and received != tensor.nbytes:
                return self._settle(self._wrong_length(f"{received} bytes"))
        return self._settle(None)

    def _settle(self, error: PhalanxError | None) -> bool:
        self._error = error
        self._tensor = None
        self._request = None
        return True

    def _look(self, waited: float) -> None:
        """Whether it can still come. Its lock is held."""
        mail, agreement = self._mail, self._mail.agreement
        if self._request is None:
            return
        try:
            if agreement.broken is not None:
                raise agreement.broken
            agreement.look_for_message(self._words, self._peer, waited, LAST_CALL_S)
        except PhalanxError as error:
            mail.runtime.keep(self._tensor)
            self._give_up()
            self._settle(error)

    def keep(self) -> None:
        """Never free what MPI may still read or write: the process ends, and MPI after it."""
        request, tensor = self._request, self._tensor
        if request is not None:
            self._mail.runtime.keep((request, tensor))

    def _give_up(self) -> None:
        """Take it back where that is possible; MPI may read or write the tensor until then, so it is kept."""
        request, mail = self._request, self._mail
        if request is None or not mail.runtime.usable:
            return
        try:
            if self._verb == "recv from":
                request.Cancel()
                request.Wait()
            else:
                mail.runtime.keep((request, self._tensor))
        except mail.mpi.Exception:
            mail.runtime.keep((request, self._tensor))

    def _explained(self, error: Any) -> PhalanxError:
        mpi = self._mail.mpi
        if error.Get_error_class() == mpi.ERR_TRUNCATE:
            return self._wrong_length("longer")
        return BackendError(f"MPI failed in {self._words()} on rank {self._mail.comm.rank} of the group: {error}")

    def _wrong_length(self, found: str) -> PhalanxError:
        nbytes = self._tensor.nbytes if self._tensor is not None else 0
        return CollectiveMismatch(
            f"{self._words()} on rank {self._mail.comm.rank} of the group: the message is not of {nbytes} bytes, as "
            f"the tensor is, but {found}. The ranks must send and receive tensors of the same size and dtype"
        )

    def _words(self) -> str:
        whom = "any rank" if self._peer is None else f"rank {self._peer}"
        shape = "" if self._tensor is None else f", {dtype_name(self._tensor.dtype)}{list(self._tensor.shape)}"
        return f"{self._verb} {whom}{shape}"


def _closed() -> ClosedError:
    return ClosedError("a message of a process group was used after the group had been destroyed")
