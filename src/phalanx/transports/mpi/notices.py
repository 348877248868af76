"""Notices of MPI ranks, beside their groups' operations: that a rank gave up waiting, or has left for good.

A notice is a small message on the job's own communicator, under a tag that nothing else uses. Ranks check for notices
after each comparison of calls and while they wait for others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.diagnosis.call_site import call_site

__all__ = ["Notice", "Notices"]

TAG = 1
TEXT_BYTES = 1000
GRACE_S = 0.6


@dataclass(frozen=True)
class Notice:
    """A notice that has arrived.

    Attributes:
        rank: the rank that sent it, in the world.
        kind: ``timeout``, ``interrupted`` or ``abort``: that rank gave up in a group's operation; or ``left``.
        group: the group's key; empty for ``left``.
        sequence: how many operations the group had begun on that rank.
        call: the call that the rank was in, with its line.
    """

    rank: int
    kind: str
    group: str
    sequence: int
    call: str


class Notices:
    """The notices of one rank, sent and received.

    Any thread may call the methods. Notices are sent and received, and their lists written, under ``_lock``. The lists
    are read without it, since a notice is added to one whole, and they are emptied only when a new world begins.

    Attributes:
        world: which world this rank is in, or was in last, counted from 1: where the script owns MPI, it may destroy
            one and make another.
        sequences: for the key of each group of this rank, the object whose ``sequence`` says how many operations the
            rank has begun there. The others learn it when this rank leaves, so that a rank still in the last operation
            does not take this one for missing there.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank: int = comm.rank
        self.sequences: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._sent: list[tuple[bytearray, Any]] = []
        self._received: list[Notice] = []
        self._left: dict[int, tuple[dict[str, int], str, float]] = {}
        self._later: list[tuple[int, dict[str, Any]]] = []
        self.world = 0

    def send(self, kind: str, group: str, sequence: int, call: str, members: Iterable[int]) -> None:
        """Send the other members of a group the notice that this rank gave up there."""
        content = {"kind": kind, "group": group, "sequence": sequence, "call": call[:TEXT_BYTES]}
        self._send(content | {"world": self.world}, members)

    def enter_world(self) -> None:
        """A world begins: no rank has left it, except those whose notices came before this rank did."""
        with self._lock:
            self.world += 1
            self._left.clear()
            self._received.clear()
            later, self._later = self._later, []
            for rank, content in later:
                self._take(rank, content)

    def leave_world(self) -> None:
        """Send every rank the notice that this one makes no more calls in this world."""
        site = call_site()
        call = f"destroy_process_group() at {site}" if site else "the end of its program"
        # list() copies in one step, while another thread may make a group.
        sequences = {key: group.sequence for key, group in list(self.sequences.items())}
        content = {"kind": "left", "world": self.world, "sequences": sequences, "call": call[:TEXT_BYTES]}
        self._send(content, range(self._comm.size))

    def receive_last(self) -> None:
        """Wait until all have left. MPI_Finalize does so, too, and there UCX warns of what nobody has received."""
        while len(self._left) < self._comm.size - 1:
            self._receive()
            time.sleep(0.001)

    def about(self, group: str, sequence: int, members: Iterable[int]) -> Notice | None:
        """The notice that an operation of a group will not be answered, if one has arrived.

        Args:
            group: its key.
            sequence: the number of the operation.
            members: the group's ranks in the world.
        """
        self._receive()
        # Check these first: a rank that gave up soon leaves as well, and giving up is the cause to report.
        for notice in self._received:
            if notice.group == group:
                return notice
        for rank in members:
            if rank in self._left:
                sequences, call, when = self._left[rank]
                if sequences.get(group, -1) < sequence:
                    # Its process may be about to end by a failure, which ends all others and is the cause to report.
                    if time.monotonic() - when < GRACE_S:
                        return None
                    return Notice(rank, "left", group, sequences.get(group, -1), call)
        return None

    def waiting(self, group: str, sequence: int) -> dict[int, str]:
        """The ranks that gave up in this same operation, and their calls: they had come to it."""
        self._receive()
        return {n.rank: n.call for n in self._received if n.group == group and n.sequence == sequence}

    def has_left(self, rank: int) -> str:
        """The last call of a rank that has left; empty if it has not."""
        self._receive()
        return self._left[rank][1] if rank in self._left else ""

    def _send(self, content: dict[str, Any], members: Iterable[int]) -> None:
        data = bytearray(json.dumps(content).encode())
        with self._lock:
            for member in members:
                if member != self._rank:
                    self._sent.append((data, self._comm.Isend([data, self._mpi.BYTE], member, TAG)))
            # Most notices have left by now. A longer one leaves when its receiver checks; keep it until then.
            self._sent = [(data, request) for data, request in self._sent if not request.Test()]

    def _receive(self) -> None:
        with self._lock:
            status = self._mpi.Status()
            while message := self._comm.Improbe(self._mpi.ANY_SOURCE, TAG, status):
                data = bytearray(status.Get_count(self._mpi.BYTE))
                message.Recv([data, self._mpi.BYTE])
                self._take(status.Get_source(), json.loads(data))

    def _take(self, rank: int, content: dict[str, Any]) -> None:
        world = content.pop("world")
        if world > self.world:
            self._later.append((rank, content | {"world": world}))
        elif world == self.world and content["kind"] == "left":
            self._left[rank] = content["sequences"], content["call"], time.monotonic()
        elif world == self.world:
            self._received.append(Notice(rank, **content))
