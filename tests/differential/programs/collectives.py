"""Every collective with every operation and dtype, as most scripts call it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.differential.program import SERVED_HERE, program, raised
from tests.support.ranks import Member

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
    "avg": dist.ReduceOp.AVG,
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
MORE_INTEGERS = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
DTYPES = {str(dtype)[6:]: dtype for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)}
REFUSED_DTYPES = {str(dtype)[6:]: dtype for dtype in MORE_INTEGERS}

NUMBER_OF_ELEMENTS = "Only the number of elements counts"


def numbers(member: Member, dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """Small whole numbers, so that every sum and product is exact in whatever order it is taken."""
    return ((torch.arange(count) + member.rank) % 3 + 1).to(dtype)


REDUCTIONS = {f"{op}-{dtype}": (OPERATIONS[op], DTYPES[dtype]) for op in OPERATIONS for dtype in DTYPES}


@program(cases=REDUCTIONS)
def all_reduce(member: Member, case: tuple[Any, torch.dtype]) -> Any:
    op, dtype = case
    tensor = numbers(member, dtype)
    return raised(lambda: dist.all_reduce(tensor, op=op), gives=tensor)


@program(cases=REFUSED_DTYPES, differs=SERVED_HERE)
def all_reduce_of_more_integers(member: Member, dtype: torch.dtype) -> Any:
    tensor = numbers(member, dtype)
    return raised(lambda: dist.all_reduce(tensor), gives=tensor)


@program(cases=REFUSED_DTYPES, differs=SERVED_HERE)
def broadcast_of_more_integers(member: Member, dtype: torch.dtype) -> Any:
    tensor = numbers(member, dtype)
    return raised(lambda: dist.broadcast(tensor, 0), gives=tensor)


@program(cases=REFUSED_DTYPES, differs=SERVED_HERE)
def all_to_all_of_more_integers(member: Member, dtype: torch.dtype) -> Any:
    output = torch.zeros(2 * member.size, dtype=dtype)
    return raised(lambda: dist.all_to_all_single(output, numbers(member, dtype, 2 * member.size)), gives=output)


@program(cases=REFUSED_DTYPES, differs=SERVED_HERE)
def all_gather_of_more_integers(member: Member, dtype: torch.dtype) -> Any:
    outputs = [torch.zeros(6, dtype=dtype) for _ in range(member.size)]
    return raised(lambda: dist.all_gather(outputs, numbers(member, dtype)), gives=outputs)


@program(cases=[str(dtype)[6:] for dtype in COMPLEX], differs=SERVED_HERE)
def gather_of_complex_numbers(member: Member, name: str) -> Any:
    dtype = DTYPES[name]
    outputs = [torch.zeros(6, dtype=dtype) for _ in range(member.size)] if member.rank == 0 else None
    return raised(lambda: dist.gather(numbers(member, dtype), outputs, dst=0), gives=outputs)


@program(cases=OPERATIONS)
def reduce_to_each_rank(member: Member, op: Any) -> Any:
    results = []
    for root in range(member.size):
        tensor = numbers(member, torch.float32)
        error = raised(lambda tensor=tensor, root=root: dist.reduce(tensor, root, op=op))  # type: ignore[misc]
        results.append((error, tensor if root == member.rank and error is None else None))
    return results


@program(
    cases={
        f"{op}-{dtype}": (OPERATIONS[op], DTYPES[dtype])
        for op in OPERATIONS
        for dtype in ("float32", "bfloat16", "int64")
    }
)
def reduce_scatter(member: Member, case: tuple[Any, torch.dtype]) -> Any:
    op, dtype = case
    output, single = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)
    whole = numbers(member, dtype, 2 * member.size)
    listed = raised(lambda: dist.reduce_scatter(output, list(whole.clone().chunk(member.size)), op=op), gives=output)
    return listed, raised(lambda: dist.reduce_scatter_tensor(single, whole, op=op), gives=single)


@program(differs=SERVED_HERE)
def premultiplied_sum(member: Member) -> Any:
    tensor = numbers(member, torch.float32)
    return raised(lambda: dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(2.0)), gives=tensor)


@program(cases=DTYPES)
def broadcast_from_each_rank(member: Member, dtype: torch.dtype) -> Any:
    results = []
    for root in range(member.size):
        tensor = numbers(member, dtype)
        dist.broadcast(tensor, src=root)
        results.append(tensor)
    return results


@program(cases=DTYPES)
def all_gather(member: Member, dtype: torch.dtype) -> Any:
    outputs = [torch.zeros(6, dtype=dtype) for _ in range(member.size)]
    dist.all_gather(outputs, numbers(member, dtype))
    return outputs


@program()
def all_gather_of_unequal_sizes(member: Member) -> Any:
    outputs = [torch.zeros(rank + 1) for rank in range(member.size)]
    return raised(lambda: dist.all_gather(outputs, torch.full((member.rank + 1,), float(member.rank))))


@program(cases=DTYPES)
def all_gather_into_tensor(member: Member, dtype: torch.dtype) -> Any:
    concatenated = torch.zeros(6 * member.size, dtype=dtype)
    dist.all_gather_into_tensor(concatenated, numbers(member, dtype))
    return concatenated


@program(differs=NUMBER_OF_ELEMENTS)
def all_gather_into_a_stack(member: Member) -> Any:
    stacked = torch.zeros(member.size, 6)
    return raised(lambda: dist.all_gather_into_tensor(stacked, numbers(member, torch.float32)), gives=stacked)


@program(cases={label: dtype for label, dtype in DTYPES.items() if not dtype.is_complex})
def gather_to_each_rank(member: Member, dtype: torch.dtype) -> Any:
    results = []
    for root in range(member.size):
        outputs = [torch.zeros(6, dtype=dtype) for _ in range(member.size)] if root == member.rank else None
        dist.gather(numbers(member, dtype), outputs, dst=root)
        results.append(outputs)
    return results


@program(cases=DTYPES)
def scatter_from_each_rank(member: Member, dtype: torch.dtype) -> Any:
    results = []
    for root in range(member.size):
        inputs = [(numbers(member, dtype) + i).to(dtype) for i in range(member.size)] if root == member.rank else None
        output = torch.zeros(6, dtype=dtype)
        dist.scatter(output, inputs, src=root)
        results.append(output)
    return results


@program(cases=DTYPES)
def all_to_all(member: Member, dtype: torch.dtype) -> Any:
    inputs = [numbers(member, dtype, 3) for _ in range(member.size)]
    outputs = [torch.zeros(3, dtype=dtype) for _ in range(member.size)]
    dist.all_to_all(outputs, inputs)
    return outputs


@program(cases=DTYPES)
def all_to_all_single(member: Member, dtype: torch.dtype) -> Any:
    output = torch.zeros(2 * member.size, dtype=dtype)
    dist.all_to_all_single(output, numbers(member, dtype, 2 * member.size))
    return output


@program()
def all_to_all_single_with_splits(member: Member) -> Any:
    sent = [member.rank + other for other in range(member.size)]
    source = torch.arange(float(sum(sent))) + 100 * member.rank
    output = torch.zeros(sum(sent))
    dist.all_to_all_single(output, source, output_split_sizes=sent, input_split_sizes=sent)
    rows = torch.zeros(sum(sent), 3)
    dist.all_to_all_single(rows, source.unsqueeze(1).expand(-1, 3).contiguous(), sent, sent)
    return output, rows


@program()
def all_to_all_single_with_splits_that_do_not_fit(member: Member) -> Any:
    splits = [1] * member.size
    output, source = torch.zeros(member.size + 1), torch.ones(member.size + 1)
    return raised(lambda: dist.all_to_all_single(output, source, splits, splits))


@program()
def barriers(member: Member) -> Any:
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
    return work.is_completed()


@program(differs="monitored_barrier asks for the name gloo", equal_from="2.15")
def monitored_barrier(member: Member) -> Any:
    return raised(lambda: dist.monitored_barrier()), raised(lambda: dist.monitored_barrier(wait_all_ranks=True))


@program()
def all_reduce_coalesced(member: Member) -> Any:
    tensors = [numbers(member, torch.float32), numbers(member, torch.float32, 4), torch.ones(2, 3)]
    dist.all_reduce_coalesced(tensors)
    work = dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    return tensors


@program()
def all_gather_coalesced(member: Member) -> Any:
    inputs = [numbers(member, torch.float32), torch.full((2, 2), float(member.rank))]
    outputs = [[torch.zeros(6), torch.zeros(2, 2)] for _ in range(member.size)]
    dist.all_gather_coalesced(outputs, inputs)
    return outputs


@program(differs=SERVED_HERE, alone=True)
def coalescing_manager(member: Member) -> Any:
    tensors = [numbers(member, torch.float32, count) for count in (1, 4, 9)]

    def reduce_all() -> None:
        with _coalescing_manager(device=torch.device("cpu")):
            for tensor in tensors:
                dist.all_reduce(tensor)

    return raised(reduce_all, gives=tensors)


@program()
def large_tensors(member: Member) -> Any:
    tensor = numbers(member, torch.float32, 300_001)
    dist.all_reduce(tensor)
    outputs = [torch.zeros(100_003) for _ in range(member.size)]
    dist.all_gather(outputs, numbers(member, torch.float32, 100_003))
    dist.broadcast(outputs[0], src=member.size - 1)
    return tensor.sum().item(), tensor[::1000], [output[::1000] for output in outputs]
