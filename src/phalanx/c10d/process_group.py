"""torch's side of a backend: the process group that torch calls.

A Python subclass of ``ProcessGroup``, because ``Backend`` cannot be subclassed from Python and this costs less per call
than a C++ backend behind the dispatcher. Each of its methods is one of ``collectives.py`` behind a front
(``dispatcher.py``), which passes plain calls on and gives all others what torch's dispatcher would.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.c10d.collectives import Collectives
from phalanx.c10d.dispatcher import front, watch_all, watch_calls_of_cpp
from phalanx.c10d.torch_versions import adopt_older_names
from phalanx.c10d.uncompiled import uncompiled
from phalanx.errors import ArgumentError

__all__ = ["PhalanxProcessGroup"]


@uncompiled
class PhalanxProcessGroup(Collectives):
    """A process group over a communicator. Made by ``init_process_group`` and ``new_group``, not by hand."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        watch_calls_of_cpp()

    # For torch >= 2.15; the groups of ``reconfigurable.py`` can.
    supports_reconfigure = False

    def get_reconfigure_handle(self) -> str:
        """Refused.

        Raises:
            ArgumentError: the ranks of this group stay as they are.
        """
        raise ArgumentError(
            f"the ranks of process group {self.group_name!r} stay as they are: give init_process_group "
            "enable_reconfigure=True for one whose ranks can change"
        )

    def reconfigure(self, opts: Any) -> Any:
        """Refused, as :meth:`get_reconfigure_handle`."""
        self.get_reconfigure_handle()

    def boxed(self) -> torch.ScriptObject:
        """This group as an argument of an operation of torch's library ``c10d``, called by itself."""
        watch_all()
        return super().boxed()

    allreduce: Any = front("allreduce", Collectives.allreduce)
    allreduce_coalesced: Any = front("allreduce_coalesced", Collectives.allreduce_coalesced)
    reduce: Any = front("reduce", Collectives.reduce)
    reduce_scatter: Any = front("reduce_scatter", Collectives.reduce_scatter)
    _reduce_scatter_base: Any = front("_reduce_scatter_base", Collectives._reduce_scatter_base)
    reduce_scatter_single: Any = front("reduce_scatter_single", Collectives.reduce_scatter_single)
    reduce_scatter_single_coalesced: Any = front(
        "reduce_scatter_single_coalesced", Collectives.reduce_scatter_single_coalesced
    )
    broadcast: Any = front("broadcast", Collectives.broadcast)
    allgather: Any = front("allgather", Collectives.allgather)
    allgather_coalesced: Any = front("allgather_coalesced", Collectives.allgather_coalesced)
    _allgather_base: Any = front("_allgather_base", Collectives._allgather_base)
    all_gather_single: Any = front("all_gather_single", Collectives.all_gather_single)
    all_gather_single_coalesced: Any = front("all_gather_single_coalesced", Collectives.all_gather_single_coalesced)
    gather: Any = front("gather", Collectives.gather)
    gather_single: Any = front("gather_single", Collectives.gather_single)
    scatter: Any = front("scatter", Collectives.scatter)
    alltoall: Any = front("alltoall", Collectives.alltoall)
    all_to_all_single: Any = front("all_to_all_single", Collectives.all_to_all_single)
    barrier: Any = front("barrier", Collectives.barrier)
    send: Any = front("send", Collectives.send)
    recv: Any = front("recv", Collectives.recv)
    recv_anysource: Any = front("recv_anysource", Collectives.recv_anysource)


adopt_older_names(PhalanxProcessGroup)
