"""``phalanx.init()``, ``World``, ``Group`` and ``close()``, started in each of the three ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import every_rank, join_world

import phalanx
from phalanx import world as world_module
from phalanx.errors import ClosedError, DeviceError, DeviceMismatch, InitializationError, RankError
from phalanx.group import Session
from phalanx.topology.place import Place
from phalanx.topology.topology import Node, Topology

SCRIPT = """
import json, os, sys, torch, phalanx
world = phalanx.init(quiet=True)
x = torch.tensor([world.rank + 1.0])
world.all_reduce(x)
evens = world.subgroup(range(0, world.world_size, 2))
if evens is not None:
    evens.broadcast(x, src=evens.size - 1)
gathered = [None] * world.size
world.all_gather_object(gathered, dict(
    rank=world.rank, world_size=world.world_size, local_rank=world.local_rank,
    local_world_size=world.local_world_size, node_rank=world.node_rank, num_nodes=world.num_nodes,
    device=str(world.device), backend=world.backend, launcher=world.launcher, sum=x.item(),
    evens=None if evens is None else [evens.rank, evens.size, list(evens.ranks)]))
if world.rank == 0:
    print(json.dumps(gathered))
phalanx.close()
"""

WAYS = {
    "none": [],
    "phalanx": ["-m", "phalanx", "run", "--no-prefix", "-n", "{n}"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "{n}"],
}


@pytest.mark.parametrize(
    ("way", "n"), [("none", 1), ("phalanx", 3), pytest.param("torchrun", 2, marks=pytest.mark.long)]
)
def test_one_script_under_every_launcher(way: str, n: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *(part.format(n=n) for part in WAYS[way]), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    evens = list(range(0, n, 2))
    common: dict[str, Any] = {"world_size": n, "local_world_size": n, "node_rank": 0, "num_nodes": 1}
    common |= {"device": "cpu", "backend": "phalanx", "launcher": way, "sum": n * (n + 1) / 2}
    expected = [{**common, "rank": rank, "local_rank": rank, "evens": None} for rank in range(n)]
    for rank in evens:
        expected[rank]["evens"] = [rank // 2, len(evens), evens]
    assert json.loads(done.stdout) == expected


def in_a_world_of_one(body: Any) -> None:
    """Run ``body(world)`` in a process of its own, as a script that was started plainly."""

    def inner(_: object) -> bool:
        for name in list(os.environ):
            if name.startswith(("TORCHELASTIC", "PHALANX")) or name in ("RANK", "WORLD_SIZE"):
                del os.environ[name]
        body(phalanx.init())
        phalanx.close()
        return True

    assert on_ranks(inner, 1) == [True]


def test_in_a_world_of_one_every_collective_is_the_identity() -> None:
    def body(world: phalanx.World) -> None:
        x = torch.arange(6.0).view(2, 3)
        y, outputs = x.clone(), [torch.empty_like(x) for _ in range(5)]
        work = world.all_reduce(y, async_op=True)
        assert work is not None
        assert work.wait()
        world.reduce(y, op=dist.ReduceOp.PRODUCT)
        world.broadcast(y, src=0)
        world.all_gather(outputs[:1], x)
        world.gather(x, outputs[1:2])
        world.scatter(outputs[2], [x])
        world.reduce_scatter(outputs[3], [x])
        world.all_to_all(outputs[4:], [x])
        assert all(torch.equal(each, x) for each in (y, *outputs))
        world.barrier()
        objects: list[Any] = [None]
        world.all_gather_object(objects, "a")
        world.broadcast_object_list(objects)
        scattered: list[Any] = [None]
        world.scatter_object_list(scattered, objects)
        assert objects == scattered == ["a"]

    in_a_world_of_one(body)


def test_mistakes_are_named() -> None:
    def body(world: phalanx.World) -> None:
        with pytest.raises(InitializationError, match="joined the world already"):
            phalanx.init()
        with pytest.raises(RankError, match="rank 1 is not in the group: its ranks count from 0 to 0"):
            world.broadcast(torch.ones(1), src=1)
        with pytest.raises(RankError, match="rank 0 is this process itself"):
            world.send(torch.ones(1), dst=0)
        with pytest.raises(RankError, match="rank 3 is not in the group"):
            world.subgroup([0, 3])
        with pytest.raises(RankError, match="only once"):
            world.subgroup([0, 0])
        with pytest.raises(DeviceMismatch, match="tensor on meta"):
            world.all_reduce(torch.ones(1, device="meta"))
        with pytest.raises(ValueError, match="names are bf16, fp16"):
            world.data_parallel(torch.nn.Linear(1, 1), comm_hook="int3")
        group = world.subgroup([0])
        assert group is not None
        phalanx.close()
        phalanx.close()
        for use in (world.barrier, group.barrier, lambda: world.subgroup([0])):
            with pytest.raises(ClosedError, match=r"after phalanx.close\(\)"):
                use()
        assert phalanx.init().size == 1

    in_a_world_of_one(body)


@every_rank(1, backend="gloo")
def test_init_after_torchs_own_init_is_refused(member: Member) -> None:
    with pytest.raises(InitializationError, match="initialised before"):
        phalanx.init()


@every_rank()
def test_messages_and_groups_take_group_ranks(member: Member) -> None:
    world = join_world(member)
    pair = world.subgroup([2, 1])  # group rank 0 is world rank 2
    if pair is None:
        return
    assert pair.ranks == (2, 1)
    x, box = torch.tensor([float(world.rank)]), [None]
    if pair.rank == 0:
        pair.send(x, dst=1)
        pair.isend(x, dst=1, tag=3).wait()
        pair.send_object_list(["hello"], dst=1)
    else:
        assert pair.recv(x, src=0) == 0
        assert x.item() == 2
        pair.irecv(x, src=0, tag=3).wait()
        assert pair.recv_object_list(box, src=0) == 0
        assert box == ["hello"]


def test_two_ranks_on_one_device_are_refused_unless_both_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """The devices are names only: what is compared is what the ranks say they took."""

    def body(member: Member) -> str:
        member.join()
        launched = Place("phalanx", member.rank, member.size, member.rank, member.size)
        topology = Topology((Node(0, "here", tuple(range(member.size))),))
        world = phalanx.World(launched, topology, torch.device("cpu"), Session(frozenset({"cpu"})))
        world_module._refuse_shared_devices(world, f"cuda {member.rank}", wanted=False)
        world_module._refuse_shared_devices(world, "cuda 0", wanted=True)
        with pytest.raises(DeviceError) as caught:
            world_module._refuse_shared_devices(world, "cuda 0", wanted=member.rank == 0)
        return str(caught.value)

    for text in on_ranks(body, 2):
        assert "ranks 0, 1 on" in text
        assert "cuda 0" in text
    assert capfd.readouterr().err.count("warning: ranks share a device (ranks 0, 1 on") == 1
