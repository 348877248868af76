"""How a row of the table of operations is called: what is timed, through torch.distributed and through mpi4py.

Every function here returns a call without arguments that is complete when it returns. The forms of torch.distributed
that take lists have no counterpart in MPI. Their lists are views of one buffer here, so MPI's form for one buffer is
measured beside them. MPI's collectives are the blocking ones, or with ``async_op`` the non-blocking ones and ``Wait``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.bench.buffers import Buffers

__all__ = [
    "Call",
    "MpiBuffers",
    "mpi_call",
    "mpi_ping_pong",
    "partner_of",
    "torch_call",
    "torch_gather_single",
    "torch_ping_pong",
]

Call = Callable[[], Any]
TorchCall = Callable[[Any, "Buffers", bool], Call]


class MpiBuffers:
    """The same buffers as mpi4py takes them.

    Args:
        buffers: the memory.
        mpi: the module ``mpi4py.MPI``.
        datatype: the name of MPI's datatype for the elements.

    Attributes:
        send, recv: memory and datatype; None for a buffer that this rank does not have.
    """

    def __init__(self, buffers: Buffers, mpi: Any, datatype: str) -> None:
        self.mpi = mpi
        self.rank = buffers.rank
        self.size = buffers.size
        kind = getattr(mpi, datatype)
        self.send = None if buffers.send is None else [buffers.send.numpy(), kind]
        self.recv = None if buffers.recv is None else [buffers.recv.numpy(), kind]


MpiCall = Callable[[MpiBuffers, bool], Call]


def torch_call(name: str, arguments: Callable[[Buffers], tuple[Any, ...]], **keywords: Any) -> TorchCall:
    """A function of torch.distributed.

    Args:
        name: of the function.
        arguments: makes its arguments from the buffers.
        keywords: further arguments; ``group`` and ``async_op`` are added.
    """

    def prepare(group: Any, buffers: Buffers, asynchronous: bool) -> Call:
        from phalanx.c10d import torch_versions  # not at the top: the command line reads the table too, without torch

        function, given = torch_versions.function(name), arguments(buffers)
        if not asynchronous:
            return lambda: function(*given, group=group, **keywords)
        return lambda: function(*given, async_op=True, group=group, **keywords).wait()

    return prepare


def torch_gather_single(root: int) -> TorchCall:
    """``gather_single`` of a process group; torch.distributed has no function for it before 2.15.

    With a group that has no such method, the call raises NotImplementedError.
    """

    def prepare(group: Any, buffers: Buffers, asynchronous: bool) -> Call:
        from torch._C._distributed_c10d import GatherOptions

        gather_single = getattr(group, "gather_single", None)
        options = GatherOptions()
        options.rootRank, options.asyncOp = root, asynchronous

        def call() -> None:
            if gather_single is None:
                raise NotImplementedError("its process group has no gather_single in this version of torch")
            work = gather_single(buffers.recv, buffers.send, options)
            if work is not None:  # a synchronous call may return one too, which torch.distributed waits for
                work.wait()

        return call

    return prepare


def mpi_call(method: str, arguments: Callable[[MpiBuffers], tuple[Any, ...]]) -> MpiCall:
    """A method of mpi4py's communicator ``COMM_WORLD``.

    Args:
        method: the name of its blocking form.
        arguments: makes its arguments from the buffers.
    """

    def prepare(buffers: MpiBuffers, asynchronous: bool) -> Call:
        world, given = buffers.mpi.COMM_WORLD, arguments(buffers)
        if not asynchronous:
            return partial(getattr(world, method), *given)
        start = getattr(world, f"I{method.lower()}")
        return lambda: start(*given).Wait()

    return prepare


def partner_of(rank: int, size: int) -> int | None:
    """The rank that plays ping-pong with ``rank``: 0 with 1, 2 with 3, …; None for the last of an odd number."""
    partner = rank ^ 1
    return partner if partner < size else None


def torch_ping_pong(group: Any, buffers: Buffers, asynchronous: bool) -> Call:
    """``send`` and ``recv`` of torch.distributed, there and back."""
    import torch.distributed as dist

    partner = partner_of(buffers.rank, buffers.size)
    if not asynchronous:
        send, recv = partial(dist.send, group=group), partial(dist.recv, group=group)
        return _ping_pong(partner, buffers.send, buffers.recv, send, recv)
    return _ping_pong(
        partner,
        buffers.send,
        buffers.recv,
        lambda tensor, peer: dist.isend(tensor, peer, group=group).wait(),  # type: ignore[union-attr]
        lambda tensor, peer: dist.irecv(tensor, peer, group=group).wait(),  # type: ignore[union-attr]
    )


def mpi_ping_pong(buffers: MpiBuffers, asynchronous: bool) -> Call:
    """``Send`` and ``Recv`` of MPI, there and back."""
    world, partner = buffers.mpi.COMM_WORLD, partner_of(buffers.rank, buffers.size)
    if not asynchronous:
        return _ping_pong(partner, buffers.send, buffers.recv, world.Send, world.Recv)
    return _ping_pong(
        partner,
        buffers.send,
        buffers.recv,
        lambda spec, peer: world.Isend(spec, peer).Wait(),
        lambda spec, peer: world.Irecv(spec, peer).Wait(),
    )


def _ping_pong(
    partner: int | None, there: Any, back: Any, send: Callable[[Any, int], Any], recv: Callable[[Any, int], Any]
) -> Call:
    """One rally: the rank with a buffer to send begins, the other one returns what it has received."""
    if partner is None:
        return lambda: None

    def begin() -> None:
        send(there, partner)
        recv(back, partner)

    def answer() -> None:
        recv(back, partner)
        send(back, partner)

    return answer if there is None else begin
