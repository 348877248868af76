"""Facts that the ranks of an MPI job know of each other: processes, and who has given up an operation or has left.

The ranks tell each other once, when MPI starts, where their processes and their flight recorders are. Nothing is read
there before an error needs it. Later they send notices: small messages on a communicator of their own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from phalanx.diagnosis.call_site import call_site, shown
from phalanx.diagnosis.reading import facts_in, read_recording
from phalanx.diagnosis.recorder import open_recorder, own_place
from phalanx.diagnosis.stacks import be_seen, place_of_main
from phalanx.lost import rank_of_group
from phalanx.system.host import machine_name
from phalanx.system.processes import state_of, state_text

__all__ = ["Notice", "Notices", "Peers"]

_TAG = 1
_GRACE_S = 0.6  # a failure that ends the process of a rank that has left comes within that, and is the cause to report


class _Peer(NamedTuple):
    """Process of a rank: its id, in which namespace, on which host, and where its flight recorder is (-1: nowhere)."""

    pid: int
    namespace: str
    host: str
    descriptor: int
    at: int


class Peers:
    """The processes of the world's ranks; all ranks make it at the same time."""

    def __init__(self, mpi: Any, world: Any) -> None:
        neighbours = world.Split_type(mpi.COMM_TYPE_SHARED)
        first = neighbours.bcast(world.rank, 0)
        neighbours.Free()
        namespace = ""
        with contextlib.suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        open_recorder()
        own = first, os.getpid(), namespace, machine_name(), *own_place()
        told = world.allgather(own)
        # For each rank, the first rank that shares memory with it: equal on one host.
        self._hosts = [first for first, *_ in told]
        self._peers = [_Peer(*process) for _, *process in told]
        self._rank: int = world.rank
        be_seen()

    def one_host(self, members: Sequence[int]) -> bool:
        """Return whether these ranks of the world are on one host, so far as MPI can tell."""
        return len({self._hosts[rank] for rank in members}) == 1

    def visible(self) -> dict[int, int]:
        """The process ids of the world's ranks that this one can look at, by rank; itself among them."""
        return {rank: peer.pid for rank, peer in enumerate(self._peers) if self._is_visible(rank)}

    def name(self, rank: int, group_rank: int) -> str:
        """A rank of the world for people: ``rank 1 of the group (pid 70 on h1)``."""
        peer = self._peers[rank]
        return rank_of_group(group_rank, peer.pid, peer.host)

    def stopped(self, rank: int) -> str:
        """The state of a process that is stopped, in words; empty if it is not, or cannot be seen."""
        state = state_of(self._peers[rank].pid) if self._is_visible(rank) else ""
        return state_text(state) if state in ("T", "t") else ""

    def place(self, rank: int) -> str:
        """Return where the main thread of a rank of the world is in its program; empty if that cannot be found out."""
        return shown(place_of_main(self._peers[rank].pid)) if self._is_visible(rank) else ""

    def facts(self, rank: int) -> dict[str, Any]:
        """The attributes of :class:`PeerLost` that are known of a rank of the world, and whether it ``was_in_it``."""
        peer = self._peers[rank]
        facts: dict[str, Any] = {"rank": rank, "pid": peer.pid, "host": peer.host}
        if peer.descriptor < 0 or not self._is_visible(rank):
            return facts
        path = f"/proc/{peer.pid}/fd/{peer.descriptor}"
        with contextlib.suppress(OSError):  # it has ended
            if not os.readlink(path).startswith("/memfd:"):
                return facts
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                recording = read_recording(file, peer.at)
            finally:
                os.close(file)
            # The program may have something else there by now.
            if recording is not None and recording.pid == peer.pid:
                facts = {**facts_in(recording), **facts}
        return facts

    def _is_visible(self, rank: int) -> bool:
        """Return whether a rank's process id means the same here: the same kernel and the same namespace."""
        namespace = self._peers[rank].namespace
        is_beside = self._hosts[rank] == self._hosts[self._rank]
        return is_beside and bool(namespace) and namespace == self._peers[self._rank].namespace


class Notice(NamedTuple):
    """A notice that has arrived from a rank of the world, which was in a call.

    ``kind`` is ``left``, or ``timeout``, ``interrupted`` or ``abort`` if the rank gave up in a group's operation, which
    was its ``sequence``-th there.
    """

    rank: int
    kind: str
    sequence: int
    call: str


class Notices:
    """Notices between the ranks of one world, sent and received.

    A rank that gives up an operation tells its group, and one that leaves the world all. Any thread may call.

    ============== ============================= ==================================
    field          written by                    read by, and how
    ============== ============================= ==================================
    ``_requests``  who sends, under ``_lock``    the same
    ``_given_up``  who receives, under ``_lock`` any thread; a notice is added whole
    ``_left``      who receives, under ``_lock`` any thread; an entry is added whole
    ``sequences``  who makes or closes a group   who leaves, from a copy
    ============== ============================= ==================================

    Args:
        mpi, comm: mpi4py's module, and a communicator of all ranks that nothing else uses.

    Attributes:
        sequences: for the name of each group the object whose ``sequence`` says how many operations this rank has begun
            there. The others learn it when this rank leaves.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._comm, self._any, self._status, self._probe = comm, mpi.ANY_SOURCE, mpi.Status, comm.Iprobe
        # MPICH searches what has arrived before it polls the network, so it finds a new message in the next call.
        self._probes_twice = "MPICH" in mpi.Get_library_version()
        self.sequences: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._requests: list[Any] = []
        self._given_up: list[tuple[str, Notice]] = []
        self._left: dict[int, tuple[dict[str, int], str, float]] = {}

    def give_up(self, kind: str, group: str, sequence: int, call: str, members: Iterable[int]) -> None:
        """Send the other members of a group the notice that this rank gave up there."""
        self._send((kind, group, sequence, call), members)

    def leave(self) -> None:
        """Send every rank the notice that this one makes no more calls in this world."""
        site = call_site()
        call = f"destroy_process_group() at {site}" if site else "the end of its program"
        # list() copies in one step, while another thread may make a group.
        sequences = {group: counted.sequence for group, counted in list(self.sequences.items())}
        self._send(("left", sequences, call), range(self._comm.size))

    def receive_last(self) -> None:
        """Wait until all have left. MPI_Finalize does so, too, and there UCX warns of what nobody has received."""
        while len(self._left) < self._comm.size - 1:
            self._receive()
            time.sleep(0.001)

    def has_arrived(self) -> bool:
        """Return whether there may be a notice about a group. Takes less than a microsecond."""
        probe, source = self._probe, self._any
        return bool(probe(source, _TAG) or (self._probes_twice and probe(source, _TAG)) or self._given_up)

    def about(self, group: str, sequence: int, members: Iterable[int]) -> Notice | None:
        """The notice that this operation of a group, which has these ranks of the world, will not be answered."""
        self._receive()
        # Before those that left: a rank that gave up soon leaves as well, and giving up is the cause to report.
        for name, notice in self._given_up:
            if name == group:
                return notice
        for rank in members:
            if rank in self._left:
                sequences, call, since = self._left[rank]
                begun = sequences.get(group, -1)
                if begun < sequence:
                    late = time.monotonic() - since >= _GRACE_S
                    return Notice(rank, "left", begun, call) if late else None
        return None

    def gave_up_in(self, group: str, sequence: int) -> set[int]:
        """The ranks that gave up in this same operation, so they had come to it."""
        self._receive()
        return {notice.rank for name, notice in self._given_up if name == group and notice.sequence == sequence}

    def has_left(self, rank: int) -> str:
        """The last call of a rank that has left; empty if it has not."""
        self._receive()
        return self._left[rank][1] if rank in self._left else ""

    def _send(self, content: tuple[Any, ...], members: Iterable[int]) -> None:
        with self._lock:
            for member in members:
                if member != self._comm.rank:
                    self._requests.append(self._comm.isend(content, member, _TAG))
            # Most notices have left by now. A long one leaves when its receiver looks; its request keeps it until then.
            self._requests = [request for request in self._requests if not request.Test()]

    def _receive(self) -> None:
        with self._lock:
            status = self._status()
            while (message := self._comm.improbe(self._any, _TAG, status)) is not None:
                kind, *content = message.recv()
                if kind == "left":
                    sequences, call = content
                    self._left[status.Get_source()] = sequences, call, time.monotonic()
                else:
                    group, sequence, call = content
                    self._given_up.append((group, Notice(status.Get_source(), kind, sequence, call)))
