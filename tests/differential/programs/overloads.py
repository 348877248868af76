"""ProcessGroup's own methods, in each of the forms that torch's binding offers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.program import program
from tests.support.ranks import Member

TIMEOUT = timedelta(seconds=50)
Form = Callable[[Any, int, int], Any]


def x(rank: int) -> torch.Tensor:
    return torch.arange(3.0) + rank


def filled(pg: Any, call: Callable[[Any, torch.Tensor], Any], rank: int) -> Any:
    tensor = x(rank)
    call(pg, tensor).wait()
    return tensor


def blanks(size: int) -> list[torch.Tensor]:
    return [torch.zeros(3) for _ in range(size)]


def lists(rank: int, size: int) -> list[torch.Tensor]:
    return [torch.arange(3.0) + rank + other for other in range(size)]


def into_list(pg: Any, rank: int, size: int, call: Callable[[Any, Any, torch.Tensor], Any]) -> Any:
    outputs = blanks(size)
    call(pg, outputs, x(rank)).wait()
    return outputs


def from_list(pg: Any, rank: int, size: int, call: Callable[[Any, torch.Tensor, Any], Any]) -> Any:
    output = torch.zeros(3)
    call(pg, output, lists(rank, size)).wait()
    return output


def scatter(pg: Any, rank: int, size: int, call: Callable[[Any, torch.Tensor, Any], Any]) -> Any:
    output = torch.zeros(3)
    call(pg, output, lists(rank, size) if rank == 0 else []).wait()
    return output


def gather(pg: Any, rank: int, size: int, call: Callable[[Any, Any, torch.Tensor], Any]) -> Any:
    outputs = blanks(size) if rank == 0 else []
    call(pg, outputs, x(rank)).wait()
    return outputs


def options(kind: type, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


MAX = dist.ReduceOp.MAX
SUM = dist.ReduceOp.SUM
FORMS: dict[str, Form] = {
    "allreduce(list)": lambda pg, r, n: filled(pg, lambda p, t: p.allreduce([t]), r),
    "allreduce(tensor)": lambda pg, r, n: filled(pg, lambda p, t: p.allreduce(t), r),
    "allreduce(list, op)": lambda pg, r, n: filled(pg, lambda p, t: p.allreduce([t], MAX), r),
    "allreduce(tensor, op)": lambda pg, r, n: filled(pg, lambda p, t: p.allreduce(t, MAX), r),
    "allreduce(tensor, op=)": lambda pg, r, n: filled(pg, lambda p, t: p.allreduce(t, op=MAX), r),
    "allreduce(tensors=, op=, timeout=)": lambda pg, r, n: filled(
        pg, lambda p, t: p.allreduce(tensors=[t], op=MAX, timeout=TIMEOUT), r
    ),
    "allreduce(tensor, op, timeout)": lambda pg, r, n: filled(pg, lambda p, t: p.allreduce(t, SUM, TIMEOUT), r),
    "allreduce(list, options)": lambda pg, r, n: filled(
        pg, lambda p, t: p.allreduce([t], options(dist.AllreduceOptions, reduceOp=MAX)), r
    ),
    "allreduce(list, opts=)": lambda pg, r, n: filled(
        pg, lambda p, t: p.allreduce([t], opts=options(dist.AllreduceOptions, reduceOp=MAX)), r
    ),
    "allreduce_coalesced(list)": lambda pg, r, n: filled(pg, lambda p, t: p.allreduce_coalesced([t]), r),
    "broadcast(list, options)": lambda pg, r, n: filled(
        pg, lambda p, t: p.broadcast([t], options(dist.BroadcastOptions, rootRank=1)), r
    ),
    "broadcast(tensor, root)": lambda pg, r, n: filled(pg, lambda p, t: p.broadcast(t, 1), r),
    "broadcast(tensor, root=)": lambda pg, r, n: filled(pg, lambda p, t: p.broadcast(t, root=1), r),
    "broadcast(tensor, root, timeout)": lambda pg, r, n: filled(pg, lambda p, t: p.broadcast(t, 1, TIMEOUT), r),
    "broadcast(tensors=, opts=)": lambda pg, r, n: filled(
        pg, lambda p, t: p.broadcast(tensors=[t], opts=options(dist.BroadcastOptions, rootRank=1)), r
    ),
    "reduce(tensor, root)": lambda pg, r, n: [filled(pg, lambda p, t: p.reduce(t, 0), r)][: r == 0],
    "reduce(tensor, root, op)": lambda pg, r, n: [filled(pg, lambda p, t: p.reduce(t, 0, MAX), r)][: r == 0],
    "reduce(tensor, root=, op=)": lambda pg, r, n: [filled(pg, lambda p, t: p.reduce(t, root=0, op=MAX), r)][: r == 0],
    "reduce(list, options)": lambda pg, r, n: [
        filled(pg, lambda p, t: p.reduce([t], options(dist.ReduceOptions, rootRank=0)), r)
    ][: r == 0],
    "allgather(lists, list)": lambda pg, r, n: into_list(pg, r, n, lambda p, o, t: p.allgather([o], [t])),
    "allgather(list, tensor)": lambda pg, r, n: into_list(pg, r, n, lambda p, o, t: p.allgather(o, t)),
    "allgather(list, tensor, timeout)": lambda pg, r, n: into_list(
        pg, r, n, lambda p, o, t: p.allgather(o, t, TIMEOUT)
    ),
    "allgather(output_tensors=, input_tensors=)": lambda pg, r, n: into_list(
        pg, r, n, lambda p, o, t: p.allgather(output_tensors=[o], input_tensors=[t])
    ),
    "_allgather_base": lambda pg, r, n: into_list(pg, r, n, lambda p, o, t: p._allgather_base(torch.zeros(3 * n), t)),
    "gather(lists, list, options)": lambda pg, r, n: gather(
        pg, r, n, lambda p, o, t: p.gather([o] if o else [], [t], options(dist.GatherOptions, rootRank=0))
    ),
    "gather(list, tensor, root)": lambda pg, r, n: gather(pg, r, n, lambda p, o, t: p.gather(o, t, 0)),
    "gather(list, tensor, root=)": lambda pg, r, n: gather(pg, r, n, lambda p, o, t: p.gather(o, t, root=0)),
    "scatter(list, lists, options)": lambda pg, r, n: scatter(
        pg, r, n, lambda p, o, i: p.scatter([o], [i] if i else [], options(dist.ScatterOptions, rootRank=0))
    ),
    "scatter(tensor, list, root)": lambda pg, r, n: scatter(pg, r, n, lambda p, o, i: p.scatter(o, i, 0)),
    "scatter(tensor, list, root=)": lambda pg, r, n: scatter(pg, r, n, lambda p, o, i: p.scatter(o, i, root=0)),
    "reduce_scatter(list, lists)": lambda pg, r, n: from_list(pg, r, n, lambda p, o, i: p.reduce_scatter([o], [i])),
    "reduce_scatter(tensor, list)": lambda pg, r, n: from_list(pg, r, n, lambda p, o, i: p.reduce_scatter(o, i)),
    "reduce_scatter(tensor, list, op)": lambda pg, r, n: from_list(
        pg, r, n, lambda p, o, i: p.reduce_scatter(o, i, MAX)
    ),
    "reduce_scatter(tensor, list, op=)": lambda pg, r, n: from_list(
        pg, r, n, lambda p, o, i: p.reduce_scatter(o, i, op=MAX)
    ),
    "_reduce_scatter_base": lambda pg, r, n: from_list(
        pg, r, n, lambda p, o, i: p._reduce_scatter_base(o, torch.cat(i))
    ),
    "alltoall(list, list)": lambda pg, r, n: into_list(pg, r, n, lambda p, o, t: p.alltoall(o, lists(r, n))),
    "alltoall_base": lambda pg, r, n: from_list(
        pg, r, n, lambda p, o, i: p.alltoall_base(torch.zeros(3 * n), torch.cat(i), [], [])
    ),
    "barrier()": lambda pg, r, n: pg.barrier().wait(),
    "barrier(options)": lambda pg, r, n: pg.barrier(dist.BarrierOptions()).wait(),
    "barrier(timeout=)": lambda pg, r, n: pg.barrier(timeout=TIMEOUT).wait(),
    "send and recv": lambda pg, r, n: messages(pg, r, n, lambda p, t, source: p.recv([t], source, 0)),
    "recv_anysource": lambda pg, r, n: messages(pg, r, n, lambda p, t, source: p.recv_anysource([t], 0)),
}


def messages(pg: Any, rank: int, size: int, receive: Callable[[Any, torch.Tensor, int], Any]) -> Any:
    received = torch.zeros(3)
    work = pg.send([x(rank)], (rank + 1) % size, 0)
    receive(pg, received, (rank - 1) % size).wait()
    work.wait()
    return received


@program(cases=FORMS)
def method(member: Member, form: Form) -> Any:
    return form(dist.group.WORLD, member.rank, member.size)


@program(cases=["rank", "size", "get_group_store", "group_name", "bound_device_id", "name", "_get_backend_name"])
def about_the_group(member: Member, name: str) -> Any:
    value = getattr(dist.group.WORLD, name)
    value = value() if callable(value) else value
    text = str(value) if isinstance(value, (str, int)) or value is None else type(value).__name__
    return text.replace("phalanx", "gloo")


@program()
def the_groups_store(member: Member) -> Any:
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    store.set(f"method-{member.rank}", str(member.rank))
    dist.barrier()
    return [store.get(f"method-{rank}") for rank in range(member.size)]


@program()
def backends_of_the_group(member: Member) -> Any:
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    return [
        isinstance(backend, dist.distributed_c10d.Backend) or backend is group,
        dist.get_backend().replace("phalanx", "gloo"),
    ]
