"""How a group over several hosts breaks: the reason goes by the job's store, so every rank raises the same.

The rank that finds something wrong writes down why, and aborts its host's memory and its connections. That wakes the
others, wherever they wait, and they look for the reason in the store.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.transports.hosts.lane import TransferFailed, TransferLate
from phalanx.transports.hosts.layout import Layout
from phalanx.watch.calls import listed
from phalanx.words import format_named

__all__ = ["Differs", "Reason"]

# How long to wait for a reason, or for other ranks' calls. A rank in a call is woken by the break, and writes at once.
PATIENCE_S = 2.0
_KINDS: dict[str, type[PeerLost | CollectiveTimeout]] = {"lost": PeerLost, "late": CollectiveTimeout}


class Differs(Exception):
    """The ranks' calls do not match."""


class Reason:
    """Why a group broke, as its ranks share it.

    Args:
        store: the group's own part of the job's store.
        rank: this process's rank in the group.
        layout: where the ranks are.
        abort: wakes the ranks that wait for this one.
        aborted: whether a rank of this host has done so.
    """

    def __init__(
        self, store: Store, rank: int, layout: Layout, abort: Callable[[], None], aborted: Callable[[], bool]
    ) -> None:
        self._store, self._rank, self._layout, self._abort, self._aborted = store, rank, layout, abort, aborted
        self._size = sum(map(len, layout.hosts))

    def error(self, error: BaseException, call: str, timeout_s: float) -> BaseException:
        """What this rank raises.

        Args:
            error: what it has found.
            call: what it was doing.
            timeout_s: the group's timeout.
        """
        own = self._found(error)
        with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
            self._store.set(f"call/{self._rank}", call)
        why = self._tell(own) if own else None
        self._abort()
        if why is None:  # a consequence of what another rank has found, which tells it at once; or nobody else can
            why = self._told(PATIENCE_S) or self._tell(self._guessed(error, call, timeout_s))
        if why["kind"] == "differs":
            return CollectiveMismatch.of_calls(listed(self._calls(call), range(self._size)))
        if why["by"] == self._rank and own is not None:
            return error
        kind = _KINDS.get(str(why["kind"]), PeerLost)
        told: BaseException = kind(why["text"], group_rank=why["group_rank"])
        return told

    def _found(self, error: BaseException) -> dict[str, Any] | None:
        """The reason that an error of this rank is; None if it may be a consequence of what another has found."""
        group_rank = getattr(error, "group_rank", -1)
        text = f"on {self._layout.name(self._rank)}: {error}"
        if isinstance(error, (Differs, CollectiveMismatch)):
            return self._reason("differs", "", -1)
        if isinstance(error, CollectiveTimeout):
            return self._reason("late", text, group_rank)
        if isinstance(error, PeerLost):
            return None if self._aborted() else self._reason("lost", text, group_rank)
        if isinstance(error, Exception):
            return None
        text = f"rank {self._rank} of the group on {self._layout.name(self._rank)} was interrupted"
        return self._reason("interrupted", f"{text} ({type(error).__name__})", self._rank)

    def _guessed(self, error: BaseException, call: str, timeout_s: float) -> dict[str, Any]:
        """The reason as far as this rank can know it alone."""
        if not isinstance(error, TransferFailed):
            return self._reason("lost", str(error), getattr(error, "group_rank", -1))
        peer = error.peer
        who = f"rank {peer} of the group on {self._layout.name(peer)}"
        if isinstance(error, TransferLate):
            others = [rank for rank in self._layout.ranks_beside(peer) if rank != peer]
            also = f", or one of {format_named('rank', others)} beside it," if others else ""
            return self._reason(
                "late", f"{who}{also} did not come within {timeout_s:g} s while rank {self._rank} was in {call}", peer
            )
        return self._reason(
            "lost",
            f"{who} has ended, or the way to it is cut, while rank {self._rank} was in {call}. Look at that rank's own "
            f"output for the cause ({error})",
            peer,
        )

    def _reason(self, kind: str, text: str, group_rank: int) -> dict[str, Any]:
        return {"kind": kind, "text": text, "group_rank": group_rank, "by": self._rank}

    def _tell(self, reason: dict[str, Any]) -> dict[str, Any]:
        """Write down a reason; the one that was written first is what counts."""
        with contextlib.suppress(RuntimeError):
            return dict(json.loads(self._store.compare_set("broken", "", json.dumps(reason))))
        return reason

    def _told(self, patience_s: float) -> dict[str, Any] | None:
        with contextlib.suppress(RuntimeError):
            self._store.wait(["broken"], timedelta(seconds=patience_s))
            return dict(json.loads(self._store.get("broken")))
        return None

    def _calls(self, own: str) -> dict[int, str]:
        calls = {self._rank: own}
        until = time.monotonic() + PATIENCE_S
        while len(calls) < self._size:
            for rank in range(self._size):
                if rank not in calls and self._store.check([f"call/{rank}"]):
                    calls[rank] = self._store.get(f"call/{rank}").decode(errors="replace")
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return calls
