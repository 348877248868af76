"""The backend as torch's users meet it: through ``torch.distributed``, synchronous and asynchronous."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import ANYWHERE, every_rank

from phalanx.c10d.torch_versions import function
from phalanx.errors import ArgumentError, BackendError


def ones(place: Member, count: int = 4) -> torch.Tensor:
    return torch.full((count,), float(place.rank + 1))


def total(size: int) -> float:
    return size * (size + 1) / 2


@every_rank([1, 3], ["one host", "two hosts"], ["phalanx", "mpi"])
def test_every_collective_of_torch_works(member: Member) -> None:
    every_collective(member)


@every_rank(3, ["one host", "two hosts, in turn"], "replaced")
def test_every_collective_works_where_gloo_is_replaced(member: Member) -> None:
    every_collective(member)


def every_collective(member: Member) -> None:
    """Native ones and those that still go to the attached Gloo group, mixed."""
    rank, n = member.rank, member.size
    everyone = [float(r + 1) for r in range(n)]
    for op, result in ((dist.ReduceOp.SUM, total(n)), (dist.ReduceOp.MAX, float(n)), (dist.ReduceOp.MIN, 1.0)):
        tensor = ones(member)
        dist.all_reduce(tensor, op=op)
        assert tensor.tolist() == [result] * 4
    tensor = ones(member)
    dist.broadcast(tensor, src=n - 1)
    assert tensor.tolist() == [float(n)] * 4
    gathered = [torch.empty(4) for _ in range(n)]
    dist.all_gather(gathered, ones(member))
    assert [t[0].item() for t in gathered] == everyone
    flat = torch.empty(4 * n)
    function("all_gather_single")(flat, ones(member))
    assert flat.view(n, 4)[:, 0].tolist() == everyone
    output = torch.empty(2)
    dist.reduce_scatter(output, [torch.full((2,), float(r * (rank + 1))) for r in range(n)])
    assert output.tolist() == [rank * total(n)] * 2
    received = [torch.empty(1) for _ in range(n)]
    dist.all_to_all(received, [torch.tensor([10.0 * rank + r]) for r in range(n)])
    assert [t.item() for t in received] == [10.0 * r + rank for r in range(n)]
    at_root = [torch.empty(4) for _ in range(n)] if rank == 0 else None
    dist.gather(ones(member), at_root, dst=0)
    if at_root is not None:
        assert [t[0].item() for t in at_root] == everyone
    piece = torch.empty(1)
    dist.scatter(piece, [torch.tensor([float(r)]) for r in range(n)] if rank == 0 else None, src=0)
    assert piece.item() == rank
    reduced = ones(member)
    dist.reduce(reduced, dst=0)
    if rank == 0:
        assert reduced.tolist() == [total(n)] * 4
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(n)]


@every_rank(3, ANYWHERE, ["phalanx", "mpi"])
def test_operations_run_in_the_order_of_the_calls(member: Member) -> None:
    """Asynchronous ones behind each other, and a synchronous one behind them. Products and sums do not commute."""
    tensor = torch.tensor([float(member.rank + 1)])
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.SUM)
    works = [dist.all_reduce(tensor, op=op, async_op=True) for op in ops]
    dist.all_reduce(tensor)
    assert all(work.is_completed() for work in works)
    for work in works:
        work.wait()
    assert tensor.item() == (6 * 3) ** 3 * 3 * 3


@every_rank(3, ["one host", "two hosts"])
def test_an_asynchronous_call_returns_while_a_rank_is_late(member: Member) -> None:
    dist.barrier()
    if member.rank == 0:
        member.await_said("returned 1", "returned 2")
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    if member.rank:
        assert not work.is_completed()
        member.say(f"returned {member.rank}")
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert tensor[0].item() == 3


@every_rank(2)
def test_waiting_with_a_timeout_gives_up_and_can_be_resumed(member: Member) -> None:
    dist.barrier()
    if member.rank == 0:
        member.await_said("gave up")
        dist.all_reduce(torch.ones(1))
    else:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(RuntimeError, match="still under way"):
            work.wait(timedelta(milliseconds=50))
        member.say("gave up")
        assert work.wait()


@every_rank(joins=False)
def test_a_group_name_is_used_again_by_other_ranks(member: Member) -> None:
    """torch numbers groups anew in every world, so one name can mean other members the second time."""
    store = member.store()
    for members in ([0, 1], [1, 2], [0, 1]):
        dist.init_process_group("phalanx", store=store, rank=member.rank, world_size=3, timeout=timedelta(seconds=30))
        group = dist.new_group(members)
        if member.rank in members:
            tensor = ones(member)
            dist.all_reduce(tensor, group=group)
            assert tensor[0].item() == sum(r + 1 for r in members)
        dist.barrier()
        dist.destroy_process_group()


@every_rank(timeout_s=30)
def test_a_group_works_after_a_thread_could_not_be_started(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendError, match="can't start new thread"):
            dist.all_reduce(torch.ones(1), async_op=True)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == member.size


@every_rank()
def test_integers_are_not_scaled_by_fractions(member: Member) -> None:
    op = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
    for call in (lambda t: dist.all_reduce(t, op=op), lambda t: dist.reduce(t, 0, op=op)):
        with pytest.raises(ArgumentError, match="PREMUL_SUM"):
            call(torch.ones(2, dtype=torch.int64))


def test_scripts_need_no_import_of_phalanx() -> None:
    """The entry point registers the backend at ``import torch``, and does little else."""
    script = (
        "import sys, torch, torch.distributed as dist\n"
        "print(*sorted(m for m in sys.modules if m.startswith('phalanx')))\n"
        "dist.init_process_group('phalanx', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(2); dist.all_reduce(x); print(x.tolist(), dist.get_backend())\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    of_c10d = ["c10d", "c10d.mpi_slot", "c10d.register", "c10d.torch_versions"]
    others = ["errors", "exception", "lost", "settings", "words"]
    loaded = " ".join(["phalanx", *(f"phalanx.{name}" for name in (*of_c10d, *others))])
    assert done.stdout == f"{loaded}\n[1.0, 1.0] phalanx\n", done.stderr
