"""Collectives of tensors that are not plain: with gaps, shared memory, history, another layout, or a subclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.differential.calls import CALLS, blanks, send_and_receive
from tests.differential.program import program, raised
from tests.support.ranks import Member

Make = Callable[[torch.Tensor], torch.Tensor]


def with_gaps(values: torch.Tensor) -> torch.Tensor:
    wide = torch.full((2, 6), -1.0)
    wide[:, ::2] = values
    return wide[:, ::2]


def awaited(values: torch.Tensor) -> torch.Tensor:
    """What a functional collective returns before anything has waited for it."""
    return functional.all_reduce(values, "max", dist.group.WORLD)  # type: ignore[arg-type]


def with_gradient_of_its_own(values: torch.Tensor) -> torch.Tensor:
    parameter: Any = torch.nn.Parameter(values.clone())
    parameter.sum().backward()
    return parameter.grad


def distributed(values: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(values, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


KINDS: dict[str, Make] = {
    "contiguous": torch.clone,
    "with_gaps": with_gaps,
    "transposed": lambda values: values.t().contiguous().t(),
    "with_offset": lambda values: torch.cat([torch.full((5,), -1.0), values.flatten()])[5:].view(2, 3),
    "no_dimensions": lambda values: values.sum(),
    "empty": lambda values: values[:0],
    "one_element": lambda values: values[:1, :1].clone(),
    "leaf_with_gradient": lambda values: values.clone().requires_grad_(),
    "computed_with_gradient": lambda values: values.clone().requires_grad_() * 1,
    "parameter": lambda values: torch.nn.Parameter(values.clone()),
    "buffer": lambda values: torch.nn.Buffer(values.clone()),
    "awaited": awaited,
    "negated_number": lambda values: torch.complex(values, values).conj().imag[0, 0],
    "conjugated": lambda values: torch.complex(values, values).conj(),
    "imaginary_part": lambda values: torch.complex(values, values).conj().imag,
    "complex": lambda values: torch.complex(values, values),
    "bool": lambda values: values > 2,
    "channels_last": lambda values: values.expand(2, 2, 2, 3).clone().contiguous(memory_format=torch.channels_last),
    "with_gradient_of_its_own": with_gradient_of_its_own,
    "numpy_memory": lambda values: torch.from_numpy(values.numpy().copy()),
    "in_shared_memory": lambda values: values.clone().share_memory_(),
}
# What a backend may refuse, each rank alike.
UNUSUAL: dict[str, Make] = {
    "expanded": lambda values: values[:1].expand(2, 3),
    "sparse": lambda values: values.to_sparse(),
    "sparse_rows": lambda values: values.to_sparse(1),
    "compressed_rows": lambda values: values.to_sparse_csr(),
    "quantized": lambda values: torch.quantize_per_tensor(values, 1.0, 0, torch.quint8),
    "meta": lambda values: values.to("meta"),
    "fake": lambda values: FakeTensorMode().from_tensor(values),
    "two_tensor": lambda values: TwoTensor(values.clone(), values.clone()),
    "distributed": distributed,
    "nested": lambda values: torch.nested.nested_tensor([values[0, :2], values[1]], layout=torch.jagged),
}


def numbers(member: Member) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3) + member.rank


def later(name: str) -> Callable[[torch.Tensor], Any]:
    def call(tensor: torch.Tensor) -> Any:
        work, filled = CALLS[name](tensor, None, True)
        work.wait()
        return filled

    return call


def all_gather_to(tensor: torch.Tensor) -> Any:
    others = [torch.zeros_like(tensor) for _ in range(dist.get_world_size() - 1)]
    with torch.no_grad():
        dist.all_gather([tensor, *others], torch.ones(tensor.shape, dtype=tensor.dtype) * (dist.get_rank() > 0))
    return tensor


def reduce_scatter_tensor_to(tensor: torch.Tensor) -> Any:
    whole = torch.ones(dist.get_world_size() * tensor.numel(), dtype=tensor.dtype).view(-1, *tensor.shape[1:])
    dist.reduce_scatter_tensor(tensor, whole)
    return tensor


def scatter_to(tensor: torch.Tensor) -> Any:
    ones = [torch.ones(tensor.shape, dtype=tensor.dtype) for _ in range(dist.get_world_size())]
    dist.scatter(tensor, ones if dist.get_rank() == 0 else None, src=0)
    return tensor


def all_to_all_of(tensor: torch.Tensor) -> Any:
    outputs = blanks(tensor)
    dist.all_to_all(outputs, [tensor] * dist.get_world_size())
    return outputs


def receive_into(tensor: torch.Tensor) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    work: Any = dist.isend(torch.ones(tensor.shape, dtype=tensor.dtype), (rank + 1) % size)
    with torch.no_grad():
        dist.recv(tensor, (rank - 1) % size)
    work.wait()
    return tensor


SHARED = ("all_reduce", "broadcast", "reduce", "all_gather", "gather")
LATER = {f"{name}_async": later(name) for name in ("all_reduce", "broadcast")}
OWN = (all_gather_to, reduce_scatter_tensor_to, scatter_to, all_to_all_of, send_and_receive, receive_into)
COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: (lambda tensor, call=CALLS[name]: call(tensor)[1]) for name in SHARED},  # type: ignore[misc]
    **LATER,
    **{call.__name__: call for call in OWN},
}
SOME = ("all_reduce", "all_reduce_async", "broadcast", "all_gather", "reduce_scatter_tensor_to")

# Gloo itself ends with SIGSEGV for the first; a message that it refuses on one side would stay under way.
LEFT_OUT = {("reduce_scatter_tensor_to", kind) for kind in ("no_dimensions", "negated_number")}
LEFT_OUT |= {("receive_into", "conjugated"), ("receive_into", "complex")}
# Gloo gathers no complex numbers (collectives.py has a program for that).
LEFT_OUT |= {("gather", "complex"), ("gather", "conjugated")}
WITH_GAPS = ("with_gaps", "transposed", "imaginary_part", "channels_last")
LEFT_OUT |= {(call, kind) for call in ("send_and_receive", "receive_into") for kind in WITH_GAPS}
IN_PLACE = (*LATER, "all_reduce", "broadcast", "reduce", "scatter_to")


def differing() -> dict[str, str]:
    """Why some of the collectives of these kinds differ, by label."""
    why = {f"{call}-with_gaps": "Tensors with gaps" for call in IN_PLACE}
    for kind in ("negated_number", "imaginary_part"):
        calls = (*IN_PLACE, "reduce_scatter_tensor_to", "receive_into")
        why |= {f"{call}-{kind}": "Negated views" for call in calls if (call, kind) not in LEFT_OUT}
    why |= {f"{call}-conjugated": "Negated views" for call in ("reduce", "reduce_scatter_tensor_to")}
    for kind in ("leaf_with_gradient", "parameter"):
        why[f"reduce_scatter_tensor_to-{kind}"] = "Tensors that require a gradient"
    return why


@program(
    cases={
        f"{call}-{kind}": (COLLECTIVES[call], KINDS[kind])
        for kind in KINDS
        for call in COLLECTIVES
        if (call, kind) not in LEFT_OUT
    },
    differs=differing(),
)
def collective(member: Member, case: tuple[Callable[[torch.Tensor], Any], Make]) -> Any:
    call, make = case
    tensor = make(numbers(member))
    return raised(lambda: call(tensor))


WHY_UNUSUAL = dict.fromkeys((f"{call}-meta" for call in SOME), "Tensors without data")
WHY_UNUSUAL |= dict.fromkeys((f"{call}-expanded" for call in SOME[:3]), "Tensors with gaps")


@program(
    cases={
        f"{call}-{kind}": (COLLECTIVES[call], UNUSUAL[kind])
        for kind in UNUSUAL
        for call in SOME
        if not (kind == "distributed" and call.startswith("all_reduce"))  # Gloo sums the parts and then raises
    },
    differs=WHY_UNUSUAL,
)
def unusual(member: Member, case: tuple[Callable[[torch.Tensor], Any], Make]) -> Any:
    call, make = case
    tensor = make(numbers(member))
    return raised(lambda: _seen(call(tensor)))


# Over Gloo a message without data waits for the whole timeout.
MESSAGE_KINDS = {kind: make for kind, make in UNUSUAL.items() if kind not in ("meta", "fake")}


@program(
    cases={**MESSAGE_KINDS, "with_gaps": with_gaps, "transposed": KINDS["transposed"]},
    alone=True,
    differs=dict.fromkeys(("expanded", "with_gaps", "transposed"), "Tensors with gaps"),
    long=[*MESSAGE_KINDS, "transposed"],
)
def unusual_message(member: Member, make: Make) -> Any:
    tensor = make(numbers(member))
    return raised(lambda: _seen(send_and_receive(tensor)))


def _seen(value: Any) -> Any:
    """What of the value can be compared, where not the elements."""
    if isinstance(value, list):
        return [_seen(one) for one in value]
    if type(value) is TwoTensor:
        return value.a  # Gloo's handle is that of one of the two operations, and the other may be under way
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return value.int_repr()
    if isinstance(value, torch.Tensor) and (type(value).__name__ == "FakeTensor" or value.is_nested):
        return type(value).__name__, list(value.shape)[:1], value.dtype
    return value


SHAPES = {
    "scalar_and_one": ((), (1,)),
    "matrix_and_vector": ((2, 3), (6,)),
    "column_and_row": ((6, 1), (1, 6)),
    "with_ones": ((2, 1, 3), (2, 3)),
}


@program(cases=SHAPES)
def another_shape_of_as_many_elements(member: Member, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    shape = shapes[0] if member.rank == 0 else shapes[1]
    summed, sent = torch.ones(shape), torch.full(shape, float(member.rank))
    dist.all_reduce(summed)
    dist.broadcast(sent, 0)
    dist.reduce(summed, 0)
    received = torch.zeros(shapes[1])
    work: Any = dist.isend(torch.full(shapes[0], float(member.rank)), (member.rank + 1) % member.size)
    dist.recv(received, (member.rank - 1) % member.size)
    work.wait()
    return summed if member.rank == 0 else None, sent, received


@program(alone=True, differs="Matrices of different shapes")
def a_transposed_shape(member: Member) -> Any:
    tensor = torch.ones((2, 3) if member.rank == 0 else (3, 2))
    return raised(lambda: dist.all_reduce(tensor), gives=tensor)


@program()
def gradients_are_not_recorded(member: Member) -> Any:
    weight = torch.ones(3, requires_grad=True)
    product = weight * (member.rank + 1)
    dist.all_reduce(product)
    product.sum().backward()
    with torch.inference_mode():
        tensor = torch.ones(3) * member.rank
        dist.all_reduce(tensor)
        return product, weight.grad, tensor.clone()


@program()
def outputs_that_share_memory(member: Member) -> Any:
    twice = [torch.zeros(3)] * member.size
    dist.all_gather(twice, torch.ones(3))
    whole = torch.zeros(member.size, 4)
    dist.all_gather(list(whole.unbind(0)), torch.arange(4.0) + member.rank)
    columns = torch.zeros(4, member.size)
    dist.all_gather(list(columns.unbind(1)), torch.arange(4.0) + member.rank)
    return twice, whole, columns


@program()
def input_and_output_in_place(member: Member) -> Any:
    whole, mine = torch.zeros(member.size * 2), slice(2 * member.rank, 2 * member.rank + 2)
    whole[mine] = member.rank + 1
    dist.all_gather_into_tensor(whole, whole[mine])
    summed = whole.clone()
    dist.reduce_scatter_tensor(summed[mine], summed)
    return whole, summed[mine]


@program()
def asynchronous_sparse_sums(member: Member) -> Any:
    indices = torch.tensor([[member.rank, member.rank + 1]])
    awaited, blocking = (torch.sparse_coo_tensor(indices, torch.ones(2, 3), (member.size + 1, 3)) for _ in range(2))
    dist.all_reduce(awaited, async_op=True).wait()
    dist.all_reduce(blocking)
    return awaited, blocking
