"""Groups whose ranks change: by ``torch.distributed._reconfigure``, from torch 2.15 on, and by torchft's own way."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP needs it; before the ranks are forked, since it takes each of them seconds
import torch.distributed as dist
from tests.support.constellations import WAYS, Reconfigured, accumulated, can_reconfigure, join, summed
from tests.support.inventory import held_by, shared_memory_files
from tests.support.islands import OWN_KEYS, pretend_host
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import ArgumentError, ClosedError, InitializationError, PeerLost

c10d: Any = distributed_c10d
SIZE = 3
ways = pytest.mark.parametrize("way", WAYS)
places = pytest.mark.parametrize("hosts", [1, 2], ids=["one-host", "two-hosts"])


def settle(member: Member, hosts: int) -> None:
    if hosts > 1:
        pretend_host(member.rank % hosts)


def total(ranks: Sequence[int]) -> float:
    """The sum of what the members give in ``summed``: one more than who they were at first."""
    return float(sum(rank + 1 for rank in ranks))


# -- both ways -------------------------------------------------------------------------------------


@places
@ways
def test_ranks_are_left_out_and_come_again(way: Callable[[Member], Any], hosts: int) -> None:
    everybody = list(range(SIZE))
    constellations = [everybody, everybody[:-1], everybody, everybody[1:], everybody[::-1]]

    def body(member: Member) -> None:
        settle(member, hosts)
        mine = way(member)
        for number, members in enumerate(constellations):
            if member.rank in members:
                mine.change(number, members)
                assert (mine.group.rank(), mine.group.size()) == (members.index(member.rank), len(members))
                assert summed(mine.group, member.rank + 1.0) == [total(members)] * 4
                assert summed(mine.group, member.rank + 1.0, 300_000) == [total(members)] * 300_000
            member.meet(f"after-{number}")
        mine.end()

    on_ranks(body, SIZE)


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.long), 2], ids=["one-host", "two-hosts"])
@ways
def test_many_changes_leave_nothing(way: Callable[[Member], Any], hosts: int) -> None:
    everybody = list(range(SIZE))

    def body(member: Member) -> dict[str, Any]:
        settle(member, hosts)
        mine = way(member)

        def keys(groups: int) -> int:
            """How many there are, without those by which so many groups pretended to be on several hosts."""
            there: int = mine._store.num_keys()
            return there - (groups * SIZE * OWN_KEYS if hosts > 1 else 0)

        def change(number: int) -> None:
            mine.change(number, everybody)
            assert summed(mine.group, member.rank + 1.0) == [total(everybody)] * 4
            options = dist.AllreduceOptions()
            mine.group.allreduce([torch.ones(3)], options).wait()
            peer = (mine.group.rank() + 1) % SIZE
            works = [mine.group.send([torch.ones(2)], peer, 0), mine.group.recv([torch.ones(2)], (peer - 2) % SIZE, 0)]
            for work in works:
                work.wait()
            member.meet(f"changed-{number}")  # torchft ends what a rank that is behind is still doing

        for number in range(3):
            change(number)
        member.meet("warm")
        before, few = held_by(os.getpid()), keys(3)
        member.meet("counted")
        for number in range(3, 23):
            change(number)
        member.meet("changed")
        found: dict[str, Any] = {**accumulated(before, os.getpid(), 20, hosts)}
        if not soon(lambda: keys(23) <= few):  # the last rank to leave a group deletes its keys, in no hurry
            found["keys"] = keys(23) - few
        member.meet("counted again")
        mine.end()
        return found

    files = shared_memory_files()
    assert on_ranks(body, SIZE) == [{}] * SIZE
    assert shared_memory_files() <= files


# -- torch's way -----------------------------------------------------------------------------------


@can_reconfigure
def test_a_group_has_no_ranks_at_first() -> None:
    def body(member: Member) -> None:
        join(member, member.store(), 7)
        assert (dist.get_rank(), dist.get_world_size()) == (member.rank, 7)
        assert c10d._supports_reconfigure()
        world: Any = dist.group.WORLD
        told = (
            "has no ranks yet, so it cannot .*: it was made with enable_reconfigure=True. Call torch.distributed._recon"
        )
        for call in (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.send(torch.ones(1), 1 - member.rank),
            lambda: torch.ops.c10d.barrier(torch.ones(1), world.boxed(), [], False, 1000),
        ):
            with pytest.raises(RuntimeError, match=told):
                call()
        dist.destroy_process_group()

    on_ranks(body, 2)


@can_reconfigure
@places
def test_everything_works_after_a_change(hosts: int) -> None:
    """Whatever is called: torch's functions, its operators, the group's backend, DDP."""
    everybody = list(range(SIZE))

    def body(member: Member) -> None:
        settle(member, hosts)
        mine = Reconfigured(member)
        mine.change(1, everybody[::-1])
        mine.change(2, everybody)
        rank, expected = member.rank, float(sum(range(SIZE)))
        world: Any = dist.group.WORLD
        x = torch.full((3,), float(rank))
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        out = torch.empty(SIZE)
        dist.all_to_all_single(out, torch.arange(SIZE) + 10.0 * rank)
        assert out.tolist() == [10.0 * other + rank for other in everybody]
        objects: list[Any] = [None] * SIZE
        dist.all_gather_object(objects, {"rank": rank})
        assert [each["rank"] for each in objects] == everybody
        y, op = torch.full((3,), float(rank)), c10d.ReduceOp(dist.ReduceOp.SUM)
        torch.ops.c10d.allreduce_([y], world.boxed(), op.boxed(), None, False, -1)
        assert x.tolist() == y.tolist() == [expected] * 3
        functional = torch.ops._c10d_functional
        z = functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", world.group_name))
        assert z.tolist() == [float(SIZE)] * 2
        backend: Any = c10d.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
        assert (backend.rank(), backend.size(), backend.supports_reconfigure) == (rank, SIZE, True)
        found, peer = torch.empty(1), (rank + 1) % SIZE
        works = [backend.send([torch.tensor([float(rank)])], peer, 0), backend.recv([found], (peer - 2) % SIZE, 0)]
        for each in works:
            each.wait()
        assert found.item() == (rank - 1) % SIZE
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), float(rank))).sum().backward()
        assert model.module.weight.grad is not None
        assert model.module.weight.grad.tolist() == [[expected / SIZE] * 2]
        c10d.barrier()
        mine.end()

    on_ranks(body, SIZE)


@can_reconfigure
def test_what_is_under_way_ends_with_an_error() -> None:
    """The last rank never calls it, and is left out; then the others' operations and messages end in words."""

    def body(member: Member) -> None:
        mine = Reconfigured(member)
        mine.change(1, [0, 1, 2])
        if member.rank == 2:
            with pytest.raises(PeerLost, match=r"reconfigure\(\), which ended this group"):
                dist.recv(torch.ones(1), 0)
        else:
            works = [dist.all_reduce(torch.ones(3), async_op=True), dist.all_reduce(torch.ones(3), async_op=True)]
            works.append(dist.irecv(torch.ones(1), 2))
            mine.change(2, [0, 1])
            for work in works:
                # The other rank may have been quicker to leave the old group than this one.
                with pytest.raises((ClosedError, PeerLost), match="reconfigure"):
                    work.wait()
            assert summed(mine.group, member.rank + 1.0) == [3.0] * 4
        member.meet("done")
        mine.end()

    on_ranks(body, 3)


@can_reconfigure
def test_an_attempt_that_fails_changes_nothing() -> None:
    def body(member: Member) -> None:
        mine = Reconfigured(member)
        mine.change(1, [0, 1, 2])
        handles = [mine._store.get(f"handle-{rank}").decode() for rank in range(3)]
        if member.rank != 2:
            late = "rank 0: rank 2 did not come within 1 s" if member.rank == 0 else "rank"
            told = f"(?s)process group '0' could not be reconfigured to 3 ranks: .*{late}.*new uuid"
            with pytest.raises(InitializationError, match=told):
                c10d._reconfigure(2, handles, timeout=timedelta(seconds=1))
        member.meet("failed")
        assert summed(mine.group, member.rank + 1.0) == [6.0] * 4
        mine.change(3, [2, 1, 0])
        assert dist.get_rank() == 2 - member.rank
        assert summed(mine.group, member.rank + 1.0) == [6.0] * 4
        member.meet("done")
        mine.end()

    on_ranks(body, 3)


@can_reconfigure
def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    def body(member: Member) -> None:
        mine = Reconfigured(member)
        own, other = (mine._store.get(f"handle-{rank}").decode() for rank in (member.rank, 1 - member.rank))
        mine.change(1, [0, 1])
        for uuid, handles, told in (
            (2, [], "a group has one rank at least; got no handle"),
            (2, [own, "gloo:1:2:3:"], "'gloo:1:2:3:' is not a handle of a group of Phalanx"),
            (2, [own, other, own], "is listed twice"),
            (2, [other], "none of the 1 handles is this process's own"),
            (1, [own, other], "reconfigure: the uuid 1 was already used by this group"),
        ):
            with pytest.raises(ArgumentError, match=told):
                c10d._reconfigure(uuid, handles)
        with pytest.raises(TypeError):
            c10d._reconfigure(2, [own, 3])
        mine.change(2, [0, 1])
        assert summed(mine.group, 1.0) == [2.0] * 4
        member.meet("done")
        group = mine.group
        mine.end()
        with pytest.raises(ClosedError, match="after it had been destroyed"):
            c10d._reconfigure(5, [own], group=group)

    on_ranks(body, 2)


@can_reconfigure
def test_a_group_goes_on_after_what_is_done_to_it() -> None:
    """It is aborted, used in a forked child, given a set of handles, and given a timeout, which stays."""

    def body(member: Member) -> float:
        mine = Reconfigured(member)
        backend: Any = c10d.get_backend_impl(dist.group.WORLD, torch.device("cpu"))

        def works() -> None:
            assert summed(mine.group, member.rank + 1.0) == [6.0] * 4
            member.meet(f"works-{next(turn)}")

        turn = iter(range(9))
        mine.change(1, [2, 1, 0])
        assert dist.get_rank() == 2 - member.rank
        backend.abort()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        c10d._reconfigure(2, {mine._store.get(f"handle-{rank}").decode() for rank in range(3)}).wait()
        assert dist.get_rank() == member.rank  # a set is ordered by the first ranks
        works()
        child = os.fork()
        if not child:
            try:
                mine.change(3, [0, 1, 2])
            except ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        works()
        backend.set_timeout(timedelta(seconds=2))
        mine.change(4, [0, 1, 2])
        elapsed_s = 2.0
        if member.rank == 0:
            with pytest.raises(RuntimeError) as caught:
                dist.all_reduce(torch.ones(1))
            elapsed_s = getattr(caught.value, "elapsed_s", 0.0)
        member.meet("done")
        mine.end()
        return elapsed_s

    assert on_ranks(body, 3) == [2.0] * 3


@can_reconfigure
def test_other_groups_say_that_their_ranks_stay() -> None:
    def body(member: Member) -> None:
        member.join()
        world: Any = dist.group.WORLD
        torch.ops.c10d.barrier(torch.ones(1), world.boxed(), [], False, 60_000)  # Gloo is attached
        assert not c10d._supports_reconfigure()
        for call in (c10d._get_reconfigure_handle, lambda: c10d._reconfigure(1, ["phalanx:0:0"])):
            with pytest.raises(ArgumentError, match="enable_reconfigure=True"):
                call()
        dist.destroy_process_group()

    on_ranks(body, 2)
