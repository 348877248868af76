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
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import ClosedError, CollectiveMismatch, CollectiveTimeout, PhalanxError
from phalanx.transports.contract import Communicator
from tests.support.oracle import reduced

__all__ = ["CHECKS", "bits", "draw", "rank_order_sum", "run_check"]

Check = Callable[[Communicator, int], Iterator[str]]

SUM = dist.ReduceOp.SUM.value
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
# None, one, less than a cache line, about one and many chunks, and a last chunk with a single element.
COUNTS = (0, 1, 3, 15, 64, 1023, 1024, 1025, 5000, 70001)

CHECKS: dict[str, Check] = {}
_TRAITS: dict[str, tuple[str, ...]] = {}
_LEAST: dict[str, int] = {}


def check(*traits: str, ranks: int = 1) -> Callable[[Check], Check]:
    """Add a check for transports that promise these traits, and groups of so many ranks or more."""

    def add(function: Check) -> Check:
        CHECKS[function.__name__] = function
        _TRAITS[function.__name__], _LEAST[function.__name__] = traits, ranks
        return function

    return add


def run_check(name: str, communicator: Communicator, most_bytes: int) -> tuple[str, list[str]]:
    """Run a check: the reason why it does not apply to this group (empty if it does), and what is wrong.

    Args:
        name: one of ``CHECKS``.
        communicator: of a group whose ranks all call this; closed afterwards.
        most_bytes: the size of the largest tensor to use; larger ones take long if chunks are small.
    """
    try:
        missing = [trait for trait in _TRAITS[name] if not getattr(communicator, trait)]
        if missing:
            return f"{type(communicator).__name__} does not promise {' and '.join(missing)}", []
        if communicator.size < _LEAST[name]:
            return f"it takes {_LEAST[name]} ranks", []
        return "", list(CHECKS[name](communicator, most_bytes))
    finally:
        communicator.close()


def draw(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The contribution of rank ``rank``: values whose sums need rounding, so that their order shows."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * 10.0 ** (rank % 3)).to(dtype)
    return torch.randint(-(2**30), 2**30, (count,), generator=generator).to(dtype)


def whole_numbers(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Like :func:`draw`, with ones and twos: every dtype holds their sums and products over a few ranks exactly."""
    return torch.randint(1, 3, (count,), generator=torch.Generator().manual_seed(1000 * rank + salt)).to(dtype)


def rank_order_sum(size: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The sum in rank order, 16-bit floats in 32 bits and rounded once."""
    return reduced([draw(rank, count, dtype, salt) for rank in range(size)], "SUM")


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist() if tensor.numel() else []


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8)) if other.numel() else not one.numel()


def counts(most_bytes: int, itemsize: int = 8) -> list[int]:
    return [count for count in COUNTS if count * itemsize <= most_bytes]


def op_number(name: str) -> int:
    number: int = getattr(dist.ReduceOp, name).value
    return number


def parts(c: Communicator, count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Every rank's contribution."""
    return [draw(rank, count, dtype) for rank in range(c.size)]


# -- reductions ----------------------------------------------------------------------------------------


@check("rank_order_sums")
def all_reduce_is_the_rank_order_sum_bit_for_bit(c: Communicator, most: int) -> Iterator[str]:
    for dtype in (*FLOATS, torch.int32, torch.int64):
        for count in counts(most):
            tensor = draw(c.rank, count, dtype, count)
            c.all_reduce(tensor, SUM)
            if not same(tensor, rank_order_sum(c.size, count, dtype, count)):
                yield f"{dtype} x {count}"


@check("rank_order_sums")
def half_precision_sums_round_like_torch_at_the_edges(c: Communicator, most: int) -> Iterator[str]:
    """Subnormals, ties, overflow to infinity, infinities and NaN."""
    edges = [0.0, -0.0, 6e-8, 5.96e-8, 6.1e-5, 1.0, 1.0009765625, 2048.0, 65504.0, 3.0e38, float("inf"), float("nan")]
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [torch.tensor([e * (1 + r) for e in edges] * 3).to(dtype) for r in range(c.size)]
        tensor = inputs[c.rank].clone()
        c.all_reduce(tensor, SUM)
        if not torch.allclose(tensor, reduced(inputs, "SUM"), rtol=0, atol=0, equal_nan=True):
            yield str(dtype)


@check()
def every_reduction_that_can_be_gives_the_result(c: Communicator, most: int) -> Iterator[str]:
    """all_reduce, reduce to each rank in turn, and reduce_scatter, also into this rank's own block."""
    ranks = range(c.size)
    for dtype in (*FLOATS, *INTEGERS):
        for name in OPS:
            op = op_number(name)
            if not c.can_reduce(dtype, op):
                continue
            for count in (0, 5, 300):
                wholes = [whole_numbers(rank, count * c.size, dtype, count) for rank in ranks]
                totals = reduced(wholes, name)
                own = slice(c.rank * count, (c.rank + 1) * count)
                what = f"{name} {dtype} x {count}"
                tensor = wholes[c.rank].clone()
                c.all_reduce(tensor, op)
                if not same(tensor, totals):
                    yield f"all_reduce {what}"
                root, tensor = (count + op) % c.size, wholes[c.rank].clone()
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
    ranks = range(c.size)
    for scale in (0, 1, 40, 3000):
        # Some pairs exchange nothing, one exchanges much more than the others.
        def count(source: int, to: int, scale: int = scale) -> int:
            large = 10000 if scale and (source, to) == (0, 1) and most > 100_000 else 0
            return min(scale, most // 64) * ((3 * source + 5 * to) % 4) + large

        inputs = [draw(100 * c.rank + to, count(c.rank, to), torch.int64) for to in ranks]
        expected = [draw(100 * source + c.rank, count(source, c.rank), torch.int64) for source in ranks]
        outputs = [torch.zeros_like(e) for e in expected]
        c.all_to_all(outputs, inputs)
        single = torch.zeros(sum(map(len, expected)), dtype=torch.int64)
        c.all_to_all_single(single, torch.cat(inputs), [len(e) for e in expected], [len(i) for i in inputs])
        for what, found in (("lists", torch.cat(outputs)), ("single tensors", single)):
            if not same(found, torch.cat(expected)):
                yield f"{what}, scale {scale}"


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
    """Hundreds of operations of several kinds and many sizes, so that memory is used again by different kinds."""
    plan, delays = random.Random(7), random.Random(c.rank)  # the plan is the same on every rank
    for turn in range(400):
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


@check(ranks=2)
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
def a_rank_may_send_to_itself(c: Communicator, most: int) -> Iterator[str]:
    box = torch.zeros(3)
    received = c.recv(box, c.rank, 1)
    c.send(torch.arange(3.0), c.rank, 1).wait()
    received.wait()
    if box.tolist() != [0, 1, 2]:
        yield str(box)


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


@check(ranks=2)
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


@check(ranks=2)
def messages_end_with_the_group(c: Communicator, most: int) -> Iterator[str]:
    message = c.recv(torch.zeros(1), (c.rank + 1) % c.size, 9)
    c.barrier()
    c.end_messages()
    with pytest.raises(ClosedError):
        message.test()
    with pytest.raises(ClosedError):
        message.wait()
    yield from ()


# -- errors --------------------------------------------------------------------------------------------


@check("compares_calls", ranks=2)
def calls_that_differ_are_an_error_on_every_rank(c: Communicator, most: int) -> Iterator[str]:
    odd = c.size - 1
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "gather_single": (
            lambda: c.gather_single(torch.zeros(2 * c.size) if c.rank == 0 else None, torch.ones(2), 0),
            lambda: c.gather_single(None, torch.ones(3), 0),
        ),
    }
    for name, (usual, other) in pairs.items():
        with pytest.raises(CollectiveMismatch) as caught:
            (other if c.rank == odd else usual)()
            c.barrier()  # a gather returns on ranks that wait for nobody; they find out in the next call
        for text in ("gather(float32[2], dst=0)", "gather(float32[3], dst=0)"):
            if text not in str(caught.value):
                yield f"{name}: {caught.value}"
        with pytest.raises(CollectiveMismatch):
            c.all_reduce(torch.ones(1), SUM)


@check(ranks=2)
def a_rank_that_does_not_come_is_named(c: Communicator, most: int) -> Iterator[str]:
    c.barrier()
    missing = c.size - 1
    if c.rank == missing:
        with pytest.raises(PhalanxError):
            c.recv(torch.zeros(1), 0, 9).wait()  # until the others have given up
        return
    # Rank 0 gives up, and comes when the others are there, or else it would miss them too.
    timeout_s = 0.3 if c.size == 2 else 2.0
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


@check()
def closing_twice_does_no_harm(c: Communicator, most: int) -> Iterator[str]:
    c.barrier()
    c.close()
    c.close()
    yield from ()
