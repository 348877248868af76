"""torch's RPC running beside the process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from tests.differential.program import program
from tests.support.ranks import Member


def added(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor + value


def collective_inside(value: float) -> float:
    return value + dist.get_rank()


@program(alone=True, short=2)
def calls_and_collectives_by_turns(member: Member) -> Any:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{member.folder}/rpc", rpc_timeout=50)
    rpc.init_rpc(f"worker{member.rank}", rank=member.rank, world_size=member.size, rpc_backend_options=options)
    after = f"worker{(member.rank + 1) % member.size}"
    results: list[Any] = []
    for _ in range(3):
        tensor = torch.full((3,), float(member.rank))
        future = rpc.rpc_async(after, added, args=(tensor.clone(), 10.0))
        dist.all_reduce(tensor)
        results.append((future.wait(), tensor, rpc.rpc_sync(after, collective_inside, args=(0.5,))))
    remote = rpc.remote(after, added, args=(torch.ones(2), member.rank))
    dist.barrier()
    results.append(remote.to_here())
    dist.barrier()
    rpc.shutdown()
    return results


@program(alone=True, tolerance=1e-5, short=2)
def distributed_autograd_and_data_parallel(member: Member) -> Any:
    from torch.distributed import autograd

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{member.folder}/rpc", rpc_timeout=50)
    rpc.init_rpc(f"worker{member.rank}", rank=member.rank, world_size=member.size, rpc_backend_options=options)
    weight = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        there = rpc.rpc_sync(f"worker{(member.rank + 1) % member.size}", added, args=(weight * 2, 1.0))
        autograd.backward(context, [there.sum()])
        gradient = autograd.get_gradients(context)[weight]
    dist.all_reduce(gradient)
    rpc.shutdown()
    return gradient
