"""Every collective with every operation and dtype, as most scripts call it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.differential.calls import CALLS, Call
from tests.differential.program import SERVED_HERE, program, raised, wait_for
from tests.support.ranks import Member

OPERATIONS = {
    name.lower(): getattr(dist.ReduceOp, name)
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
MORE_INTEGERS = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
DTYPES = {str(dtype)[6:]: dtype for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)}
REFUSED_DTYPES = {str(dtype)[6:]: dtype for dtype in MORE_INTEGERS}
SOME_DTYPES = ("float32", "bfloat16", "int64")


def numbers(member: Member, dtype: torch.dtype = torch.float32, count: int = 6) -> torch.Tensor:
    """Small whole numbers, so that every sum and product is exact in whatever order it is taken."""
    return ((torch.arange(count) + member.rank) % 3 + 1).to(dtype)


REDUCTIONS = {f"{op}-{dtype}": (OPERATIONS[op], DTYPES[dtype]) for op in OPERATIONS for dtype in DTYPES}


@program(cases=REDUCTIONS)
def all_reduce(member: Member, case: tuple[Any, torch.dtype]) -> Any:
    op, dtype = case
    tensor = numbers(member, dtype)
    return raised(lambda: dist.all_reduce(tensor, op=op), gives=tensor)


@program(cases={label: case for label, case in REDUCTIONS.items() if label.endswith(SOME_DTYPES)})
def reduce_scatter(member: Member, case: tuple[Any, torch.dtype]) -> Any:
    op, dtype = case
    output, single = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)
    whole = numbers(member, dtype, 2 * member.size)
    listed = raised(lambda: dist.reduce_scatter(output, list(whole.clone().chunk(member.size)), op=op), gives=output)
    return listed, raised(lambda: dist.reduce_scatter_tensor(single, whole, op=op), gives=single)


@program(cases=OPERATIONS)
def reduce_to_each_rank(member: Member, op: Any) -> Any:
    results = []
    for root in range(member.size):
        tensor = numbers(member)
        error = raised(lambda tensor=tensor, root=root: dist.reduce(tensor, root, op=op))
        results.append((error, tensor if root == member.rank and error is None else None))
    return results


# What moves elements and does not compute with them.
MOVING = {
    name: CALLS[name]
    for name in (
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "gather",
        "scatter",
        "all_to_all",
        "all_to_all_single",
    )
}
MOVED = {f"{call}-{dtype}": (MOVING[call], DTYPES[dtype]) for call in MOVING for dtype in DTYPES}
GATHERED_COMPLEX = {f"gather-{str(dtype)[6:]}": SERVED_HERE for dtype in COMPLEX}
SUMMED_OR_MOVED = ("all_reduce", "broadcast", "all_gather")
MORE = {f"{call}-{name}": (CALLS[call], dtype) for call in SUMMED_OR_MOVED for name, dtype in REFUSED_DTYPES.items()}


@program(cases=MOVED | MORE, differs=GATHERED_COMPLEX | dict.fromkeys(MORE, SERVED_HERE))
def of_every_dtype(member: Member, case: tuple[Call, torch.dtype]) -> Any:
    call, dtype = case
    tensor = numbers(member, dtype)
    return raised(lambda: call(tensor)[1])


@program(differs=SERVED_HERE)
def premultiplied_sum(member: Member) -> Any:
    tensor = numbers(member)
    return raised(lambda: dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(2.0)), gives=tensor)


@program()
def all_gather_of_unequal_sizes(member: Member) -> Any:
    outputs = [torch.zeros(rank + 1) for rank in range(member.size)]
    return raised(lambda: dist.all_gather(outputs, torch.full((member.rank + 1,), float(member.rank))))


@program(differs="Only the number of elements counts")
def all_gather_into_a_stack(member: Member) -> Any:
    stacked = torch.zeros(member.size, 6)
    return raised(lambda: dist.all_gather_into_tensor(stacked, numbers(member)), gives=stacked)


@program()
def all_to_all_single_with_splits(member: Member) -> Any:
    sent = [member.rank + other for other in range(member.size)]
    source = torch.arange(float(sum(sent))) + 100 * member.rank
    output, rows = torch.zeros(sum(sent)), torch.zeros(sum(sent), 3)
    dist.all_to_all_single(output, source, output_split_sizes=sent, input_split_sizes=sent)
    dist.all_to_all_single(rows, source.unsqueeze(1).expand(-1, 3).contiguous(), sent, sent)
    ones, longer = [1] * member.size, torch.ones(member.size + 1)
    return output, rows, raised(lambda: dist.all_to_all_single(torch.zeros(member.size + 1), longer, ones, ones))


@program(differs="monitored_barrier asks for the name gloo", equal_from="2.14")
def monitored_barrier(member: Member) -> Any:
    return raised(lambda: dist.monitored_barrier()), raised(lambda: dist.monitored_barrier(wait_all_ranks=True))


@program()
def coalesced(member: Member) -> Any:
    tensors = [numbers(member), numbers(member, count=4), torch.ones(2, 3)]
    dist.all_reduce_coalesced(tensors)
    wait_for(dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.MAX, async_op=True))
    outputs = [[torch.zeros(6), torch.zeros(2, 2)] for _ in range(member.size)]
    dist.all_gather_coalesced(outputs, [numbers(member), torch.full((2, 2), float(member.rank))])
    return tensors, outputs
