"""The promises of every communicator (``phalanx/transports/contract.py``), as checks that the ranks of a group run.

A check gets this rank's communicator, and yields in words what is wrong; every rank of the group runs it. The promises
that not every transport makes are traits of its class, and a check names those that it needs. Expected values are plain
sums and copies computed here.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.world.random_programs import reduced, same

from phalanx.errors import ClosedError, CollectiveMismatch, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.transports.contract import Communicator

Check = Callable[[Communicator, int], Iterator[str]]

SUM = dist.ReduceOp.SUM.value
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
# None, one, less than a cache line, about one and many chunks, and a last chunk with a single element.
COUNTS = (0, 1, 15, 1023, 1025, 70001)
# Subnormals, ties, overflow to infinity, infinities and NaN.
EDGES = (0.0, -0.0, 6e-8, 5.96e-8, 6.1e-5, 1.0, 1.0009765625, 2048.0, 65504.0, 3.0e38, float("inf"), float("nan"))

_CHECKS: dict[str, tuple[Check, tuple[str, ...], int, bool]] = {}


def check(*traits: str, ranks: int = 1, breaks: bool = False) -> Callable[[Check], Check]:
    """Add a check for transports that promise these traits, and groups of so many ranks or more.

    One that ``breaks`` the group has a group of its own.
    """

    def add(function: Check) -> Check:
        _CHECKS[function.__name__] = function, traits, ranks, breaks
        return function

    return add


def run_checks(
    connect: Callable[[str], Communicator], most_bytes: int, leave_out: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Run all checks that apply to such groups: their names, and what is wrong.

    Args:
        connect: makes a group; each gets another name. Every rank calls it.
        most_bytes: the size of the largest tensor to use; larger ones take long if chunks are small.
        leave_out: checks that are not to be run.
    """
    common = connect("common")
    made, wrong = [], []
    for name, (function, traits, ranks, breaks) in _CHECKS.items():
        if name in leave_out or common.size < ranks or not all(getattr(common, trait) for trait in traits):
            continue
        made.append(name)
        own = connect(name) if breaks else common
        wrong += [f"{name}: {what}" for what in function(own, most_bytes)]
        if breaks:
            own.close()
    common.barrier()  # the last check may end on one rank while another still waits for a message
    common.close()
    return made, wrong


def draw(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The contribution of rank ``rank``: values whose sums need rounding, so that their order shows."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * 10.0 ** (rank % 3)).to(dtype)
    return torch.randint(-(2**30), 2**30, (count,), generator=generator).to(dtype)


def whole_numbers(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Ones and twos: every dtype holds their sums and products over a few ranks exactly."""
    return torch.randint(1, 3, (count,), generator=torch.Generator().manual_seed(1000 * rank + salt)).to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist() if tensor.numel() else []


def counts(most_bytes: int, itemsize: int = 8) -> list[int]:
    return [count for count in COUNTS if count * itemsize <= most_bytes]


def parts(c: Communicator, count: int) -> list[torch.Tensor]:
    """Every rank's contribution."""
    return [draw(rank, count, torch.float32) for rank in range(c.size)]


# -- reductions ----------------------------------------------------------------------------------------


@check("rank_order_sums")
def all_reduce_is_the_rank_order_sum_bit_for_bit(c: Communicator, most: int) -> Iterator[str]:
    """16-bit floats are added in 32 bits and rounded once, as torch rounds, also at the edges."""
    for dtype in (*FLOATS, torch.int32, torch.int64):
        for count in counts(most):
            given = [draw(rank, count, dtype, count) for rank in range(c.size)]
            tensor = given[c.rank].clone()
            c.all_reduce(tensor, SUM)
            if not same(tensor, reduced(given, "SUM")):
                yield f"{dtype} x {count}"
    for dtype in (torch.float16, torch.bfloat16):
        given = [torch.tensor([edge * (1 + rank) for edge in EDGES] * 3).to(dtype) for rank in range(c.size)]
        tensor = given[c.rank].clone()
        c.all_reduce(tensor, SUM)
        if not torch.allclose(tensor, reduced(given, "SUM"), rtol=0, atol=0, equal_nan=True):
            yield f"edges of {dtype}"


@check()
def every_reduction_that_can_be_gives_the_result(c: Communicator, most: int) -> Iterator[str]:
    """all_reduce, reduce to each rank in turn, and reduce_scatter, also into this rank's own block."""
    kinds = [(dtype, name) for dtype in (*FLOATS, *INTEGERS) for name in OPS]
    for number, (dtype, name) in enumerate(kinds):
        op, count = getattr(dist.ReduceOp, name).value, (0, 5, 300)[number % 3]
        if not c.can_reduce(dtype, op):
            continue
        wholes = [whole_numbers(rank, count * c.size, dtype, count) for rank in range(c.size)]
        totals, own = reduced(wholes, name), slice(c.rank * count, (c.rank + 1) * count)
        what = f"{name} {dtype} x {count}"
        tensor = wholes[c.rank].clone()
        c.all_reduce(tensor, op)
        if not same(tensor, totals):
            yield f"all_reduce {what}"
        root, tensor = number % c.size, wholes[c.rank].clone()
        c.reduce(tensor, root, op)
        if not same(tensor, totals if c.rank == root else wholes[c.rank]):
            yield f"reduce to {root} {what}"
        output = torch.empty(count, dtype=dtype)
        c.reduce_scatter(output, list(wholes[c.rank].clone().split(count) if count else [output] * c.size), op)
        if not same(output, totals[own]):
            yield f"reduce_scatter {what}"
        whole = wholes[c.rank].clone()
        c.reduce_scatter_single(whole[own], whole, op)
        if not same(whole[own], totals[own]):
            yield f"reduce_scatter_single in place {what}"


# -- copies --------------------------------------------------------------------------------------------


@check()
def broadcast_copies_the_roots_bytes(c: Communicator, most: int) -> Iterator[str]:
    for root in range(c.size):
        for count in counts(most):
            tensor = draw(c.rank, count, torch.float32)
            c.broadcast(tensor, root)
            if not same(tensor, draw(root, count, torch.float32)):
                yield f"root {root} x {count}"


@check()
def all_gather_collects_every_ranks_bytes(c: Communicator, most: int) -> Iterator[str]:
    """Into a list and into one tensor, from elsewhere and from this rank's own part."""
    for count in counts(most // c.size):
        everyone, own = parts(c, count), slice(c.rank * count, (c.rank + 1) * count)
        outputs = [torch.full((count,), -1.0) for _ in everyone]
        c.all_gather(outputs, everyone[c.rank])
        single = torch.full((count * c.size,), -1.0)
        c.all_gather_single(single, everyone[c.rank])
        in_place = torch.full((count * c.size,), -1.0)
        in_place[own] = everyone[c.rank]
        c.all_gather_single(in_place, in_place[own])
        for what, found in (("list", torch.cat(outputs)), ("one tensor", single), ("in place", in_place)):
            if not same(found, torch.cat(everyone)):
                yield f"{what} x {count}"


@check()
def gather_collects_every_ranks_bytes_at_the_root(c: Communicator, most: int) -> Iterator[str]:
    """Into a list and into one tensor, from elsewhere and from this rank's own part; and of another shape."""
    for root in range(c.size):
        for count in counts(most // c.size):
            everyone, own = parts(c, count), slice(c.rank * count, (c.rank + 1) * count)
            is_root = c.rank == root
            outputs = [torch.full((count,), -1.0) for _ in everyone] if is_root else None
            c.gather(outputs, everyone[c.rank].view(1, count), root)
            single = torch.full((count * c.size,), -1.0)
            c.gather_single(single if is_root else None, everyone[c.rank], root)
            in_place = torch.full((count * c.size,), -1.0)
            in_place[own] = everyone[c.rank]
            c.gather_single(in_place if is_root else None, in_place[own], root)
            if outputs is None:
                continue
            for what, found in (("list", torch.cat(outputs)), ("one tensor", single), ("in place", in_place)):
                if not same(found, torch.cat(everyone)):
                    yield f"{what} to {root} x {count}"


@check()
def scatter_hands_out_the_roots_blocks(c: Communicator, most: int) -> Iterator[str]:
    """Also where the root's own block is its output."""
    for root in range(c.size):
        for count in counts(most // c.size):
            blocks, is_root = parts(c, count), c.rank == root
            output = torch.full((1, count), -1.0)
            c.scatter(output, [block.clone() for block in blocks] if is_root else None, root)
            own = [block.clone() for block in blocks]
            c.scatter(own[c.rank], own if is_root else None, root)
            for what, found in (("elsewhere", output), ("in place", own[c.rank])):
                if not same(found.view(-1), blocks[c.rank]):
                    yield f"{what} from {root} x {count}"


@check()
def all_to_all_has_a_size_for_every_pair(c: Communicator, most: int) -> Iterator[str]:
    """Nothing, what a frame between hosts carries, what the memory there has room for, and more; call after call."""
    ranks = range(c.size)
    for call in range(12):

        def part(source: int, to: int, call: int = call) -> torch.Tensor:
            chance = random.Random(1_000_000 * call + 1000 * source + to)
            count = min(chance.choice((0, 1, 30, 100, 200, 300, 410, 500, 900, 3000)), most // 64)
            return torch.arange(count) * 7 + chance.randrange(1 << 40)

        inputs, expected = [part(c.rank, to) for to in ranks], [part(source, c.rank) for source in ranks]
        outputs = [torch.full_like(each, -1) for each in expected]
        if call % 5 == c.rank:
            time.sleep(0.01)  # the others are in later calls when this one comes to the next
        if call % 2:
            single = torch.cat(outputs)
            c.all_to_all_single(single, torch.cat(inputs), [len(e) for e in expected], [len(i) for i in inputs])
            outputs = [single]
        else:
            c.all_to_all(outputs, inputs)
        if not same(torch.cat(outputs), torch.cat(expected)):
            yield f"call {call}"
        if call % 3 == 0:  # in which nobody waits for the ranks that are not needed
            c.broadcast(torch.tensor([call]), call % c.size)


@check()
def no_rank_leaves_a_barrier_before_the_last_has_entered(c: Communicator, most: int) -> Iterator[str]:
    for turn in range(2 * c.size):
        if turn % c.size == c.rank:
            time.sleep(0.01)  # the late rank, which the others must wait for
        entered = time.monotonic_ns()
        c.barrier()
        times = [torch.zeros(2, dtype=torch.int64) for _ in range(c.size)]
        c.all_gather(times, torch.tensor([entered, time.monotonic_ns()]))
        if max(t[0].item() for t in times) > min(t[1].item() for t in times):
            yield f"turn {turn}: {[t.tolist() for t in times]}"


@check()
def mixed_operations_in_a_random_order_stay_in_step(c: Communicator, most: int) -> Iterator[str]:
    """Many operations of several kinds and sizes, so that memory is used again by different kinds."""
    plan, delays = random.Random(7), random.Random(c.rank)  # the plan is the same on every rank
    for turn in range(150):
        kind = plan.choice(("all_reduce", "broadcast", "all_gather", "gather", "barrier"))
        count, root = plan.choice((0, 1, 7, 64, 200, 900, 5000)), plan.randrange(c.size)
        if delays.random() < 0.02:
            time.sleep(0.001)
        everyone = [whole_numbers(rank, count, torch.float32, turn) for rank in range(c.size)]
        tensor, outputs = everyone[c.rank].clone(), [torch.empty(count) for _ in everyone]
        good = True
        if kind == "all_reduce":
            c.all_reduce(tensor, SUM)
            good = same(tensor, reduced(everyone, "SUM"))
        elif kind == "broadcast":
            c.broadcast(tensor, root)
            good = same(tensor, everyone[root])
        elif kind == "all_gather":
            c.all_gather(outputs, tensor)
            good = same(torch.cat(outputs), torch.cat(everyone))
        elif kind == "gather":
            c.gather(outputs if c.rank == root else None, tensor, root)
            good = c.rank != root or same(torch.cat(outputs), torch.cat(everyone))
        else:
            c.barrier()
        if not good:
            yield f"turn {turn}: {kind} x {count}, root {root}"


# -- messages ------------------------------------------------------------------------------------------


@check(ranks=2)
def messages_go_around_a_ring_in_order_and_by_tag(c: Communicator, most: int) -> Iterator[str]:
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    for count in (0, 3, 50_000):
        boxes = [torch.full((count,), -1.0) for _ in range(4)]
        receives = [c.recv(boxes[n], left, n // 2) for n in (2, 3, 0, 1)]  # tag 1 first, then tag 0
        sends = [c.send(torch.full((count,), 10.0 * c.rank + n), right, n // 2) for n in range(4)]
        for message in (*sends, *receives):
            message.wait()
        for n, box in enumerate(boxes):
            if not same(box, torch.full((count,), 10.0 * left + n)):
                yield f"message {n} x {count}: {box[:3].tolist()}"
        if count and {message.source for message in receives} != {left}:
            yield f"sources {[message.source for message in receives]}"


@check(ranks=2, breaks=True)  # over MPICH between hosts it waits in vain where rings of messages have been before
def a_message_from_any_rank_says_which(c: Communicator, most: int) -> Iterator[str]:
    if c.rank:
        c.send(torch.tensor([c.rank]), 0, 5).wait()
    else:
        for _ in range(1, c.size):
            box = torch.zeros(1, dtype=torch.int64)
            message = c.recv(box, None, 5)
            message.wait()
            if message.source != box.item() or not message.test():
                yield f"rank {box.item()} sent it, not {message.source}"
    c.barrier()


@check(ranks=2)
def a_message_that_is_late_can_be_waited_for_again_and_by_several_threads(c: Communicator, most: int) -> Iterator[str]:
    if c.rank == 0:
        box, done = torch.zeros(2), []
        message = c.recv(box, 1, 3)
        if message.test() or message.wait(0.02):
            yield "done before it was sent"
        threads = [threading.Thread(target=lambda: done.append(message.wait())) for _ in range(3)]
        for thread in threads:
            thread.start()
        c.barrier()
        for thread in threads:
            thread.join(20)
        if done != [True] * 3 or not message.wait() or box.tolist() != [7.0, 7.0] or message.source != 1:
            yield f"{done}, {box}, from {message.source}"
    else:
        c.barrier()
        if c.rank == 1:
            c.send(torch.full((2,), 7.0), 0, 3).wait()
    c.barrier()


@check(ranks=2, breaks=True)
def a_message_of_another_size_is_an_error_each_time(c: Communicator, most: int) -> Iterator[str]:
    if c.rank == 0:
        message = c.recv(torch.zeros(4), 1, 0)
        for _ in range(2):
            with pytest.raises(CollectiveMismatch):
                message.wait()
    elif c.rank == 1:
        c.send(torch.zeros(3), 0, 0)
    with contextlib.suppress(PhalanxError):  # a transport may break the group for it
        c.barrier()  # the receiver has read the message before its sender closes
    yield from ()


@check(ranks=2, breaks=True)
def messages_end_with_the_group(c: Communicator, most: int) -> Iterator[str]:
    message = c.recv(torch.zeros(1), (c.rank + 1) % c.size, 9)
    c.barrier()
    c.end_messages()
    with pytest.raises((ClosedError, PeerLost)) as first:  # lost, if its sender has closed the group before this rank
        message.test()
    with pytest.raises(first.type):
        message.wait()
    yield from ()


# -- errors --------------------------------------------------------------------------------------------


@check(ranks=2, breaks=True)
def calls_that_differ_are_an_error_on_every_rank(c: Communicator, most: int) -> Iterator[str]:
    """As in a gather, which returns on ranks that wait for nobody: they find out in the next call."""
    output = torch.zeros(2 * c.size) if c.rank == 0 else None
    with pytest.raises(CollectiveMismatch) as caught:
        c.gather_single(output, torch.ones(3 if c.rank == c.size - 1 else 2), 0)
        c.barrier()
    for text in ("gather(float32[2], dst=0)", "gather(float32[3], dst=0)"):
        if text not in str(caught.value):
            yield str(caught.value)
    with pytest.raises(CollectiveMismatch):
        c.all_reduce(torch.ones(1), SUM)


@check(ranks=2, breaks=True)
def a_rank_that_does_not_come_is_named(c: Communicator, most: int) -> Iterator[str]:
    c.barrier()
    missing = c.size - 1
    if c.rank == missing:
        with pytest.raises(PhalanxError):
            c.recv(torch.zeros(1), 0, 9).wait()  # until the others have given up
        return
    # Rank 0 gives up, and comes when the others are there, or else it would miss them too.
    timeout_s = 0.3 if c.size == 2 else 1.0
    if c.rank == 0:
        for other in range(1, missing):
            c.recv(torch.zeros(1), other, 8).wait()
        c.set_timeout(timedelta(seconds=timeout_s))
    else:
        c.send(torch.ones(1), 0, 8).wait()
    within = f"{timeout_s:g}" if c.rank == 0 else r"\d+"  # each rank says how long it would have waited itself
    said = rf"rank {missing} of the group .*did not come within {within} s"
    with pytest.raises(CollectiveTimeout, match=said) as caught:
        c.all_reduce(torch.ones(2), SUM)
    if caught.value.group_rank != missing or "all_reduce(float32[2], sum)" not in str(caught.value):
        yield f"{caught.value.group_rank}: {caught.value}"
