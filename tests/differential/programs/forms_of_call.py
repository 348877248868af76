"""Each collective as a blocking call, asynchronously in several ways, in a group of some ranks, with group ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.program import Raised, program, raised
from tests.support.ranks import Member

# How a collective is called: with the group (None: the world) and whether asynchronously; it returns torch's work,
# and the tensors that the call fills.
Call = Callable[[Any, bool], tuple[Any, Any]]


def mine(group: Any, count: int = 4) -> torch.Tensor:
    return torch.arange(float(count)) + 10 * dist.get_rank(group)


def blanks(group: Any, count: int = 4) -> list[torch.Tensor]:
    return [torch.zeros(count) for _ in range(dist.get_world_size(group))]


def parts(group: Any, count: int = 4) -> list[torch.Tensor]:
    return list(mine(group, count * dist.get_world_size(group)).chunk(dist.get_world_size(group)))


def all_reduce(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    tensor = mine(group)
    return dist.all_reduce(tensor, group=group, async_op=asynchronous), tensor


def all_reduce_max(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    tensor = mine(group)
    return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=asynchronous), tensor


def broadcast(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    tensor = mine(group)
    return dist.broadcast(tensor, group=group, group_src=0, async_op=asynchronous), tensor


def reduce(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    tensor = mine(group)
    work = dist.reduce(tensor, group=group, group_dst=0, async_op=asynchronous)
    return work, tensor if dist.get_rank(group) == 0 else None


def all_gather(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    outputs = blanks(group)
    return dist.all_gather(outputs, mine(group), group=group, async_op=asynchronous), outputs


def all_gather_into_tensor(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    output = torch.zeros(4 * dist.get_world_size(group))
    return dist.all_gather_into_tensor(output, mine(group), group=group, async_op=asynchronous), output


def gather(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    outputs = blanks(group) if dist.get_rank(group) == 0 else None
    return dist.gather(mine(group), outputs, group=group, group_dst=0, async_op=asynchronous), outputs


def scatter(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    output, inputs = torch.zeros(4), parts(group) if dist.get_rank(group) == 0 else None
    return dist.scatter(output, inputs, group=group, group_src=0, async_op=asynchronous), output


def reduce_scatter(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    output = torch.zeros(4)
    return dist.reduce_scatter(output, parts(group), group=group, async_op=asynchronous), output


def reduce_scatter_tensor(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    output = torch.zeros(4)
    whole = mine(group, 4 * dist.get_world_size(group))
    return dist.reduce_scatter_tensor(output, whole, group=group, async_op=asynchronous), output


def all_to_all(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    outputs = blanks(group)
    return dist.all_to_all(outputs, parts(group), group=group, async_op=asynchronous), outputs


def all_to_all_single(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    output = torch.zeros(4 * dist.get_world_size(group))
    whole = mine(group, 4 * dist.get_world_size(group))
    return dist.all_to_all_single(output, whole, group=group, async_op=asynchronous), output


def barrier(group: Any, asynchronous: bool) -> tuple[Any, Any]:
    return dist.barrier(group=group, async_op=asynchronous), None


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (
        all_reduce,
        all_reduce_max,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        barrier,
    )
}
# Gloo's reduce_scatter has no future, and is complete only once something waits for it.
SCATTERING = ("reduce_scatter", "reduce_scatter_tensor")
FUTURE_OF_A_REDUCE_SCATTER = dict.fromkeys(SCATTERING, "Futures of reduce_scatter")


@program(cases=CALLS)
def blocking(member: Member, call: Call) -> Any:
    work, filled = call(None, False)
    return work is None, filled


@program(cases=CALLS, differs=FUTURE_OF_A_REDUCE_SCATTER)
def waited_for(member: Member, call: Call) -> Any:
    work, filled = call(None, True)
    returned = work.wait()
    return returned, work.is_completed(), work.is_success(), filled


@program(cases=CALLS)
def waited_for_with_a_timeout(member: Member, call: Call) -> Any:
    work, filled = call(None, True)
    return work.wait(timedelta(seconds=50)), filled


@program(cases={name: call for name, call in CALLS.items() if name not in SCATTERING})
def polled(member: Member, call: Call) -> Any:
    work, filled = call(None, True)
    while not work.is_completed():
        pass
    work.wait()
    return filled


@program(cases=CALLS, differs=FUTURE_OF_A_REDUCE_SCATTER | {"all_gather_into_tensor": "Results of a work"})
def by_its_future(member: Member, call: Call) -> Any:
    work, filled = call(None, True)
    value = raised(lambda: work.get_future().wait())
    listed = value if isinstance(value, list) else [value]
    return [len(one) if isinstance(one, list) else one for one in listed] if filled is not None else None, filled


@program(cases=CALLS, differs=FUTURE_OF_A_REDUCE_SCATTER)
def with_a_callback(member: Member, call: Call) -> Any:
    seen: list[bool] = []
    work, filled = call(None, True)
    future = raised(work.get_future)
    if isinstance(future, Raised):
        work.wait()
        return future
    chained = future.then(lambda done: seen.append(done.done()) or "then")  # type: ignore[func-returns-value]
    future.add_done_callback(lambda done: seen.append(done.done()))
    return chained.wait(), seen[:1], filled


RESULTS = dict.fromkeys((*SCATTERING, "all_gather_into_tensor"), "Results of a work")


@program(cases=CALLS, differs=RESULTS)
def result_of_the_work(member: Member, call: Call) -> Any:
    work, filled = call(None, True)
    work.wait()
    result = raised(work.result)
    return result if filled is not None else None, filled


@program(cases=CALLS)
def in_a_group_of_some(member: Member, call: Call) -> Any:
    ranks = list(range(1, member.size)) if member.size > 2 else [1]
    group = dist.new_group(ranks)
    if member.rank not in ranks:
        return None
    _, blocking_result = call(group, False)
    work, filled = call(group, True)
    work.wait()
    return blocking_result, filled


@program(cases=CALLS)
def in_a_group_in_another_order(member: Member, call: Call) -> Any:
    group = dist.new_group(list(reversed(range(member.size))))
    _, filled = call(group, False)
    return dist.get_rank(group), filled


@program(cases=CALLS)
def outside_of_its_group(member: Member, call: Call) -> Any:
    group = dist.new_group([0])
    if member.rank == 0:
        return None
    return raised(lambda: call(group, False)[0])


@program(cases=CALLS)
def many_under_way(member: Member, call: Call) -> Any:
    under_way = [call(None, True) for _ in range(20)]
    for work, _ in reversed(under_way):
        work.wait()
    return [filled for _, filled in under_way]


@program(cases=CALLS)
def queued_before_a_blocking_call(member: Member, call: Call) -> Any:
    work, filled = call(None, True)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    work.wait()
    return filled, tensor


@program(cases=["src", "dst"])
def global_and_group_ranks_together(member: Member, keyword: str) -> Any:
    tensor = mine(None)
    if keyword == "src":
        return raised(lambda: dist.broadcast(tensor, src=0, group_src=0)), raised(lambda: dist.broadcast(tensor))
    return raised(lambda: dist.reduce(tensor, dst=0, group_dst=0)), raised(lambda: dist.reduce(tensor))


@program()
def works_and_futures_collected(member: Member) -> Any:
    tensors = [torch.full((3,), float(member.rank + i)) for i in range(5)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    collected = torch.futures.collect_all(futures).wait()
    return [future.value() for future in collected], tensors


@program()
def a_callback_starts_another(member: Member) -> Any:
    first, second = torch.ones(3), torch.full((3,), float(member.rank))
    works: list[Any] = []
    work = dist.all_reduce(first, async_op=True)
    future = work.get_future().then(lambda _: works.append(dist.all_reduce(second, async_op=True)))
    future.wait()
    works[0].wait()
    return first, second


@program()
def an_error_in_a_callback(member: Member) -> Any:
    def fail(_: Any) -> None:
        raise KeyError("on purpose")

    work = dist.all_reduce(torch.ones(2), async_op=True)
    return raised(lambda: work.get_future().then(fail).wait())


@program(short=2)
def hundreds_of_parameters(member: Member) -> Any:
    gradients = [torch.full((1 + i % 7,), float(member.rank + i)) for i in range(400)]
    for _ in range(3):
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()
        for gradient in gradients:
            gradient.div_(member.size)
    return gradients[::37]
