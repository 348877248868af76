"""Distributed checkpoints: written by some ranks, read by all, in place, asynchronously, sharded and whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.differential.program import program
from tests.differential.programs.data_parallel import batch, model
from tests.differential.programs.sharding import full, mesh_of
from tests.support.ranks import Member


def sharded(member: Member) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = model()
    fully_shard(net, mesh=mesh_of(member))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(batch(member, 0)).square().mean().backward()
    optimizer.step()
    return net, optimizer


@program(tolerance=1e-5, cases=["save", "async_save"])
def sharded_model_and_optimizer(member: Member, how: str) -> Any:
    folder = str(member.folder / f"checkpoint-{how}")
    net, optimizer = sharded(member)
    weights, state = get_state_dict(net, optimizer)
    written: Any = getattr(dcp, how)({"model": weights, "optimizer": state}, checkpoint_id=folder)
    if how == "async_save":
        written.result()
    dist.barrier()
    expected = full(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    weights, state = get_state_dict(net, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state)
    return expected, full(net)


@program(tolerance=1e-5)
def whole_state_on_rank_0(member: Member) -> Any:
    net, _ = sharded(member)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(net, options=options)
    fresh = model()
    fully_shard(fresh, mesh=mesh_of(member))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, weights if member.rank == 0 else {}, options=options)
    return dict(weights), full(fresh)


@program()
def resharded_tensor(member: Member) -> Any:
    folder = str(member.folder / "checkpoint-reshard")
    mesh = mesh_of(member)
    dcp.save({"x": distribute_tensor(torch.arange(30.0).view(6, 5), mesh, [Shard(0)])}, checkpoint_id=folder)
    dist.barrier()
    columns = {"x": distribute_tensor(torch.zeros(6, 5), mesh, [Shard(1)])}
    dcp.load(columns, checkpoint_id=folder)
    whole = {"x": distribute_tensor(torch.zeros(6, 5), mesh, [Replicate()])}
    dcp.load(whole, checkpoint_id=folder)
    return columns["x"], whole["x"]
