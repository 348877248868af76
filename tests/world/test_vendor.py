"""``cpu:phalanx,DEVICE:BACKEND``: CPU tensors over shared memory, the others over the device's own backend.

The device is ``meta`` and its backend torch's fake one, so this shows which backend gets a call, not what it does; with
an accelerator at hand the tests marked ``gpu`` show that too.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork, GatherOptions

from phalanx.c10d.torch_versions import function
from phalanx.c10d.vendor import MixedProcessGroup
from phalanx.errors import DeviceMismatch
from phalanx.topology.device_files import count_devices

new_fake_group = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)  # torch has this method from 2.10 on


def join_with_stand_in(place: Member, backend: str = "cpu:phalanx,meta:standin") -> None:
    torch.accelerator.is_available = lambda: True  # in this rank's process only
    dist.Backend.register_backend(
        "standin", lambda store, rank, size, timeout: new_fake_group(rank, size), devices=["meta"]
    )
    place.join(backend)


def calls(size: int, tensor: torch.Tensor) -> list[Any]:
    """Every asynchronous operation on tensors of one device."""
    many = [torch.empty_like(tensor) for _ in range(size)]
    wide = torch.cat(many)
    return [
        dist.all_reduce(tensor, async_op=True),
        dist.broadcast(tensor, 0, async_op=True),
        dist.reduce(tensor, 0, async_op=True),
        dist.all_gather(many, tensor, async_op=True),
        function("all_gather_single")(wide, tensor, async_op=True),
        dist.reduce_scatter(tensor, many, async_op=True),
        function("reduce_scatter_single")(tensor, wide, async_op=True),
        dist.all_to_all(many, [torch.empty_like(tensor) for _ in range(size)], async_op=True),
        dist.all_to_all_single(wide, torch.empty_like(wide), async_op=True),
        dist.scatter(tensor, many if dist.get_rank() == 0 else None, 0, async_op=True),
        dist.gather(tensor, many if dist.get_rank() == 0 else None, 0, async_op=True),
    ]


def test_each_device_has_its_backend() -> None:
    size = 3

    def body(place: Member) -> list[str]:
        join_with_stand_in(place)
        group = dist.group.WORLD
        assert isinstance(group, MixedProcessGroup)
        x = torch.full((4,), float(place.rank + 1))
        dist.all_reduce(x)
        assert x.tolist() == [size * (size + 1) / 2] * 4
        for work in calls(size, torch.ones(4)):
            assert not isinstance(work, FakeWork)
            work.wait()
        theirs = calls(size, torch.ones(4, device="meta"))
        with dist.distributed_c10d._coalescing_manager(device=torch.device("meta")):
            dist.all_reduce(torch.ones(2, device="meta"))
        part = dist.new_group([0, 1])
        if place.rank < 2:
            theirs.append(dist.all_reduce(torch.ones(4, device="meta"), group=part, async_op=True))
            y = torch.ones(1)
            dist.all_reduce(y, group=part)
            assert y.item() == 2
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, place.rank)
        assert everybody == list(range(size))
        dist.barrier()
        dist.destroy_process_group()
        return [type(work).__name__ for work in theirs]

    for rank, names in enumerate(on_ranks(body, size)):
        assert names == ["FakeWork"] * (12 if rank < 2 else 11)


def test_device_without_a_backend_is_refused_with_the_list_to_use() -> None:
    def body(place: Member) -> None:
        join_with_stand_in(place, "phalanx")
        with pytest.raises(DeviceMismatch, match="cpu:phalanx,meta:standin"):
            dist.all_reduce(torch.ones(1, device="meta"))

    on_ranks(body, 2)


def test_operation_that_the_devices_backend_lacks_is_refused_by_name() -> None:
    def body(place: Member) -> str:
        join_with_stand_in(place)
        group: Any = dist.group.WORLD
        x = torch.ones(2, device="meta")
        with pytest.raises(RuntimeError) as caught:
            group.gather_single(torch.ones(4, device="meta"), x, GatherOptions())
        return f"{type(caught.value).__name__}: {caught.value}"

    # From torch 2.14 on every backend has the method, and torch's own refuses.
    expected = (
        "RuntimeError: Backend fake does not support gather_single"
        if hasattr(dist, "gather_single")
        else "ArgumentError: gather_single: backend 'fake', which serves meta, has no such operation"
    )
    for text in on_ranks(body, 2):
        assert text.startswith(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not count_devices(), reason="no GPU here")
@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (1, "cpu:phalanx,cuda:nccl"),
        (2, "cpu:phalanx,cuda:nccl"),
        (3, "cpu:phalanx,cuda:gloo"),
        (2, "phalanx in the place of gloo"),
    ],
)
def test_tensors_of_a_gpu_beside_those_of_the_cpu(size: int, backend: str) -> None:
    """Ranks share a GPU over Gloo, which NCCL refuses. Where ours stands in for gloo, they stay there."""
    shares = not backend.endswith("nccl")
    if size > count_devices() and not shares:
        pytest.skip(f"{size} ranks over NCCL need as many devices, and here are {count_devices()}")

    def body(place: Member) -> tuple[list[float], list[float]]:
        device = torch.device("cuda", 0 if shares else place.rank)
        torch.accelerator.set_device_index(device.index)
        if backend.startswith("phalanx"):
            os.environ["PHALANX_REPLACE"] = "gloo"
        place.join(backend.partition(" ")[0])
        near, far = torch.full((3,), place.rank + 1.0), torch.full((3,), place.rank + 1.0, device=device)
        dist.all_reduce(near)
        dist.all_reduce(far)
        dist.destroy_process_group()
        return near.tolist(), far.cpu().tolist()

    total = size * (size + 1) / 2
    assert on_ranks(body, size) == [([total] * 3, [total] * 3)] * size
