"""What the ranks of an MPI job know of each other's processes: where they are, whether they run, what they did last.

The ranks tell each other once, when MPI starts, where their processes and their flight recorders are. Nothing is read
there before an error needs it, and then a process is also asked where it is (``diagnosis/stacks.py``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.diagnosis.call_site import shown
from phalanx.diagnosis.reading import facts_in, read_recording
from phalanx.diagnosis.recorder import open_recorder, own_place
from phalanx.diagnosis.stacks import be_seen, place_of_main
from phalanx.lost import rank_of_group
from phalanx.system.host import machine_name
from phalanx.system.processes import has_ended, start_of, state_of, state_text

__all__ = ["Peers"]


class _Peer(NamedTuple):
    """What a rank tells the others of its process.

    Attributes:
        pid, start, namespace: its process id, when it was started, and the namespace in which that is its id; empty if
            that is not known.
        host: the name of its host.
        descriptor, at: where its flight recorder is; -1 if it has none.
    """

    pid: int
    start: int
    namespace: str
    host: str
    descriptor: int
    at: int


class Peers:
    """The processes of the world's ranks; all ranks make it at the same time.

    Args:
        world: MPI's communicator of all ranks.
        is_beside: whether a rank of the world shares memory with this one.
    """

    def __init__(self, world: Any, is_beside: Callable[[int], bool]) -> None:
        namespace = ""
        with contextlib.suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        open_recorder()
        own = (os.getpid(), start_of(os.getpid()), namespace, machine_name(), *own_place())
        self._peers = [_Peer(*said) for said in world.allgather(own)]
        self._own, self._is_beside = self._peers[world.rank], is_beside
        be_seen()

    def beside(self) -> dict[int, int]:
        """The process ids of the world's ranks that this one can look at, by rank; itself among them."""
        return {rank: peer.pid for rank, peer in enumerate(self._peers) if self._can_be_seen(rank)}

    def name(self, rank: int, called: int) -> str:
        """A rank of the world for people: ``rank 1 of the group (pid 70 on h1)``.

        Args:
            rank: which one.
            called: its number in the group.
        """
        peer = self._peers[rank]
        return rank_of_group(called, peer.pid, peer.host)

    def standing(self, rank: int) -> str:
        """In words why the process of a rank of the world does not run on; empty if it does, or cannot be seen."""
        if not self._can_be_seen(rank):
            return ""
        state = state_of(self._peers[rank].pid)
        return state_text(state) if state in ("T", "t") else ""

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank of the world is seen to have ended."""
        peer = self._peers[rank]
        return self._can_be_seen(rank) and has_ended(peer.pid, peer.start)

    def at(self, rank: int) -> str:
        """Where the main thread of a rank of the world is in its program; empty if that cannot be found out."""
        return shown(place_of_main(self._peers[rank].pid)) if self._can_be_seen(rank) else ""

    def facts(self, rank: int) -> dict[str, Any]:
        """The attributes of :class:`PeerLost` that are known of a rank of the world, and whether it ``was_in_it``.

        What it did last is known only of a rank of this host. Its recorder is read where its process has it, so it is
        not known of one whose process has ended.
        """
        peer = self._peers[rank]
        facts: dict[str, Any] = {"rank": rank, "pid": peer.pid, "host": peer.host}
        if peer.descriptor < 0 or not self._can_be_seen(rank):
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

    def _can_be_seen(self, rank: int) -> bool:
        """Whether a rank's process id means the same here: the same kernel and the same namespace."""
        namespace = self._peers[rank].namespace
        return bool(namespace) and namespace == self._own.namespace and self._is_beside(rank)
