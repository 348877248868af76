"""The quick methods of a group, in C: what they do, what they leave to the methods in Python, and that these agree."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import every_rank
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from phalanx.c10d.quick import missing
from phalanx.errors import ClosedError, CollectiveMismatch, PeerLost
from phalanx.group import Group, Session

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there are quick methods")

SIZES = [2, 3]


def joined(place: Member) -> Any:
    place.join()
    group: Any = dist.group.WORLD
    return group


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


@pytest.mark.parametrize("size", SIZES)
def test_each_usual_call_is_quick_and_right(size: int) -> None:
    def body(place: Member) -> dict[str, list[float]]:
        group = joined(place)
        rank, counts, got = place.rank, {}, {}

        def quick(name: str, call: Callable[[], object], result: torch.Tensor) -> None:
            with Counted(group, name) as counted:
                call()
            counts[name] = counted.count
            got[name] = result.flatten().tolist()

        ones = torch.full((2, 3), float(rank + 1))
        quick("allreduce", lambda: dist.all_reduce(ones), ones)
        largest = torch.tensor([rank, -rank], dtype=torch.int64)
        quick("allreduce", lambda: dist.all_reduce(largest, op=dist.ReduceOp.MAX), largest)
        assert got["allreduce"] == [size - 1, 0]
        given = torch.tensor(float(rank))
        quick("broadcast", lambda: dist.broadcast(given, size - 1), given)
        summed = torch.full((4,), float(rank), dtype=torch.bfloat16)
        quick("reduce", lambda: dist.reduce(summed, 1), summed)
        if rank != 1:
            got["reduce"] = [float(sum(range(size)))] * 4
        whole = torch.zeros(2 * size)
        quick(
            "_allgather_base",
            lambda: group._allgather_base(whole, torch.full((2,), float(rank)), gather_options),
            whole,
        )
        part = torch.zeros(2)
        parts = torch.arange(2.0 * size)
        quick("_reduce_scatter_base", lambda: group._reduce_scatter_base(part, parts, scatter_options), part)
        quick("barrier", dist.barrier, torch.zeros(0))
        got["all_reduce"] = ones.flatten().tolist()
        got["share"] = [value - size * 2 * rank for value in got.pop("_reduce_scatter_base")]
        dist.destroy_process_group()
        assert not any(counts.values()), counts
        return got

    gather_options, scatter_options = AllgatherOptions(), ReduceScatterOptions()
    gather_options.asyncOp = scatter_options.asyncOp = False
    expected = {
        "allreduce": [size - 1, 0],
        "all_reduce": [size * (size + 1) / 2] * 6,
        "broadcast": [size - 1.0],
        "reduce": [float(sum(range(size)))] * 4,
        "_allgather_base": [float(rank) for rank in range(size) for _ in range(2)],
        "share": [0.0, float(size)],
        "barrier": [],
    }
    assert on_ranks(body, size) == [expected] * size


@every_rank(joins=False)
def test_what_is_not_plain_goes_to_python_and_the_other_ranks_may_stay_quick(member: Member) -> None:
    """In turn each rank gives an unusual form of the same call; the others cannot tell."""
    group = joined(member)
    forms: dict[str, Callable[[], tuple[torch.Tensor, Any]]] = {
        "strided": lambda: (torch.ones(8)[::2], None),
        "parameter": lambda: (torch.nn.Parameter(torch.ones(4), requires_grad=False), None),
        "queued": lambda: (torch.ones(4), True),
        "profiled": lambda: (torch.ones(4), torch.profiler.profile()),
    }
    for name, form in forms.items():
        for unusual in range(member.size):
            tensor, how = form() if unusual == member.rank else (torch.ones(4), None)
            with Counted(group, "allreduce") as counted:
                if how is True:
                    work = dist.all_reduce(tensor, async_op=True)
                    assert work is not None
                    work.wait()
                elif how is not None:
                    with how:
                        dist.all_reduce(tensor)
                else:
                    dist.all_reduce(tensor)
            assert tensor.tolist() == [float(member.size)] * 4, name
            assert counted.count == (unusual == member.rank and name != "parameter"), (name, counted.count)
    # After an operation that nobody has waited for, the next call runs that one first.
    first, second = torch.ones(3), torch.ones(5)
    dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    assert first.tolist() == [member.size] * 3
    assert second.tolist() == [member.size] * 5


@pytest.mark.parametrize("size", SIZES)
def test_tensors_whose_data_mean_something_else_are_left_to_python(size: int) -> None:
    def body(place: Member) -> list[int]:
        group = joined(place)
        unusual = [
            torch.tensor(2 + 3j).conj().imag,  # a bit says that its data are to be negated
            torch.ones(2, 2).t()[:1],
            torch.ones(1, 1, 1, 1, 1),
            torch.ones(2, dtype=torch.int8),
        ]
        counts = []
        for tensor in unusual:
            with Counted(group, "allreduce") as counted:
                dist.all_reduce(tensor)
            counts.append(counted.count)
        dist.destroy_process_group()
        return counts

    assert on_ranks(body, size) == [[1] * 4] * size


@pytest.mark.parametrize("size", SIZES)
def test_the_sum_of_a_number_that_torch_negates_when_it_reads_it_is_right(size: int) -> None:
    """It is the imaginary part of a conjugate on one rank, and a number of its own on the others."""

    def body(place: Member) -> list[float]:
        joined(place)
        number = torch.tensor(2 + 3j).conj().imag if place.rank else torch.tensor(-3.0)
        dist.all_reduce(number)
        dist.destroy_process_group()
        return number.tolist()

    assert on_ranks(body, size) == [-3.0 * size] * size


@pytest.mark.parametrize("size", SIZES)
def test_errors_are_those_of_python_and_name_the_line(size: int) -> None:
    """Also for a broadcast's root, which has returned from the call that did not match."""

    def body(place: Member) -> list[bool]:
        group = joined(place)
        dist.barrier()
        wrong = size - 1
        with pytest.raises(CollectiveMismatch) as caught:
            if place.rank == wrong:
                dist.all_reduce(torch.ones(3))
            else:
                dist.broadcast(torch.ones(3), 0)
                dist.barrier()
        text = str(caught.value)
        held = group._progress.running.acquire(blocking=False), group._progress.busy
        dist.destroy_process_group()
        with pytest.raises((ClosedError, ValueError)):
            dist.all_reduce(torch.ones(3))
        with pytest.raises(ClosedError):
            group.allreduce([torch.ones(3)], AllreduceOptions())
        return [
            "broadcast(float32[3], src=0) at " in text,
            "all_reduce(float32[3], sum) at " in text,
            text.count("test_quick.py:") == 2,
            held == (True, False),
        ]

    assert on_ranks(body, size, timeout_s=60) == [[True] * 4] * size


@every_rank(timeout_s=120)
def test_quick_calls_of_a_thread_beside_another_that_closes_the_group(member: Member) -> None:
    outcomes = []
    for _ in range(10):
        group: Any = dist.new_group()
        ended: list[BaseException] = []

        def call(group: Any = group, ended: list[BaseException] = ended) -> None:
            try:
                while True:
                    dist.all_reduce(torch.ones(2), group=group)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.01)
        group.abort()
        dist.destroy_process_group(group)
        thread.join()
        outcomes.append(len(ended))
    assert outcomes == [1] * 10


@every_rank(joins=False, timeout_s=60)
def test_calls_from_c_plus_plus_reach_the_group(member: Member) -> None:
    """DDP's reducer calls the group's method; a built-in function in its place would send it to the attached Gloo."""
    group = joined(member)
    with Counted(group, "allreduce") as counted:
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        model(torch.ones(1, 3)).sum().backward()
    assert counted.count > 0


@pytest.mark.parametrize("size", SIZES)
def test_messages_that_are_waited_for_are_quick_and_right(size: int) -> None:
    def body(place: Member) -> list[Any]:
        group = joined(place)
        after, before = (place.rank + 1) % size, (place.rank - 1) % size
        got: list[Any] = []
        with Counted(group, "send") as sends, Counted(group, "recv") as receives:
            for length in (0, 1, 5, 3000):  # the last is copied without the interpreter's lock
                tensor = torch.full((length,), float(place.rank))
                dist.send(tensor, after, tag=length)
                received = torch.empty(length)
                got.append(dist.recv(received, before, tag=length))
                assert received.tolist() == [float(before)] * length
            assert group.send_now(torch.tensor([7, place.rank]), after, 2**40 + 1)
            number = torch.zeros(2, dtype=torch.int64)
            assert group.recv_now(number, before, 1)
            assert number.tolist() == [7, before]
        got.append((sends.count, receives.count))
        dist.destroy_process_group()
        return got

    assert on_ranks(body, size, timeout_s=60) == [[(rank - 1) % size] * 4 + [(0, 0)] for rank in range(size)]


@every_rank(2, joins=False, timeout_s=60)
def test_messages_that_are_not_plain_go_to_python(member: Member) -> None:
    group = joined(member)
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
    # Any source, a message to oneself, and ranks and tensors that are refused.
    dist.send(mine, other)
    assert dist.recv(theirs) == other
    assert not group.send_now(mine, member.rank, 0)
    assert not group.recv_now(mine, 2, 0)
    assert not group.recv_now(mine, None, 0)
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="rank"):
            call(mine, 2)


def test_a_message_that_does_not_fit_and_one_whose_sender_leaves_raise_as_in_python() -> None:
    def body(place: Member) -> list[str]:
        joined(place)
        texts = []
        second: Any = dist.new_group()
        if place.rank:
            dist.send(torch.ones(3), 0)
            dist.destroy_process_group(second)
            with contextlib.suppress(CollectiveMismatch):
                dist.destroy_process_group()
        else:
            for group, length in ((None, 4), (second, 2)):
                with pytest.raises((CollectiveMismatch, PeerLost)) as caught:
                    dist.recv(torch.zeros(length), 1, group=group)
                texts.append(f"{type(caught.value).__name__}: {caught.value}")
            dist.destroy_process_group()
        return texts

    mismatch, lost = on_ranks(body, 2, timeout_s=60)[0]
    assert mismatch.startswith("CollectiveMismatch")
    assert "recv from rank 1, float32[4]" in mismatch
    assert "test_quick.py:" in mismatch
    assert lost.startswith("PeerLost")
    assert "recv from rank 1, float32[2]" in lost


def test_a_group_that_is_dropped_is_collected_with_all_that_its_methods_hold() -> None:
    def body(place: Member) -> list[bool]:
        joined(place)
        group: Any = dist.new_group()
        tensor = torch.ones(2)
        dist.broadcast(tensor, 0, group=group)  # the communicator remembers it by the methods' common part
        kept = [weakref.ref(group._progress), weakref.ref(group._communicator)]
        group.queued = group.allreduce  # a cycle through one of the methods
        group._progress.group = group
        dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.destroy_process_group()
        return [reference() is None for reference in kept]

    assert on_ranks(body, 2, timeout_s=60) == [[True, True]] * 2


@pytest.mark.parametrize("size", SIZES)
def test_a_mode_for_torchs_functions_sees_the_worlds_calls_as_those_of_torch_distributed(size: int) -> None:
    class Seeing(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    def body(place: Member) -> list[str]:
        group = joined(place)
        world = Group(group, range(size), Session(frozenset({"cpu"})))
        tensor, other = torch.full((2,), float(place.rank)), torch.zeros(2)
        after, before = (place.rank + 1) % size, (place.rank - 1) % size
        with Seeing() as mode:
            world.all_reduce(tensor)
            world.send(tensor, after)
            world.recv(other, before)
        assert tensor.tolist() == other.tolist() == [sum(range(size))] * 2
        dist.destroy_process_group()
        return [name for name in mode.seen if name in ("all_reduce", "send", "recv")]

    assert on_ranks(body, size, timeout_s=60) == [["all_reduce", "send", "recv"]] * size
