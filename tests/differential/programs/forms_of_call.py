"""Each collective as a blocking call, asynchronously in several ways, and in a group of some ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.calls import CALLS, Call
from tests.differential.program import Raised, program, raised, wait_for
from tests.support.ranks import Member

# Gloo's reduce_scatter has no future, and is complete only once something waits for it.
SCATTERING = ("reduce_scatter", "reduce_scatter_tensor")
FUTURES = dict.fromkeys(SCATTERING, "Futures of reduce_scatter")
RESULTS = dict.fromkeys((*SCATTERING, "all_gather_into_tensor"), "Results of a work")


def mine(group: Any = None) -> torch.Tensor:
    return torch.arange(4.0) + 10 * dist.get_rank(group)


def started(call: Call, group: Any = None) -> tuple[Any, Any]:
    return call(mine(group), group, True)


@program(cases=CALLS)
def blocking(member: Member, call: Call) -> Any:
    work, filled = call(mine())
    return work is None, filled


@program(cases=CALLS, differs=FUTURES)
def waited_for(member: Member, call: Call) -> Any:
    work, filled = started(call)
    returned = work.wait()
    return returned, work.is_completed(), work.is_success(), filled


@program(cases={name: call for name, call in CALLS.items() if name not in SCATTERING})
def polled(member: Member, call: Call) -> Any:
    work, filled = started(call)
    while not work.is_completed():
        pass
    return work.wait(timedelta(seconds=50)), filled


@program(cases=CALLS, differs=FUTURES | {"all_gather_into_tensor": "Results of a work"})
def by_its_future(member: Member, call: Call) -> Any:
    work, filled = started(call)
    value = raised(lambda: work.get_future().wait())
    listed = value if isinstance(value, list) else [value]
    return [len(one) if isinstance(one, list) else one for one in listed] if filled is not None else None, filled


@program(cases=CALLS, differs=FUTURES)
def with_a_callback(member: Member, call: Call) -> Any:
    seen: list[bool] = []
    work, filled = started(call)
    future = raised(work.get_future)
    if isinstance(future, Raised):
        work.wait()
        return future
    chained = future.then(lambda done: seen.append(done.done()) or "then")  # type: ignore[func-returns-value]
    future.add_done_callback(lambda done: seen.append(done.done()))
    return chained.wait(), seen[:1], filled


@program(cases=CALLS, differs=RESULTS)
def result_of_the_work(member: Member, call: Call) -> Any:
    work, filled = started(call)
    work.wait()
    result = raised(work.result)
    return result if filled is not None else None, filled


@program(cases=CALLS)
def in_a_group_of_some(member: Member, call: Call) -> Any:
    ranks = list(range(member.size - 1, 0, -1))
    group = dist.new_group(ranks)
    if member.rank not in ranks:
        return raised(lambda: call(mine(), group)[0])
    _, filled_before = call(mine(group), group)
    work, filled = started(call, group)
    work.wait()
    return dist.get_rank(group), filled_before, filled


@program(cases=CALLS)
def many_under_way(member: Member, call: Call) -> Any:
    under_way = [started(call) for _ in range(20)]
    summed = torch.ones(2)
    dist.all_reduce(summed)
    wait_for(*(work for work, _ in reversed(under_way)))
    return [filled for _, filled in under_way], summed


@program()
def global_and_group_ranks_together(member: Member) -> Any:
    calls = [
        lambda: dist.broadcast(mine(), src=0, group_src=0),
        lambda: dist.broadcast(mine()),
        lambda: dist.reduce(mine(), dst=0, group_dst=0),
        lambda: dist.reduce(mine()),
    ]
    return [raised(call) for call in calls]


@program()
def a_callback_starts_another(member: Member) -> Any:
    first, second = torch.ones(3), torch.full((3,), float(member.rank))
    works: list[Any] = []
    work = dist.all_reduce(first, async_op=True)
    work.get_future().then(lambda _: works.append(dist.all_reduce(second, async_op=True))).wait()
    wait_for(*works)
    return first, second


@program()
def an_error_in_a_callback(member: Member) -> Any:
    def fail(_: Any) -> None:
        raise KeyError("on purpose")

    work = dist.all_reduce(torch.ones(2), async_op=True)
    return raised(lambda: work.get_future().then(fail).wait())
