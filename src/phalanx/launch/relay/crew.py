"""One rank as the relay knows it: its keeper's connection, its output on the way to the supervisor, its end."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch.rank.descriptors import RankEnds
from phalanx.launch.relay.channel import ERR, OUT, Channel

__all__ = ["Member", "Pipe"]

# How many bytes of a stream may wait here for the supervisor before the keeper's messages are left unread.
_MOST_WAITING = 1 << 20


@dataclass(eq=False)
class Pipe:
    """One output stream of a rank.

    Attributes:
        descriptor: the pipe to the supervisor, non-blocking.
        waiting: what it has not taken yet.
    """

    descriptor: int
    waiting: bytearray = field(default_factory=bytearray)

    @staticmethod
    def pair(ends: RankEnds) -> dict[bytes, Pipe]:
        """Standard output and standard error of a rank, by the kind of their frames."""
        return {OUT: Pipe(ends.out_write), ERR: Pipe(ends.err_write)}

    def flush(self) -> None:
        """Write as much as is taken now."""
        try:
            while self.waiting:
                del self.waiting[: os.write(self.descriptor, self.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            # The supervisor reads no more: it has drained an ended rank, or is ending itself.
            self.waiting.clear()


@dataclass(eq=False)
class Member:
    """One rank.

    Attributes:
        number: the rank.
        pipes: its output streams, by the kind of their frames.
        channel: its keeper's connection; None before it has come and after it has gone.
        here: what the keeper reported when it came (its first message); empty before.
        pid: the rank's process id on its host; 0 before it has been forked.
        status: its exit code, or minus the signal that ended it; None while it has not ended.
        ended_at: when, on this host's monotonic clock.
        by_others: whether its keeper ended it because the MPI launcher wanted that.
        by_itself: whether its keeper found that it had begun to end before anybody asked it to.
        out_of_memory: whether its host's kernel had by then killed a process of the job's cgroup for want of memory.
        reported: whether it has reported why it failed.
        announced: whether the supervisor has been sent its end.
    """

    number: int
    pipes: dict[bytes, Pipe]
    channel: Channel | None = None
    here: dict[str, Any] = field(default_factory=dict)
    pid: int = 0
    status: int | None = None
    ended_at: float = 0.0
    by_others: bool = False
    by_itself: bool = False
    out_of_memory: bool = False
    reported: bool = False
    announced: bool = False

    @property
    def waiting(self) -> int:
        """Bytes of its output that the supervisor has not taken yet."""
        return sum(len(pipe.waiting) for pipe in self.pipes.values())

    @property
    def congested(self) -> bool:
        """Whether so much waits that its keeper should wait too."""
        return any(len(pipe.waiting) >= _MOST_WAITING for pipe in self.pipes.values())

    def pipe(self, kind: bytes, data: bytes) -> tuple[Pipe, bytes]:
        """The pipe for a frame of its keeper's, and the bytes for it."""
        return self.pipes[kind], data

    @property
    def host(self) -> tuple[str, str]:
        """Its host, as distinguished from all others; known once its keeper has come."""
        return self.here["machine"], self.here["host"]
