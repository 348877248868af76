"""torch.compile of models and of functions that communicate; tracing without running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

from tests.differential.program import program
from tests.differential.programs.data_parallel import model, trained
from tests.differential.programs.sharding import full, mesh_of
from tests.support.ranks import Member

TOLERANCE = 1e-5


def all_reduce(x: torch.Tensor) -> Any:
    dist.all_reduce(x)
    return x + 1


def all_reduce_async(x: torch.Tensor) -> Any:
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    return x * 2


def broadcast(x: torch.Tensor) -> Any:
    dist.broadcast(x, 0)
    return x + 1


def reduce(x: torch.Tensor) -> Any:
    dist.reduce(x, 0)
    return x + 1 if dist.get_rank() == 0 else x * 0


def all_gather(x: torch.Tensor) -> Any:
    outputs = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, x)
    return torch.cat(outputs)


def all_gather_into_tensor(x: torch.Tensor) -> Any:
    output = torch.zeros(dist.get_world_size() * x.numel())
    dist.all_gather_into_tensor(output, x)
    return output * 2


def gather(x: torch.Tensor) -> Any:
    outputs = [torch.zeros_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(x, outputs, dst=0)
    return torch.cat(outputs) if outputs else x


def scatter(x: torch.Tensor) -> Any:
    inputs = [x + i for i in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    output = torch.zeros_like(x)
    dist.scatter(output, inputs, src=0)
    return output + 1


def reduce_scatter(x: torch.Tensor) -> Any:
    output = torch.zeros_like(x)
    dist.reduce_scatter(output, [x + i for i in range(dist.get_world_size())])
    return output + 1


def reduce_scatter_tensor(x: torch.Tensor) -> Any:
    output = torch.zeros_like(x)
    dist.reduce_scatter_tensor(output, x.repeat(dist.get_world_size()))
    return output + 1


def all_to_all(x: torch.Tensor) -> Any:
    outputs = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_to_all(outputs, [x + i for i in range(dist.get_world_size())])
    return torch.cat(outputs)


def all_to_all_single(x: torch.Tensor) -> Any:
    whole = x.repeat(dist.get_world_size())
    output = torch.zeros_like(whole)
    dist.all_to_all_single(output, whole)
    return output + 1


def send_and_receive(x: torch.Tensor) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros_like(x)
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    assert work is not None
    work.wait()
    return received + 1


def batch(x: torch.Tensor) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros_like(x)
    operations = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received + 1


def barrier(x: torch.Tensor) -> Any:
    dist.barrier()
    return x + 1


def functional_collectives(x: torch.Tensor) -> Any:
    group: Any = dist.group.WORLD
    summed = functional.all_reduce(x, "sum", group)
    gathered = functional.all_gather_tensor(summed, 0, group)
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    return functional.broadcast(scattered, 0, group) + 1


def in_a_new_group(x: torch.Tensor) -> Any:
    dist.all_reduce(x, group=dist.new_group(list(range(dist.get_world_size()))))
    return x + 1


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    call.__name__: call
    for call in (
        all_reduce,
        all_reduce_async,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        send_and_receive,
        batch,
        barrier,
        functional_collectives,
        in_a_new_group,
    )
}


def x(member: Member) -> torch.Tensor:
    return torch.arange(4.0) + member.rank


@program(cases=CALLS, short=2)
def compiled(member: Member, call: Callable[[torch.Tensor], Any]) -> Any:
    torch._dynamo.reset()
    run = torch.compile(call, backend="aot_eager")
    return run(x(member)), run(x(member) + 1)


@program(cases=CALLS, short=2)
def after_a_graph_break(member: Member, call: Callable[[torch.Tensor], Any]) -> Any:
    torch._dynamo.reset()

    def broken(tensor: torch.Tensor) -> Any:
        tensor = tensor + 1
        torch._dynamo.graph_break()
        return call(tensor * 2) - 1

    return torch.compile(broken, backend="eager")(x(member))


@program(cases=["aot_eager", "eager"], tolerance=TOLERANCE)
def data_parallel(member: Member, backend: str) -> Any:
    torch._dynamo.reset()
    return trained(member, torch.compile(DistributedDataParallel(model()), backend=backend))


@program(sizes=(2, 3), short=0, tolerance=1e-4)
def data_parallel_by_inductor(member: Member) -> Any:
    torch._dynamo.reset()
    return trained(member, torch.compile(DistributedDataParallel(model()), backend="inductor"))


@program(tolerance=TOLERANCE, short=2)
def compiled_inside_data_parallel(member: Member) -> Any:
    torch._dynamo.reset()
    return trained(member, DistributedDataParallel(torch.compile(model(), backend="aot_eager")))  # type: ignore[arg-type]


@program(tolerance=TOLERANCE)
def fully_sharded(member: Member) -> Any:
    torch._dynamo.reset()
    net = model()
    fully_shard(net, mesh=mesh_of(member))
    losses, _ = trained(member, torch.compile(net, backend="aot_eager"))
    return losses, full(net)


@program(cases=["functional", "c10d"])
def traced(member: Member, kind: str) -> Any:
    """The names of the operations in the graph, and what the graph computes if it waits for them."""
    call = functional_collectives if kind == "functional" else all_reduce
    graph = make_fx(call)(x(member))
    names = [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)]
    return names, graph(x(member)) if kind == "functional" else None


@program(short=2)
def captured_by_export(member: Member) -> Any:
    class Net(torch.nn.Module):
        def forward(self, tensor: torch.Tensor) -> Any:
            return functional.all_reduce(tensor, "sum", dist.group.WORLD)  # type: ignore[arg-type]

    exported = torch.export.export(Net(), (x(member),), strict=False)
    names = [str(node.target) for node in exported.graph.nodes if "c10d" in str(node.target)]
    return names, exported.module()(x(member))
