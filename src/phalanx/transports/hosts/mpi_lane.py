"""MPI as the engine between hosts, where MPI started the job: whatever network its library was built for.

MPI decides which interfaces it uses, and whether it authenticates. A rank that dies, or fails, mostly ends the whole
job: its launcher sees to that.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from phalanx.errors import InitializationError
from phalanx.transports.hosts.lane import TransferFailed
from phalanx.transports.hosts.polled import PolledEngine, PolledTransfer
from phalanx.transports.mpi.runtime import Runtime
from phalanx.transports.mpi.types import Types

__all__ = ["MpiEngine"]

_GONE = 0  # the tag of a rank's word that it has given up; those of transfers follow
_TAGS = 32767  # the largest tag that every library takes
# What a rank has sent before it gave up may come over another rail, later than that word.
_LAST_CALL_S = 0.05
_CANCEL_S = 2.0


class MpiEngine(PolledEngine):
    """MPI_Isend and MPI_Irecv on a communicator of the group's own, tested for and never waited for inside MPI.

    Every rank of the group makes one, at the same point.

    Args:
        runtime: MPI under way.
        members: the group's ranks in MPI's world, in the group's order.
        name: equal on every member, and different for other groups of these ranks that are made at the same time.
        timeout: how long a transfer may take.

    Raises:
        InitializationError: MPI could not make the communicator.
    """

    name = "MPI"

    def __init__(self, runtime: Runtime, members: Sequence[int], name: str, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._runtime, self._mpi = runtime, runtime.mpi
        self._types = Types(runtime.mpi)
        self._failure = runtime.mpi.Exception
        try:
            everybody = runtime.world.Get_group()
            chosen = everybody.Incl(list(members))
            self._comm = runtime.world.Create_group(chosen, zlib.crc32(name.encode()) % _TAGS)
            chosen.Free()
            everybody.Free()
        except self._failure as error:
            raise InitializationError(f"MPI could not make a communicator for the group {name!r}: {error}") from None
        self._leaving: dict[int, float] = {}  # ranks that have given up, and when that was heard
        runtime.messages[id(self)] = self

    def keep(self) -> None:
        """Never free the memory that MPI may still read or write. Called when the interpreter ends, before MPI."""
        for transfer in list(self.under_way.values()):
            self._runtime.keep((transfer.request, transfer.tensor))

    def _begin(self, transfer: PolledTransfer, tag: int) -> None:
        start = self._comm.Irecv if transfer.receives else self._comm.Isend
        try:
            transfer.request = start(self._types.tensor(transfer.tensor), transfer.peer, tag + 1)
        except self._failure as error:
            transfer.settle(TransferFailed(transfer.peer, _words(error)))
            return
        self._look(transfer)

    def _advance(self) -> None:
        try:
            status = self._mpi.Status()
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, _GONE, status):  # and so MPI moves what is under way
                peer = status.Get_source()
                self._comm.Recv([bytearray(1), self._mpi.BYTE], peer, _GONE)
                self._leaving.setdefault(peer, time.monotonic())
        except self._failure:
            pass  # the transfer that is looked at next says so
        for peer, when in self._leaving.items():
            if peer not in self.lost and time.monotonic() - when > _LAST_CALL_S:
                self.lost[peer] = "the other rank has given up in the group"

    def _look(self, transfer: PolledTransfer) -> None:
        if transfer.request is None:
            return
        try:
            if transfer.request.Test():
                transfer.settle()
        except self._failure as error:
            transfer.settle(TransferFailed(transfer.peer, _words(error)))

    def _give_up(self, transfer: PolledTransfer) -> None:
        """Cancel a receive. A send cannot be taken back, so its tensor, which MPI may still read, is never freed."""
        request, runtime = transfer.request, self._runtime
        if request is None or not runtime.usable:
            return
        if transfer.receives:
            try:
                request.Cancel()
                until = time.monotonic() + _CANCEL_S
                while time.monotonic() < until:
                    if request.Test():
                        return
            except self._failure:
                pass
        runtime.leave_unanswered((request, transfer.tensor))

    def _end(self, *, orderly: bool) -> None:
        if not self._runtime.usable:
            return
        try:
            if orderly and not self.lost:
                self._comm.Free()
                return
            # The communicator is left: what is on its way in it must not come out in another one.
            word = bytearray(1)
            for peer in range(self._comm.size):
                if peer != self._comm.rank and peer not in self.lost:
                    self._runtime.keep((word, self._comm.Isend([word, self._mpi.BYTE], peer, _GONE)))
        except self._failure:
            pass  # MPI itself has failed, and says so elsewhere


def _words(error: Any) -> str:
    return " ".join(str(error).split())
