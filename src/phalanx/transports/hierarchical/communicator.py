"""The communicator for a group over several hosts: shared memory inside, TCP between.

A *host* is a set of ranks that share memory; so the processes of two containers of one machine may be two. Each has a
*leader*, its lowest rank. The ranks at the same place of their hosts are a *lane*: they exchange one slice of what has
to travel, so all ranks of a host use its link, and every byte crosses it once.

Every collective begins with the leaders' frames (``frames.py``), which compare the calls, and carry the data as well if
it is small. Sums are added in the order of the ranks within a host, and in that of the hosts between them, so the bits
are the same on every rank and in every run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from datetime import timedelta

import torch

from phalanx.diagnosis.ends import tell_of_failure
from phalanx.membership.abort import GroupAbort
from phalanx.membership.liveness import Gone
from phalanx.transports.contract import Message
from phalanx.transports.hierarchical.copies import Copies
from phalanx.transports.hierarchical.engine import Engine
from phalanx.transports.hierarchical.frames import Frames
from phalanx.transports.hierarchical.layout import Layout, Scratch, Sizes
from phalanx.transports.hierarchical.messages import HierarchicalMessages
from phalanx.transports.hierarchical.reason import Reason
from phalanx.transports.hierarchical.reductions import Reductions
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

__all__ = ["HierarchicalCommunicator"]

_LEADERS_GRACE = timedelta(seconds=5)


class HierarchicalCommunicator(Reductions, Copies):
    """Collectives over several hosts.

    Args:
        layout: where the ranks are.
        rank: this process's rank in the group.
        local: a communicator of the ranks of this host, in their order; its methods are used by this one alone.
        group: what this rank knows of the group.
        timeout: how long every operation waits for other ranks.
        sizes: at which algorithms change, equal on all ranks; small ones make tests reach many chunks cheaply.
        engine: makes what carries bytes between hosts.
    """

    rank_order_sums = False

    def __init__(
        self,
        layout: Layout,
        rank: int,
        local: SharedMemoryCommunicator,
        group: GroupAbort,
        timeout: timedelta,
        sizes: Sizes | None = None,
        engine: Callable[[Layout, GroupAbort, timedelta], Engine] = Engine,
    ) -> None:
        self.rank, self.size = rank, sum(map(len, layout.hosts))
        self.layout, self.local, self._group = layout, local, group
        after = [(rank + step) % self.size for step in range(1, self.size)]
        self.others = [each for each in after if each not in layout.here]
        self.sizes = sizes or Sizes.among(len(layout.hosts))
        self.scratch = Scratch()
        self.engine = "TCP" if len(layout.hosts) == self.size else "shared memory and TCP"
        self._reason = reason = Reason(group, layout, local, timeout, self)
        self.call = reason.call
        with contextlib.ExitStack() as made:
            made.callback(group.close)
            self.remote = engine(layout, group, timeout)
            made.callback(self.remote.close)
            self.frames = Frames(layout, local, self.remote, self.sizes.frame_bytes)
            self.messages = HierarchicalMessages(layout, local, group, timeout, reason)
            made.callback(self.messages.give_up)
            local.part_of = self.call.text
            local.outer_error = self.messages.explain
            self.set_timeout(timeout)
            group.join(reason, timeout.total_seconds())
            tell_of_failure(reason)
            made.pop_all()

    def barrier(self) -> None:
        with self.call.named("barrier", None) as call:
            self.local.barrier()
            self.frames.meet(call)

    # -- messages and life -------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return self.messages.mailbox.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        return self.messages.mailbox.recv(tensor, peer, tag)

    def rest(self) -> None:
        self.messages.mailbox.rest()

    def end_messages(self) -> None:
        self.messages.end()

    def compare_rest(self, patience_s: float) -> None:
        self.call.compare_last(patience_s)

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Find those of these ranks that have gone (``membership/liveness.py``)."""
        found = self._reason.gone([rank for rank in ranks if rank not in self.layout.here])
        places = [place for place, rank in enumerate(self.layout.here) if rank in ranks]
        return found | {self.layout.here[place]: gone for place, gone in self.local.gone(places).items()}

    def set_timeout(self, timeout: timedelta, of_messages: timedelta | None = None) -> None:
        # In a collective, a rank that waits for its leader waits longer than that one waits for another host.
        self.local.set_timeout(timeout + _LEADERS_GRACE, of_messages=of_messages or timeout)
        self.remote.set_timeout(timeout)
        self.messages.set_timeout(of_messages or timeout)
        self.call.timeout_s = timeout.total_seconds()

    def leave(self) -> list[threading.Thread]:
        self.messages.end()
        self.remote.stop(in_order=not self._reason.fails)
        return self.messages.threads() + self.remote.threads()

    def give_back(self) -> None:
        self._group.close()

    def group_fails(self, error: BaseException, cause: str) -> None:
        self._reason.script_fails(error, cause)
        self.local.group_fails(error, cause)

    def abort(self, doing: str = "") -> None:
        with contextlib.ExitStack() as each:  # what fails must not keep the others from it
            each.callback(self.messages.abort)
            each.callback(self.remote.abort)
            each.callback(self.local.abort, doing)

    def close(self) -> None:
        self.messages.close()
        self.remote.close(in_order=not self._reason.fails)
        self.local.close()
        self._group.close()
