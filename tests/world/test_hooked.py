"""torch's hooks on groups of ours: the check for NaN from torch 2.14 on, the flight recorder from 2.15."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import ArgumentError

RECORDS = hasattr(c10d, "HealthCheckHook")  # torch 2.14 attaches its recorder to no group by itself
pytestmark = pytest.mark.skipif(
    not hasattr(c10d, "FlightRecorderHook"), reason="torch has hooks on collectives from 2.14 on"
)


@every_rank(joins=False)
def test_calls_are_recorded_and_right(member: Member) -> None:
    """Synchronous and not, of sparse tensors, and of DDP; errors keep their types."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    member.join()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    found = torch.zeros(9)
    dist.all_gather_into_tensor(found, tensor)
    assert found.tolist() == [9.0] * 9
    dist.barrier()
    if RECORDS:
        trace: Any = getattr(c10d, "_dump_fr_trace_json")  # noqa: B009 - torch 2.13's stubs lack its argument
        entries: list[dict[str, Any]] = json.loads(trace(backend="phalanx"))["entries"]
        names = ["all_reduce", "all_reduce", "_all_gather_base", "barrier"]
        assert [entry["profiling_name"] for entry in entries] == [f"phalanx:{name}" for name in names]
        assert all(entry["retired"] for entry in entries)
        assert entries[0]["input_sizes"] == [[3]]
    sparse = torch.sparse_coo_tensor(torch.tensor([[member.rank]]), torch.tensor([2.0]), (3,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [2.0] * 3
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(member.rank + 1))).sum().backward()
    assert model.module.weight.grad.flatten().tolist() == [2.0, 2.0]
    with pytest.raises(ArgumentError, match="AVG"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG)


@every_rank(2, joins=False)
def test_the_check_for_nan_finds_one(member: Member) -> None:
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    member.join()
    dist.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="NaN"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]))


@every_rank(1, joins=False)
def test_nobody_pays_who_has_not_asked(member: Member) -> None:
    """torch's recorder is on by default, and twice the time of a small call."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_DIST_NAN_CHECK"):
        os.environ.pop(name, None)
    member.join()
    dist.all_reduce(torch.ones(1))
    group: Any = dist.group.WORLD
    assert not group.hooked
