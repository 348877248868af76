"""torch's hooks on groups of ours: the check for NaN from torch 2.14 on, the flight recorder from 2.15."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import every_rank
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import ArgumentError

HAS_HOOKS = hasattr(c10d, "FlightRecorderHook")
RECORDS = hasattr(c10d, "HealthCheckHook")  # torch 2.14 attaches its recorder to no group by itself
pytestmark = pytest.mark.skipif(not HAS_HOOKS, reason="torch has hooks on collectives from 2.14 on")


def recorded() -> list[dict[str, Any]]:
    trace: Any = getattr(c10d, "_dump_fr_trace_json")  # noqa: B009 - torch 2.13's stubs lack its argument
    entries: list[dict[str, Any]] = json.loads(trace(backend="phalanx"))["entries"]
    return entries


@pytest.mark.skipif(not RECORDS, reason="torch attaches its flight recorder to groups from 2.15 on")
def test_the_flight_recorder_has_what_was_called() -> None:
    size = 3

    def body(member: Member) -> list[tuple[str, bool, list[list[int]]]]:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
        member.join()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert work.is_completed()
        assert tensor.tolist() == [float(size**2)] * 3
        found = torch.zeros(size * 3)
        dist.all_gather_into_tensor(found, tensor)
        assert found.tolist() == [float(size**2)] * 3 * size
        dist.barrier()
        entries = recorded()
        dist.destroy_process_group()
        return [(entry["profiling_name"], entry["retired"], entry["input_sizes"]) for entry in entries]

    for found in on_ranks(body, size):
        assert [name for name, _, _ in found] == [
            "phalanx:all_reduce",
            "phalanx:all_reduce",
            "phalanx:_all_gather_base",
            "phalanx:barrier",
        ]
        assert all(retired for _, retired, _ in found)
        assert found[0][2] == [[3]]


@every_rank(2, joins=False)
def test_the_check_for_nan_finds_one(member: Member) -> None:
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    member.join()
    dist.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="NaN"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]))


@every_rank(2, joins=False)
def test_errors_keep_their_types(member: Member) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    member.join()
    with pytest.raises(ArgumentError, match="AVG"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG)


def test_sparse_sums_and_data_parallel_steps() -> None:
    def body(member: Member) -> list[float]:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
        member.join()
        sparse = torch.sparse_coo_tensor(torch.tensor([[member.rank]]), torch.tensor([2.0]), (2,))
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [2.0, 2.0]
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), float(member.rank + 1))).sum().backward()
        if RECORDS:
            assert any(entry["profiling_name"] == "phalanx:all_reduce" for entry in recorded())
        gradient: list[float] = model.module.weight.grad.flatten().tolist()
        dist.destroy_process_group()
        return gradient

    assert on_ranks(body, 2) == [[1.5, 1.5]] * 2


def test_nobody_pays_who_has_not_asked() -> None:
    """torch's recorder is on by default, and twice the time of a small call."""

    def body(member: Member) -> str:
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_DIST_NAN_CHECK"):
            os.environ.pop(name, None)
        member.join()
        dist.all_reduce(torch.ones(1))
        assert dist.group.WORLD is not None
        kind = type(dist.group.WORLD).__name__
        dist.destroy_process_group()
        return kind

    assert on_ranks(body, 1) == ["PhalanxProcessGroup"]
