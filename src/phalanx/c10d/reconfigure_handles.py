"""The handles by which processes name each other when a group is reconfigured, and the order that follows from them.

A handle stands for one process's side of one group, as long as that exists: it stays the same through reconfigurations,
and a process that is started in place of a lost one has another. Programs pass handles on in ways of their own, so what
comes back is checked.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from phalanx.errors import ArgumentError

__all__ = ["Handle", "digest", "ordered"]

_TOKEN_BYTES = 8
_TEXT = re.compile(r"phalanx:(0|[1-9][0-9]{0,9}):([0-9a-f]{16})", re.ASCII)


@dataclass(frozen=True, order=True)
class Handle:
    """A process's side of a group.

    Attributes:
        rank: the rank that it was given when it made the group; several may have been given the same.
        token: what no other process has.
    """

    rank: int
    token: str

    @classmethod
    def new(cls, rank: int) -> Handle:
        """The handle of this process's side of a group that it makes now."""
        return cls(rank, secrets.token_hex(_TOKEN_BYTES))

    @classmethod
    def parse(cls, text: str) -> Handle:
        """A handle of another process, as it was passed on.

        Raises:
            ArgumentError: it is none.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ArgumentError(
                f"{text[:80]!r} is not a handle of a group of Phalanx: give what "
                "torch.distributed._get_reconfigure_handle() returned on each process, unchanged"
            )
        return cls(int(match[1]), match[2])

    def __str__(self) -> str:
        return f"phalanx:{self.rank}:{self.token}"


def ordered(texts: Collection[str]) -> list[Handle]:
    """The members of a group in the order of their new ranks.

    Args:
        texts: one handle for each. The order of a list is kept; those of a set are sorted by the ranks that they were
            given first.

    Raises:
        ArgumentError: the list is empty, a handle stands in it twice, or a text is not a handle.
    """
    handles = [Handle.parse(text) for text in texts]
    if not handles:
        raise ArgumentError("reconfigure: a group has one rank at least; got no handle")
    if len(set(handles)) < len(handles):
        twice = next(handle for handle in handles if handles.count(handle) > 1)
        raise ArgumentError(
            f"reconfigure: the handle {twice} is listed twice; give that of each process once (a process that was "
            "started anew has a new one)"
        )
    return handles if isinstance(texts, (list, tuple)) else sorted(handles)


def digest(handles: Collection[Handle]) -> str:
    """A short text that is the same on all processes that give the same members in the same order."""
    return hashlib.sha256(" ".join(map(str, handles)).encode()).hexdigest()[:32]
