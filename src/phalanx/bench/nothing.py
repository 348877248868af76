"""A backend that does nothing: what remains is what torch.distributed itself costs, for any backend in Python."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench.cases import NOTHING
from phalanx.c10d.messages import DoneWork

__all__ = ["NothingGroup", "register_nothing"]

_COLLECTIVES = (
    "allreduce",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "broadcast",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "gather",
    "gather_single",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
)


class NothingGroup(dist.ProcessGroup):
    """A process group whose operations are done when they are called, and move nothing.

    Args:
        rank, size: this process's place in the group.
        asynchronous: whether collectives are called with ``async_op=True``, and so return a handle.
    """

    def __init__(self, rank: int, size: int, asynchronous: bool) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._done = DoneWork([])
        self._answer = self._done if asynchronous else None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NOTHING

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        return self._done

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        return self._done

    def shutdown(self) -> None:
        pass


def _collective(self: NothingGroup, *arguments: Any, **named: Any) -> Any:
    return self._answer


for _name in _COLLECTIVES:
    setattr(NothingGroup, _name, _collective)


def register_nothing(asynchronous: bool) -> None:
    """Let ``new_group(backend="nothing")`` make such groups in this process."""

    def create(given: Any, _options: Any) -> NothingGroup:
        group = NothingGroup(given.group_rank, given.group_size, asynchronous)
        group._set_group_name(given.group_id)
        return group

    dist.Backend.register_backend(NOTHING, create, extended_api=True, devices=["cpu"])
