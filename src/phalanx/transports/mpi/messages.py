"""Messages over MPI: MPI_Isend and MPI_Irecv, tested for and never waited for inside MPI, so that signals, timeouts and
the group's end come through.

A message's length is compared with the tensor's where it is received; its dtype is not: MPI carries none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from phalanx.diagnosis.reading import with_own_wait
from phalanx.errors import ArgumentError, ClosedError, CollectiveMismatch, PhalanxError
from phalanx.transports.contract import GLANCE_S, SENT, Message, with_site
from phalanx.transports.mpi.agreement import CHECK_S, Agreement, pause
from phalanx.transports.mpi.runtime import Runtime

__all__ = ["Mail", "MpiMessage"]

SPINS = 200


class Mail:
    """The messages of one group.

    Args:
        runtime, comm: MPI under way, and the group's communicator.
        agreement: has the group's timeout, and the error if the group is broken.
        memory: describes a tensor's memory to MPI.

    Attributes:
        ended: whether messages may not move any more. The thread that closes the group sets it; all threads read it.
    """

    def __init__(
        self, runtime: Runtime, comm: Any, agreement: Agreement, memory: Callable[[torch.Tensor], list[Any]]
    ) -> None:
        self.runtime, self.comm, self.agreement, self.mpi = runtime, comm, agreement, runtime.mpi
        self.ended = False
        self._memory = memory
        self._largest_tag: int = runtime.mpi.COMM_WORLD.Get_attr(runtime.mpi.TAG_UB)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        """Start sending; most short messages are done at once."""
        self._refuse(tag)
        request = self.comm.Isend(self._memory(tensor), peer, tag)
        return SENT if request.Test() else MpiMessage(self, request, tensor, "send to", peer)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        """Start receiving."""
        self._refuse(tag)
        source = self.mpi.ANY_SOURCE if peer is None else peer
        return MpiMessage(self, self.comm.Irecv(self._memory(tensor), source, tag), tensor, "recv from", peer)

    def _refuse(self, tag: int) -> None:
        if self.ended:
            raise ClosedError.of_message()
        if self.agreement.broken is not None:
            raise self.agreement.broken
        if not 0 <= tag <= self._largest_tag:
            raise ArgumentError(f"tag {tag}: this MPI library takes tags from 0 to {self._largest_tag}")


class MpiMessage(Message):
    """A request of MPI's, kept with its tensor until it is done, even if nobody else refers to it.

    The fields beside those of :class:`Message` are used under the lock.
    """

    def __init__(self, mail: Mail, request: Any, tensor: torch.Tensor, verb: str, peer: int | None) -> None:
        super().__init__(tensor, verb, peer)
        self._mail, self._request = mail, request
        self._status = mail.mpi.Status()
        self._since: float | None = None  # when the group's timeout began to count
        mail.runtime.keep(self)

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
            self._give_up(ClosedError.of_message())
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
        try:
            self._mail.agreement.check_message(self._text, self._peer, waited)
        except PhalanxError as error:
            self._give_up(error)

    def _give_up(self, error: PhalanxError) -> None:
        """Settle it with an error. What cannot be cancelled keeps its memory: MPI takes no send back."""
        mail, cancelled = self._mail, False
        if self._verb == "recv from" and mail.runtime.usable:
            with contextlib.suppress(mail.mpi.Exception):
                self._request.Cancel()
                self._request.Wait()
                cancelled = True
        if not cancelled:
            mail.runtime.keep((self._request, self._tensor))
        self._settle(error)

    def _settle(self, error: Exception | None, source: int = -1) -> None:
        super()._settle(error, source)
        self._mail.runtime.release(self)

    def _explained(self, error: Any) -> PhalanxError:
        if error.Get_error_class() == self._mail.mpi.ERR_TRUNCATE:
            return self._wrong_length("longer")
        return self._mail.agreement.mpi_failed(with_site(self._text()), error)

    def _wrong_length(self, found: str) -> PhalanxError:
        nbytes = self._tensor.nbytes if self._tensor is not None else 0
        error = CollectiveMismatch(
            f"{self._text()} on rank {self._mail.comm.rank} of the group: the message is not of {nbytes} bytes, as "
            f"the tensor is, but {found}. The ranks must send and receive tensors of the same size and dtype",
            of_message=True,
        )
        return with_own_wait(error)
