"""The quick methods of a group, in C: what they do, what they leave to the methods in Python, and that these agree."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from phalanx.c10d.quick import prepared_module
from phalanx.group import Group, Session

pytestmark = pytest.mark.skipif(prepared_module() is None, reason="this torch lacks what they need")


def world_group() -> Any:
    return dist.group.WORLD


class Counted:
    """How often the class's own method was called, in the place of the quick one."""

    def __init__(self, group: Any, name: str) -> None:
        self.kind, self.name, self.own, self.count = type(group), name, getattr(type(group), name), 0

    def __enter__(self) -> Counted:
        def counting(*given: Any, **named: Any) -> Any:
            self.count += 1
            return self.own(*given, **named)

        vars(counting).update(vars(self.own))
        setattr(self.kind, self.name, counting)
        return self

    def __exit__(self, *exception: object) -> None:
        setattr(self.kind, self.name, self.own)


@every_rank()
def test_each_usual_call_is_quick_and_right(member: Member) -> None:
    group, rank, size = world_group(), member.rank, member.size
    gather, scatter = AllgatherOptions(), ReduceScatterOptions()
    gather.asyncOp = scatter.asyncOp = False

    def quick(name: str, call: Callable[[], object], result: torch.Tensor, expected: list[float]) -> None:
        with Counted(group, name) as counted:
            call()
        assert counted.count == 0, name
        assert result.flatten().tolist() == expected, name

    ones, number = torch.full((2, 3), float(rank + 1)), torch.tensor(float(rank))
    quick("allreduce", lambda: dist.all_reduce(ones), ones, [6.0] * 6)
    largest = torch.tensor([rank, -rank], dtype=torch.int64)
    quick("allreduce", lambda: dist.all_reduce(largest, op=dist.ReduceOp.MAX), largest, [2, 0])
    quick("broadcast", lambda: dist.broadcast(number, 2), number, [2.0])
    summed = torch.full((4,), float(rank), dtype=torch.bfloat16)
    quick("reduce", lambda: dist.reduce(summed, 1), summed, [3.0 if rank == 1 else rank] * 4)
    whole, own = torch.zeros(2 * size), torch.full((2,), float(rank))
    quick("_allgather_base", lambda: group._allgather_base(whole, own, gather), whole, [0.0, 0, 1, 1, 2, 2])
    part, parts = torch.zeros(2), torch.arange(2.0 * size)
    expected = [6.0 * rank, 6.0 * rank + 3]
    quick("_reduce_scatter_base", lambda: group._reduce_scatter_base(part, parts, scatter), part, expected)
    quick("barrier", dist.barrier, torch.zeros(0), [])


@every_rank()
def test_what_is_not_plain_goes_to_python_on_that_rank_alone(member: Member) -> None:
    """In turn each rank gives an unusual form of the same call; the others cannot tell."""
    group = world_group()
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "strided": lambda: torch.ones(8)[::2],
        "parameter": lambda: torch.nn.Parameter(torch.ones(4), requires_grad=False),
        "queued": lambda: torch.ones(4),
        "profiled": lambda: torch.ones(4),
    }
    for name, form in forms.items():
        for unusual in range(member.size):
            tensor, how = (form(), name) if unusual == member.rank else (torch.ones(4), "")
            profiled = torch.profiler.profile() if how == "profiled" else contextlib.nullcontext()
            with Counted(group, "allreduce") as counted, profiled:
                work = dist.all_reduce(tensor, async_op=how == "queued")
                if work is not None:
                    work.wait()
            assert tensor.tolist() == [float(member.size)] * 4, name
            assert counted.count == (unusual == member.rank and name != "parameter"), (name, counted.count)
    # After an operation that nobody has waited for, the next call runs that one first.
    first, second = torch.ones(3), torch.ones(5)
    dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    assert first.tolist() == [member.size] * 3
    assert second.tolist() == [member.size] * 5


@every_rank()
def test_tensors_whose_data_mean_something_else_go_to_python(member: Member) -> None:
    negated = torch.tensor(2 + 3j).conj().imag  # a bit says that its data are to be negated
    for tensor in (negated, torch.ones(2, 2).t()[:1], torch.ones(2, dtype=torch.int8)):
        with Counted(world_group(), "allreduce") as counted:
            dist.all_reduce(tensor)
        assert counted.count == 1
    # The imaginary part of a conjugate on one rank, and a number of its own on the others.
    number = torch.tensor(2 + 3j).conj().imag if member.rank else torch.tensor(-3.0)
    dist.all_reduce(number)
    assert number.item() == -9.0


@every_rank(timeout_s=120)
def test_quick_calls_beside_a_thread_that_closes_the_group(member: Member) -> None:
    for _ in range(4):
        group: Any = dist.new_group()
        called, ended = threading.Event(), threading.Event()

        def call(group: Any = group, called: threading.Event = called, ended: threading.Event = ended) -> None:
            try:
                while True:
                    dist.all_reduce(torch.ones(2), group=group)
                    called.set()
            except BaseException:
                ended.set()

        thread = threading.Thread(target=call)
        thread.start()
        called.wait()
        group.abort()
        dist.destroy_process_group(group)
        thread.join()
        assert ended.is_set()


@every_rank(timeout_s=60)
def test_calls_from_c_plus_plus_reach_the_group(member: Member) -> None:
    """DDP's reducer calls the group's method; a built-in function in its place would send it to the attached Gloo."""
    group = world_group()
    with Counted(group, "allreduce") as counted:
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        model(torch.ones(1, 3)).sum().backward()
    assert counted.count > 0


@every_rank()
def test_messages_that_are_waited_for_are_quick_and_right(member: Member) -> None:
    group, after, before = world_group(), (member.rank + 1) % 3, (member.rank - 1) % 3
    with Counted(group, "send") as sends, Counted(group, "recv") as receives:
        for length in (0, 1, 5, 3000):  # the last is copied without the interpreter's lock
            dist.send(torch.full((length,), float(member.rank)), after, tag=length)
            received = torch.empty(length)
            assert dist.recv(received, before, tag=length) == before
            assert received.tolist() == [float(before)] * length
        assert group.send_now(torch.tensor([7, member.rank]), after, 2**40 + 1)
        number = torch.zeros(2, dtype=torch.int64)
        assert group.recv_now(number, before, 1)
        assert number.tolist() == [7, before]
    assert (sends.count, receives.count) == (0, 0)


@every_rank(2, timeout_s=60)
def test_messages_that_are_not_plain_go_to_python(member: Member) -> None:
    group = world_group()
    other = 1 - member.rank
    forms = [torch.arange(8.0)[::2], torch.tensor(2 + 3j).conj().imag, torch.ones(2, dtype=torch.int8)]
    for tensor in forms:
        with Counted(group, "send") as sends, Counted(group, "recv") as receives:
            dist.send(tensor, other)
            received = torch.zeros(8, dtype=tensor.dtype)[: 2 * tensor.numel() : 2].view_as(tensor)
            dist.recv(received, other)
        assert torch.equal(received, tensor)
        assert (sends.count, receives.count) == (1, tensor.numel() != 1 or tensor.dtype != torch.float32)
    # Handles that the caller keeps have their tensors, and may be waited for later.
    mine, theirs = torch.full((3,), float(member.rank)), torch.zeros(3)
    work, sent = dist.irecv(theirs, other), dist.isend(mine, other)
    assert work is not None
    assert sent is not None
    assert sent.result()[0] is mine
    assert work.wait()
    assert theirs.tolist() == [float(other)] * 3
    # Any source, a message to oneself, and ranks that are refused.
    dist.send(mine, other)
    assert dist.recv(theirs) == other
    assert not group.send_now(mine, member.rank, 0)
    assert not group.recv_now(mine, None, 0)
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="rank"):
            call(mine, 2)


@every_rank(2)
def test_a_dropped_group_is_collected_with_what_its_methods_hold(member: Member) -> None:
    group: Any = dist.new_group()
    dist.broadcast(torch.ones(2), 0, group=group)  # the communicator remembers it by the methods' common part
    kept = [weakref.ref(group._progress), weakref.ref(group._communicator)]
    group.queued = group.allreduce  # a cycle through one of the methods
    group._progress.group = group
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


@every_rank()
def test_a_mode_for_torchs_functions_sees_a_groups_calls(member: Member) -> None:
    class Seeing(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    world = Group(world_group(), range(3), Session(frozenset({"cpu"})))
    tensor, other = torch.full((2,), float(member.rank)), torch.zeros(2)
    with Seeing() as mode:
        world.all_reduce(tensor)
        world.send(tensor, (member.rank + 1) % 3)
        world.recv(other, (member.rank - 1) % 3)
    assert tensor.tolist() == other.tolist() == [3.0] * 2
    assert [name for name in mode.seen if name in ("all_reduce", "send", "recv")] == ["all_reduce", "send", "recv"]
