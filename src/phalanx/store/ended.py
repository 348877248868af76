"""Ranks that have ended in order while others wait for them in the launcher's store.

A rank that ends in order ends no job, and a store cannot know that nobody will write a key any more. The launcher
knows which ranks have ended, and the keys of a meeting (``phalanx.init()``) say which ranks have all that they need of
it. So the store ends every wait in a meeting that a rank has not seen through and never will.

Where a script makes the world by torch's ``init_process_group``, the first thing that a rank writes for the others is
that it has come (``transports/shm/segment.py``). The store ends every wait for that word of a rank that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Collection, Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launcher imports this, and must not import torch
    from torch._C._distributed_c10d import Store

__all__ = ["ENDED", "SLASH", "EndsChannel", "ended_of", "is_vain", "meeting_prefix", "met_key", "ranks_that_ended"]

#: Under this key the store keeps the ranks that have ended, each with its host, as JSON.
ENDED = "phalanx/ended"
#: What torch's client puts before each key.
SLASH = b"/"
_OF_MEETING = re.compile(rb"/phalanx/\d+/world/\d+/")
# That a rank of the world has come: rank 0 by its offer, any other by its answer (transports/shm/segment.py).
_HAS_COME = re.compile(rb".*/phalanx/[^/]+/of \d+/shm/(?:offer|[^/]+/answer/(\d+))$", re.DOTALL)
_PIPE_BYTES = 1 << 20  # the kernel may grant less


def meeting_prefix(attempt: int, opening: int) -> str:
    """What the keys of a meeting begin with, before a slash."""
    return f"phalanx/{attempt}/world/{opening}"


def met_key(rank: int) -> str:
    """The key, within those of a meeting, by which a rank says that it has all that it needs of the others."""
    return f"met/{rank}"


def is_vain(key: bytes, ended: Collection[int], entries: Container[bytes]) -> bool:
    """Whether nobody should wait for a key of the launcher's store any more.

    Args:
        key: the key, as torch's client names it.
        ended: the ranks that have ended.
        entries: the keys that are there.
    """
    if (come := _HAS_COME.match(key)) is not None:
        return int(come[1] or 0) in ended
    meeting = _OF_MEETING.match(key)
    return meeting is not None and any(meeting[0] + met_key(rank).encode() not in entries for rank in ended)


def ranks_that_ended(store: Store, meeting: Store) -> dict[int, str]:
    """The ranks that have ended and had not all that they needed of a meeting, each with its host.

    Args:
        store: the launcher's.
        meeting: the part of it that is the meeting's.
    """
    if not store.check([ENDED]):
        return {}
    ended: dict[str, str] = json.loads(store.get(ENDED))
    return {int(rank): host for rank, host in ended.items() if not meeting.check([met_key(int(rank))])}


def ended_of(store: Store, keys: Iterable[str]) -> dict[int, str]:
    """The ranks that have ended and should have written these keys, by which they say that they have come.

    Args:
        store: the launcher's, or one that knows of no ends.
        keys: with the meeting's own name in front; those that say something else are left out.
    """
    if not store.check([ENDED]):
        return {}
    ended: dict[str, str] = json.loads(store.get(ENDED))
    come = [_HAS_COME.match(SLASH + key.encode()) for key in keys]
    ranks = {int(each[1] or 0) for each in come if each is not None}
    return {int(rank): host for rank, host in ended.items() if int(rank) in ranks}


class EndsChannel:
    """How the process that knows of the ranks' ends tells the process of the store: a pipe, with a line for each end.

    Made before the store's process is forked. Each side keeps its own end of the pipe, any other process neither.
    Neither side waits for the other; what does not fit into the pipe, of a store that nobody uses, is left out.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._partial = b""

    def tell(self, rank: int, host: str) -> None:
        """A rank has ended in order on this host."""
        with contextlib.suppress(OSError):  # the store has ended, or its pipe is full
            os.write(self._write, json.dumps([rank, host]).encode() + b"\n")  # in one piece: it is short

    def fileno(self) -> int:
        """What can be read when there is news."""
        return self._read

    def hear(self) -> dict[int, str] | None:
        """The ranks that have ended since the last call, each with its host; None if nothing will follow."""
        try:
            data = os.read(self._read, _PIPE_BYTES)
        except BlockingIOError:
            return {}
        *lines, self._partial = (self._partial + data).split(b"\n")
        return dict(map(json.loads, lines)) if data else None

    def keep_reading_end(self) -> None:
        """Be the process of the store."""
        self._write = self._close(self._write)

    def keep_writing_end(self) -> None:
        """Be the process that knows of the ends."""
        self._read = self._close(self._read)

    def close(self) -> None:
        """Be neither."""
        self._read, self._write = self._close(self._read), self._close(self._write)

    @staticmethod
    def _close(descriptor: int) -> int:
        if descriptor >= 0:
            os.close(descriptor)
        return -1
