"""Sharded parameters and tensors: FSDP 1 and 2, hybrid, DTensor, tensor, sequence and context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.differential.program import program
from tests.differential.programs.data_parallel import batch, model, trained
from tests.support.ranks import Member

TOLERANCE = 1e-5


def mesh_of(member: Member) -> DeviceMesh:
    return init_device_mesh("cpu", (member.size,))


def full(net: torch.nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in net.parameters()]


STRATEGIES = {"full_shard": ShardingStrategy.FULL_SHARD, "grad_op": ShardingStrategy.SHARD_GRAD_OP}
STRATEGIES["no_shard"] = ShardingStrategy.NO_SHARD


@program(cases=STRATEGIES, tolerance=TOLERANCE, long=["grad_op", "no_shard"])
def fsdp1(member: Member, strategy: ShardingStrategy) -> Any:
    net = FullyShardedDataParallel(
        model(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
    )
    losses, _ = trained(member, net)
    with FullyShardedDataParallel.summon_full_params(net):
        return losses, [parameter.detach().clone() for parameter in net.parameters()]


FULLY_SHARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept_after_forward": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


@program(cases=FULLY_SHARD, tolerance=2e-2, long=["kept_after_forward", "offloaded"])
def fsdp2(member: Member, options: dict[str, Any]) -> Any:
    net = model()
    mesh = mesh_of(member)
    for layer in net.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    losses, _ = trained(member, net)
    return losses, full(net)


@program(tolerance=TOLERANCE)
def fsdp2_accumulates(member: Member) -> Any:
    net: Any = model()
    fully_shard(net, mesh=mesh_of(member))
    net.set_requires_gradient_sync(False)
    net(batch(member, 0)).square().mean().backward()
    net.set_requires_gradient_sync(True)
    net(batch(member, 1)).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in net.parameters()]


@program(tolerance=TOLERANCE)
def hybrid_sharding(member: Member) -> Any:
    shape = (2, member.size // 2) if member.size % 2 == 0 else (1, member.size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    net = model()
    fully_shard(net, mesh=mesh)
    losses, _ = trained(member, net)
    return losses, full(net)


@program()
def dtensor(member: Member) -> Any:
    """Redistributed, computed with, and partial."""
    mesh = mesh_of(member)
    # Each of five ranks gets some: torch has no maximum of nothing.
    rows = distribute_tensor(torch.arange(52.0).view(13, 4), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    partial = DTensor.from_local(torch.full((4, 6), float(member.rank)), mesh, [Partial()])
    moved = [rows, columns, *(columns.redistribute(mesh, [each]) for each in (Replicate(), Shard(0)))]
    moved += [partial.redistribute(mesh, [each]) for each in (Replicate(), Shard(0))]
    weight = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
    computed = [rows.sum(), rows.sum(1), rows.max(), rows @ weight, rows.t() @ rows, rows.mean(0)]
    local = torch.arange(4.0) * (-1) ** member.rank
    computed += [DTensor.from_local(local, mesh, [Partial(op)]) for op in ("sum", "max", "min", "avg")]
    return moved, [each.full_tensor() for each in computed]


def blocks(member: Member) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    width = 4 * member.size
    net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
    return net, torch.randn(2 * member.size, 8)


@program(tolerance=TOLERANCE)
def tensor_parallel(member: Member) -> Any:
    net, x = blocks(member)
    parallelize_module(net, mesh_of(member), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    output = net(x)
    output.square().mean().backward()
    return output, [parameter.grad.full_tensor() for parameter in net.parameters() if parameter.grad is not None]


@program(tolerance=TOLERANCE)
def sequence_parallel(member: Member) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 4 * member.size), torch.nn.Linear(4 * member.size, 8)
    )
    x = torch.randn(2, 3 * member.size, 8)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh_of(member), plan)  # type: ignore[arg-type]
    output = net(x)
    output.square().mean().backward()
    return output


@program(tolerance=TOLERANCE)
def parallel_loss(member: Member) -> Any:
    torch.manual_seed(0)
    mesh = mesh_of(member)
    logits = torch.randn(6, 4 * member.size, requires_grad=True)
    sharded = distribute_tensor(logits, mesh, [Shard(1)])
    target = torch.arange(6)
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(sharded, target)
        loss.backward()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss, logits.grad
