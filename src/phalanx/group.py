"""A set of ranks that talk to each other, with ranks counted within the set."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GatherOptions

from phalanx.errors import ArgumentError, ClosedError, DeviceMismatch, RankError

__all__ = ["Group", "Session"]

_SUM = dist.ReduceOp.SUM


class Session:
    """The state that all groups of one world share: whether it is still open, and which devices it serves."""

    def __init__(self, device_types: frozenset[str]) -> None:
        self.closed = False
        self.device_types = device_types
        self.groups: weakref.WeakSet[Group] = weakref.WeakSet()

    def close(self) -> None:
        """Close all groups.

        They drop torch's process groups, so that a script that keeps a ``Group`` does not keep those alive.
        """
        self.closed = True
        for group in list(self.groups):
            group._let_go()


class Group:
    """Point-to-point and collective communication among some ranks of the world.

    Every method is the ``torch.distributed`` function of the same name with this group filled in, and all
    ranks named (``src``, ``dst``) counted within the group. A collective must be called by every rank of the
    group, in the same order. Tensors are changed in place where torch changes them. With ``async_op=True`` a
    collective returns a ``torch.distributed.Work`` at once; ``wait()`` on it before touching the tensors.

    All methods raise:
        ClosedError: after ``phalanx.close()``.
        RankError: a rank outside the group was named.
        DeviceMismatch: a tensor is on a device that the group's backend does not serve.
        CollectiveMismatch, PeerLost, CollectiveTimeout: the ranks do not agree, one has ended, or one has
            not come in time (backend ``phalanx``).

    Attributes:
        rank: this process's rank within the group.
        size: the number of ranks.
        ranks: the members' ranks in the world, in group order.
    """

    def __init__(self, process_group: dist.ProcessGroup, ranks: Sequence[int], session: Session) -> None:
        self._process_group: dist.ProcessGroup | None = process_group
        self._session = session
        session.groups.add(self)
        self._sum_in_place: Callable[[torch.Tensor], bool] | None = getattr(process_group, "sum_in_place", None)
        self.ranks = tuple(ranks)
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}, world ranks {list(self.ranks)}>"

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch process group, for libraries that take one (``DistributedDataParallel``, FSDP, …)."""
        return self._use()

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dst``; returns when it may be reused."""
        dist.send(tensor, group=self._use(tensor), tag=tag, group_dst=self._other(dst))

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into ``tensor`` from rank ``src``, or from the rank that sends first; returns the sender's rank."""
        group = self._use(tensor)
        if src is not None:
            dist.recv(tensor, group=group, tag=tag, group_src=self._other(src))
            return src
        return dist.get_group_rank(group, dist.recv(tensor, group=group, tag=tag))

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> dist.Work:
        """Start sending ``tensor`` to rank ``dst``; ``wait()`` before changing it."""
        return _work(dist.isend(tensor, group=self._use(tensor), tag=tag, group_dst=self._other(dst)))

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> dist.Work:
        """Start receiving into ``tensor`` from rank ``src``, or from any rank; ``wait()`` before reading it."""
        source = None if src is None else self._other(src)
        return _work(dist.irecv(tensor, group=self._use(tensor), tag=tag, group_src=source))

    # -- one to all, all to one --------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int = 0, async_op: bool = False) -> dist.Work | None:
        """Copy ``tensor`` of rank ``src`` into ``tensor`` of every rank (same shape and dtype)."""
        return dist.broadcast(tensor, group=self._use(tensor), async_op=async_op, group_src=self._member(src))

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Copy ``scatter_list[r]`` of rank ``src`` into ``tensor`` of rank r.

        Only ``src`` gives ``scatter_list``: one tensor per rank, each of the shape of ``tensor``.
        """
        group = self._use(tensor, *(scatter_list or ()))
        return dist.scatter(tensor, scatter_list, group=group, async_op=async_op, group_src=self._member(src))

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Collect every rank's ``tensor`` into ``gather_list`` of rank ``dst``, which alone gives that list."""
        group = self._use(tensor, *(gather_list or ()))
        return dist.gather(tensor, gather_list, group=group, async_op=async_op, group_dst=self._member(dst))

    def gather_single(
        self,
        output: torch.Tensor | None,
        tensor: torch.Tensor,
        dst: int = 0,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Collect every rank's ``tensor`` into one of rank ``dst``: ``output`` holds them in rank order.

        ``torch.distributed`` has this function from 2.15 on; here it works with older ones too.

        Args:
            output: on ``dst`` a tensor of ``size`` times the elements of ``tensor``; ignored on the other ranks.
            tensor: what this rank gives.
            dst: the rank that gathers.
            async_op: return a ``Work`` at once.
        """
        is_root = self._member(dst) == self.rank
        group: Any = self._use(tensor, *((output,) if is_root and output is not None else ()))
        if not hasattr(group, "gather_single"):  # another backend's group, in a torch older than 2.15
            if is_root and output is None:
                raise ArgumentError("gather_single: the destination rank must give a tensor to gather into")
            parts = list(output.view(self.size, *tensor.shape).unbind()) if is_root and output is not None else None
            return dist.gather(tensor, parts, group=group, async_op=async_op, group_dst=dst)
        options = GatherOptions()
        options.rootRank, options.asyncOp = dst, async_op
        work: dist.Work | None = group.gather_single(output, tensor, options)
        if not async_op and work is not None:  # some backends return before the operation is done
            work.wait()
        return work if async_op else None

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: Any = _SUM, async_op: bool = False) -> dist.Work | None:
        """Reduce every rank's ``tensor`` into that of rank ``dst``; on the others it is left undefined."""
        group = self._use(tensor)
        return dist.reduce(tensor, op=op, group=group, async_op=async_op, group_dst=self._member(dst))

    # -- all to all --------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any = _SUM, async_op: bool = False) -> dist.Work | None:
        """Replace ``tensor`` by the reduction of all ranks' tensors (same shape and dtype)."""
        # torch's own way to the backend takes longer than moving a few bytes, so it is avoided. A closed group has no
        # quick way, and is refused below.
        quick = self._sum_in_place
        if quick is not None and op is _SUM and not async_op and type(tensor) is torch.Tensor and quick(tensor):
            return None
        return dist.all_reduce(tensor, op=op, group=self._use(tensor), async_op=async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = _SUM,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_list[r]`` of all ranks into ``output`` of rank r."""
        return dist.reduce_scatter(output, input_list, op=op, group=self._use(output, *input_list), async_op=async_op)

    def all_gather(
        self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool = False
    ) -> dist.Work | None:
        """Copy ``tensor`` of rank r into ``tensor_list[r]`` on every rank."""
        return dist.all_gather(tensor_list, tensor, group=self._use(tensor, *tensor_list), async_op=async_op)

    def all_to_all(
        self,
        output_tensor_list: list[torch.Tensor],
        input_tensor_list: list[torch.Tensor],
        async_op: bool = False,
    ) -> dist.Work | None:
        """Send ``input_tensor_list[r]`` to rank r and receive rank r's into ``output_tensor_list[r]``."""
        group = self._use(*output_tensor_list, *input_tensor_list)
        return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)

    def barrier(self, async_op: bool = False) -> dist.Work | None:
        """Wait until every rank of the group has called this."""
        return dist.barrier(group=self._use(), async_op=async_op)

    # -- objects: anything that can be pickled, between ranks that trust each other -----------------

    def send_object_list(self, object_list: list[Any], dst: int) -> None:
        """Send the objects in ``object_list`` to rank ``dst``."""
        dist.send_object_list(object_list, group=self._use(), group_dst=self._other(dst))

    def recv_object_list(self, object_list: list[Any], src: int | None = None) -> int:
        """Fill ``object_list`` (of the sender's length) from rank ``src``, or any rank; returns the sender's rank."""
        group = self._use()
        if src is not None:
            dist.recv_object_list(object_list, group=group, group_src=self._other(src))
            return src
        return dist.get_group_rank(group, dist.recv_object_list(object_list, group=group))

    def broadcast_object_list(self, object_list: list[Any], src: int = 0) -> None:
        """Replace every entry of ``object_list`` by that of rank ``src``; same length everywhere."""
        dist.broadcast_object_list(object_list, group=self._use(), group_src=self._member(src))

    def scatter_object_list(self, output_list: list[Any], input_list: list[Any] | None = None, src: int = 0) -> None:
        """Put ``input_list[r]`` of rank ``src`` into ``output_list[0]`` of rank r."""
        dist.scatter_object_list(output_list, input_list, group=self._use(), group_src=self._member(src))

    def gather_object(self, obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0) -> None:
        """Collect every rank's ``obj`` into ``object_gather_list`` of rank ``dst``, which alone gives it."""
        dist.gather_object(obj, object_gather_list, group=self._use(), group_dst=self._member(dst))

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        """Put rank r's ``obj`` into ``object_list[r]`` (of the group's size) on every rank."""
        dist.all_gather_object(object_list, obj, group=self._use())

    # -- checks ------------------------------------------------------------------------------------

    def _use(self, *tensors: torch.Tensor) -> dist.ProcessGroup:
        """The process group, after checking that the world is open and that the backend serves the tensors' devices."""
        session, group = self._session, self._process_group
        if session.closed or group is None:
            raise ClosedError("this group was used after phalanx.close(); move the call before it")
        for tensor in tensors:
            if tensor.device.type not in session.device_types:
                raise DeviceMismatch(
                    f"rank {self.rank} of the group gave a tensor on {tensor.device}, but the group's backend "
                    f"serves {' and '.join(sorted(session.device_types))}. Move it with .to(...) first, or "
                    f"choose another backend in phalanx.init()"
                )
        return group

    def _let_go(self) -> None:
        self._process_group = self._sum_in_place = None

    def _member(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise RankError.not_in_group(rank, self.size, self.ranks)
        return rank

    def _other(self, rank: int) -> int:
        if self._member(rank) == self.rank:
            raise RankError(f"rank {rank} is this process itself; a message needs another rank")
        return rank


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:  # torch returns None outside the group, and a Group exists only in its members
        raise RankError("this process is not in the group")
    return work
