"""A set of ranks that talk to each other, with ranks counted within the set."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GatherOptions
from torch.distributed.constants import default_pg_timeout

from phalanx.c10d.torch_versions import function, group_among
from phalanx.errors import ArgumentError, ClosedError, DeviceMismatch, RankError
from phalanx.groups.values import ValueCalls

__all__ = ["Group", "Session"]

_SUM = dist.ReduceOp.SUM


class Session:
    """The state that all groups of one world share: whether it is open, which devices it serves, its timeout."""

    def __init__(self, device_types: frozenset[str], timeout: timedelta = default_pg_timeout) -> None:
        self.closed = False
        self.timeout = timeout
        self.device_types = device_types
        self.groups: weakref.WeakSet[Group] = weakref.WeakSet()

    def close(self) -> None:
        """Close all groups.

        They drop torch's process groups, so that a script that keeps a ``Group`` does not keep those alive.
        """
        self.closed = True
        for group in list(self.groups):
            group._let_go()


class Group(ValueCalls):
    """Point-to-point and collective communication among some ranks of the world.

    Methods on tensors are the ``torch.distributed`` functions of the same name with this group filled in, and all
    ranks named (``src``, ``dst``) are counted within the group. A collective must be called by every rank of the
    group, in the same order. Tensors are changed in place where torch changes them. A reduction may be given by its
    name, ``op="max"``. With ``async_op=True`` a collective returns a ``torch.distributed.Work`` at once; ``wait()`` on
    it before touching the tensors.

    Every method may raise the errors below.

    Raises:
        ArgumentError: an argument is of a kind that the method does not take, or has an unknown name.
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
        self._send_now: Callable[..., bool] | None = getattr(process_group, "send_now", None)
        self._recv_now: Callable[..., bool] | None = getattr(process_group, "recv_now", None)
        self.ranks = tuple(ranks)
        self._subgroups = 0  # how many were made of this group; it is part of their names
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
        quick = self._send_now  # as in all_reduce
        if quick is None or not quick(tensor, dst, tag):
            dist.send(tensor, group=self._use(tensor), tag=tag, group_dst=self._other(dst))

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into ``tensor`` from rank ``src``, or from the rank that sends first; returns the sender's rank."""
        quick = self._recv_now
        if src is not None and quick is not None and quick(tensor, src, tag):
            return src
        group = self._use(tensor)
        if src is not None:
            dist.recv(tensor, group=group, tag=tag, group_src=self._other(src))
            return src
        return dist.get_group_rank(group, dist.recv(tensor, group=group, tag=tag))

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> dist.Work:
        """Start sending ``tensor`` to rank ``dst``; ``wait()`` before changing it."""
        return dist.isend(tensor, group=self._use(tensor), tag=tag, group_dst=self._other(dst))  # type: ignore[return-value]

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> dist.Work:
        """Start receiving into ``tensor`` from rank ``src``, or from any rank; ``wait()`` before reading it."""
        source = None if src is None else self._other(src)
        return dist.irecv(tensor, group=self._use(tensor), tag=tag, group_src=source)  # type: ignore[return-value]

    def batch_isend_irecv(self, p2p_op_list: Sequence[tuple[Any, ...]]) -> list[dist.Work]:
        """Start several messages as one batch, in which the order of sends and receives does not matter.

        Args:
            p2p_op_list: the arguments of torch's ``P2POp``: ``(dist.isend, tensor, dst)`` or
                ``(dist.irecv, tensor, src)``, and a tag as the fourth if it is not 0.

        Returns:
            What to ``wait()`` for, one for each message.
        """
        group = self._use(*(entry[1] for entry in p2p_op_list))
        operations = [
            dist.P2POp(op, tensor, group=group, group_peer=self._other(peer), tag=tag[0] if tag else 0)
            for op, tensor, peer, *tag in p2p_op_list
        ]
        return dist.batch_isend_irecv(operations) if operations else []

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

    def scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor | None = None, src: int = 0, async_op: bool = False
    ) -> dist.Work | None:
        """Cut ``tensor`` of rank ``src`` into equal parts, and copy part r into ``output`` of rank r.

        Only ``src`` gives ``tensor``, of ``size`` times the elements of ``output``.
        """
        parts = None
        if self._member(src) == self.rank:
            if tensor is None or tensor.numel() != self.size * output.numel():
                given = "none" if tensor is None else f"one of {tensor.numel()} elements"
                wanted = f"{self.size} x {output.numel()} elements"
                raise ArgumentError(f"scatter_single: rank {src} must give a tensor of {wanted}; got {given}")
            parts = list(tensor.reshape(self.size, *output.shape).unbind())
        return self.scatter(output, parts, src, async_op)

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

        ``torch.distributed`` has this function from 2.14 on; here it works with older ones, and on every backend, too.

        Args:
            output: on ``dst`` a tensor of ``size`` times the elements of ``tensor``; ignored on the other ranks.
            tensor: what this rank gives.
            dst: the rank that gathers.
            async_op: return a ``Work`` at once.
        """
        is_root = self._member(dst) == self.rank
        group: Any = self._use(tensor, *((output,) if is_root and output is not None else ()))
        if self._sum_in_place is None:  # another backend's group: most have no such operation, whatever torch has
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
        return dist.reduce(tensor, op=_op(op), group=group, async_op=async_op, group_dst=self._member(dst))

    # -- all to all --------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any = _SUM, async_op: bool = False) -> dist.Work | None:
        """Replace ``tensor`` by the reduction of all ranks' tensors (same shape and dtype)."""
        # torch's own way to the backend takes longer than moving a few bytes, so it is avoided. A closed group has no
        # quick way, and is refused below.
        quick = self._sum_in_place
        if quick is not None and op is _SUM and not async_op and type(tensor) is torch.Tensor and quick(tensor):
            return None
        return dist.all_reduce(tensor, op=_op(op), group=self._use(tensor), async_op=async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = _SUM,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_list[r]`` of all ranks into ``output`` of rank r."""
        group = self._use(output, *input_list)
        return dist.reduce_scatter(output, input_list, op=_op(op), group=group, async_op=async_op)

    def all_gather(
        self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool = False
    ) -> dist.Work | None:
        """Copy ``tensor`` of rank r into ``tensor_list[r]`` on every rank."""
        return dist.all_gather(tensor_list, tensor, group=self._use(tensor, *tensor_list), async_op=async_op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Any = _SUM, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce all ranks' ``tensor`` and cut it into equal parts: part r goes into ``output`` of rank r."""
        group = self._use(output, tensor)
        return function("reduce_scatter_single")(output, tensor, op=_op(op), group=group, async_op=async_op)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool = False) -> dist.Work | None:
        """Copy every rank's ``tensor`` into ``output`` in rank order, on every rank."""
        group = self._use(output, tensor)
        return function("all_gather_single")(output, tensor, group=group, async_op=async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Cut ``tensor`` along its first dimension, send part r to rank r, and put rank r's into part r of ``output``.

        The parts are equal, or have the sizes given.
        """
        group = self._use(output, tensor)
        return dist.all_to_all_single(
            output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op
        )

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

    # -- parts of the group ------------------------------------------------------------------------

    def subgroup(self, ranks: Iterable[int]) -> Group | None:
        """Make a group of some ranks. Every rank of this group must call it, with the same ranks.

        Args:
            ranks: ranks of this group; their order here is their order in the new group.

        Returns:
            The group, or None on ranks that are not in it.

        Raises:
            RankError: a rank is not in this group or is listed twice, or no rank was given.
        """
        self._use()
        members = [self._member(rank) for rank in ranks]
        if not members or len(set(members)) != len(members):
            raise RankError(f"a group needs at least one rank, and each only once; got {members}")
        of_world = [self.ranks[member] for member in members]
        process_group = self._process_group_of(of_world)
        return Group(process_group, of_world, self._session) if process_group is not None else None

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Divide this group into groups of the ranks that give the same color. Every rank of it must call it.

        Args:
            color: a number for the group that this rank joins; None to join none.
            key: the order within the group; ranks with the same key keep their order.

        Returns:
            This rank's group, or None if its color is None.

        Costs one all-gather of objects, and one meeting of each group's members.
        """
        answers = self.all_gather_object((color, key))
        parts: dict[int, list[int]] = {}
        try:
            for rank in sorted(range(self.size), key=lambda rank: (answers[rank][1], rank)):
                if answers[rank][0] is not None:
                    parts.setdefault(answers[rank][0], []).append(rank)
            divided = [parts[each] for each in sorted(parts)]
        except TypeError:
            raise ArgumentError(f"split() takes numbers, or color=None; by rank, color and key are {answers}") from None
        return self._parts(divided)

    def _parts(self, parts: Sequence[Sequence[int]]) -> Group | None:
        """Make all groups of a division, which every rank gives alike; return this rank's, or None.

        All ranks must make all of them, because groups are named by the number of groups made before.
        """
        own = None
        for part in parts:
            own = self.subgroup(part) or own
        return own

    def _process_group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A process group of members of this one, given by their world ranks; None on the others."""
        self._subgroups += 1
        if self.ranks[self.rank] not in ranks:
            return None
        name = f"{self._use().group_name}/{self._subgroups}"
        return group_among(ranks, name, self._session.timeout)

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

    def _device_of_numbers(self) -> torch.device:
        types = self._session.device_types
        return torch.device("cpu" if "cpu" in types else min(types))

    def _let_go(self) -> None:
        self._process_group = self._sum_in_place = self._send_now = self._recv_now = None

    def _member(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise RankError.not_in_group(rank, self.size, self.ranks)
        return rank

    def _other(self, rank: int) -> int:
        if self._member(rank) == self.rank:
            raise RankError(f"rank {rank} is this process itself; a message needs another rank")
        return rank


def _op(op: Any) -> Any:
    """The reduction, which may be given by its name, as to torch's functional collectives."""
    found = getattr(dist.ReduceOp, op.upper(), None) if isinstance(op, str) else op
    if not isinstance(found, dist.ReduceOp):
        raise ArgumentError(f"op={op!r} is not a reduction; write 'sum', 'avg', 'min', 'max', 'product' or torch's own")
    return found
