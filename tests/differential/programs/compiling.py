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

from tests.differential.calls import CALLS, Call, send_and_receive
from tests.differential.program import program
from tests.differential.programs.data_parallel import model, trained
from tests.differential.programs.sharding import full, mesh_of
from tests.support.ranks import Member

TOLERANCE = 1e-5


def all_reduce(x: torch.Tensor) -> Any:
    dist.all_reduce(x)
    return x + 1


def all_reduce_async(x: torch.Tensor) -> Any:
    work: Any = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    return x * 2


def functional_collectives(x: torch.Tensor) -> Any:
    group: Any = dist.group.WORLD
    summed = functional.all_reduce(x, "sum", group)
    gathered = functional.all_gather_tensor(summed, 0, group)
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    return functional.broadcast(scattered, 0, group) + 1


def in_a_new_group(x: torch.Tensor) -> Any:
    dist.all_reduce(x, group=dist.new_group(list(range(dist.get_world_size()))))
    return x + 1


def followed(call: Call) -> Callable[[torch.Tensor], Any]:
    """The call, and something that is computed from its result."""

    def run(x: torch.Tensor) -> Any:
        _, filled = call(x)
        return torch.cat(filled) + 1 if isinstance(filled, list) else x * 0 if filled is None else filled + 1

    return run


OTHERS = (all_reduce, all_reduce_async, send_and_receive, functional_collectives, in_a_new_group)
RUNS = {name: followed(call) for name, call in CALLS.items()} | {run.__name__: run for run in OTHERS}


def x(member: Member) -> torch.Tensor:
    return torch.arange(4.0) + member.rank


@program(cases=RUNS, long=[name for name in RUNS if name != "all_reduce"])
def compiled(member: Member, call: Callable[[torch.Tensor], Any]) -> Any:
    torch._dynamo.reset()
    run = torch.compile(call, backend="aot_eager")
    return run(x(member)), run(x(member) + 1)


@program(cases=["aot_eager", "eager", "inductor"], tolerance=1e-4, long=True)
def data_parallel(member: Member, backend: str) -> Any:
    torch._dynamo.reset()
    return trained(member, torch.compile(DistributedDataParallel(model()), backend=backend))


@program(tolerance=TOLERANCE, long=True)
def compiled_inside_data_parallel(member: Member) -> Any:
    torch._dynamo.reset()
    return trained(member, DistributedDataParallel(torch.compile(model(), backend="aot_eager")))


@program(tolerance=TOLERANCE, long=True)
def fully_sharded(member: Member) -> Any:
    torch._dynamo.reset()
    net = model()
    fully_shard(net, mesh=mesh_of(member))
    losses, _ = trained(member, torch.compile(net, backend="aot_eager"))
    return losses, full(net)


@program(cases=["functional", "c10d"])
def traced(member: Member, kind: str) -> Any:
    """The names of the operations in the graph, and what the graph computes if it waits for them."""
    graph = make_fx(functional_collectives if kind == "functional" else all_reduce)(x(member))
    names = [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)]
    return names, graph(x(member)) if kind == "functional" else None
