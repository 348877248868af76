"""Messages over MPI: MPI_Isend and MPI_Irecv, tested for and never waited for inside MPI, so that signals, timeouts and
the group's end come through.

A message's length is compared with the tensor's where it is received; its dtype is not: MPI carries none.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from phalanx.diagnosis.call_site import call_site
from phalanx.diagnosis.reading import with_own_wait
from phalanx.errors import ArgumentError, BackendError, ClosedError, CollectiveMismatch, PhalanxError
from phalanx.transports.contract import GLANCE_S, SENT, Message
from phalanx.transports.mpi.agreement import CHECK_S, Agreement, pause
from phalanx.transports.mpi.runtime import Runtime
from phalanx.transports.mpi.types import Types

__all__ = ["Mail", "MpiMessage"]

SPINS = 200
LAST_CALL_S = 2.0  # how long a message of a rank that has left may still be on its way


class Mail:
    """The messages of one group.

    Args:
        runtime, comm, types: MPI under way, the group's communicator, MPI's handles.
        agreement: has the group's timeout, and the error if the group is broken.

    Attributes:
        ended: whether messages may not move any more. The thread that closes the group sets it; all threads read it.
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
            raise ClosedError.of_message()
        if self.agreement.broken is not None:
            raise self.agreement.broken
        if not 0 <= tag <= self._largest_tag:
            raise ArgumentError(f"tag {tag}: this MPI library takes tags from 0 to {self._largest_tag}")


class MpiMessage(Message):
    """One request of MPI's. Beside the fields of :class:`Message`:

    - ``_request`` and ``_status`` are used under the lock, by every call about the message. When the process ends,
      :meth:`keep` reads ``_request`` and the tensor without it: a thread that never comes back may hold the lock.
    - ``_since`` is written once, under the lock: when the group's timeout began to count.
    """

    def __init__(self, mail: Mail, request: Any, tensor: torch.Tensor, verb: str, peer: int | None) -> None:
        super().__init__(tensor, verb, peer)
        self._mail = mail
        self._request: Any = request
        self._status = mail.mpi.Status()
        self._since: float | None = None
        mail.runtime.messages[id(self)] = self

    def _poll(self, watch: bool) -> None:
        self._try()
        if watch and self._since is not None and not self._settled:
            self._check(time.monotonic() - self._since)

    def _await(self, timeout_s: float | None) -> None:
        began = checked = time.monotonic()
        spins = SPINS
        while not self._settled:
            if self._lock.acquire(timeout=GLANCE_S):
                try:
                    if self._settled:
                        return
                    self._try()
                    if self._settled:
                        return
                    if spins:
                        spins -= 1
                        continue
                    now = time.monotonic()
                    if timeout_s and now - began > timeout_s:
                        return
                    if now - checked > CHECK_S:
                        checked = now
                        self._check(0.0 if timeout_s else now - began)
                finally:
                    self._lock.release()
            pause(began)

    def _expect(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def _try(self) -> None:
        """Ask MPI whether it is done."""
        if self._mail.ended:
            self._give_up()
            self._settle(ClosedError.of_message())
            return
        try:
            if not self._request.Test(self._status):
                return
        except self._mail.mpi.Exception as error:
            self._settle(self._explained(error))
            return
        if self._verb == "send to":
            self._settle(None)
            return
        received = self._status.Get_elements(self._mail.mpi.BYTE)
        if self._tensor is not None and received != self._tensor.nbytes:
            self._settle(self._wrong_length(f"{received} bytes"))
        else:
            self._settle(None, self._status.Get_source())

    def _check(self, waited: float) -> None:
        """Settle it with an error if it cannot be done any more."""
        mail, agreement = self._mail, self._mail.agreement
        try:
            if agreement.broken is not None:
                raise agreement.broken
            agreement.check_message(self._text, self._peer, waited, LAST_CALL_S)
        except PhalanxError as error:
            mail.runtime.keep(self._tensor)
            self._give_up()
            self._settle(error)

    def keep(self) -> None:
        """Never free the memory that MPI may still read or write. Called when the interpreter ends, before MPI."""
        tensor = self._tensor
        if not self._settled:
            self._mail.runtime.keep((self._request, tensor))

    def _give_up(self) -> None:
        """Cancel a receive. A send cannot be taken back, so its tensor, which MPI may still read, is never freed."""
        request, mail = self._request, self._mail
        if not mail.runtime.usable:
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
        mail, site = self._mail, call_site()
        call = f"{self._text()} at {site}" if site else self._text()
        lost = mail.agreement.lost_in(call, range(mail.comm.size) if self._peer is None else [self._peer])
        return lost or BackendError(f"MPI failed in {call} on rank {mail.comm.rank} of the group: {error}")

    def _wrong_length(self, found: str) -> PhalanxError:
        nbytes = self._tensor.nbytes if self._tensor is not None else 0
        error = CollectiveMismatch(
            f"{self._text()} on rank {self._mail.comm.rank} of the group: the message is not of {nbytes} bytes, as "
            f"the tensor is, but {found}. The ranks must send and receive tensors of the same size and dtype",
            of_message=True,
        )
        return with_own_wait(error)
