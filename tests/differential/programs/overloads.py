"""ProcessGroup's own methods, in each of the forms that torch's binding offers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.program import program, wait_for
from tests.support.ranks import Member

# A form of call is a text: ``x`` is this rank's tensor, ``out`` as many zeros, ``inputs`` and ``outputs`` such lists.
NAMES = {
    "torch": torch,
    "dist": dist,
    "MAX": dist.ReduceOp.MAX,
    "SUM": dist.ReduceOp.SUM,
    "TIME": timedelta(seconds=50),
}
IN_PLACE = [
    "pg.allreduce([x])",
    "pg.allreduce(x)",
    "pg.allreduce([x], MAX)",
    "pg.allreduce(x, MAX)",
    "pg.allreduce(x, op=MAX)",
    "pg.allreduce(tensors=[x], op=MAX, timeout=TIME)",
    "pg.allreduce(x, SUM, TIME)",
    "pg.allreduce([x], options(dist.AllreduceOptions, reduceOp=MAX))",
    "pg.allreduce([x], opts=options(dist.AllreduceOptions, reduceOp=MAX))",
    "pg.allreduce_coalesced([x])",
    "pg.broadcast([x], options(dist.BroadcastOptions, rootRank=1))",
    "pg.broadcast(x, 1)",
    "pg.broadcast(x, root=1)",
    "pg.broadcast(x, 1, TIME)",
    "pg.broadcast(tensors=[x], opts=options(dist.BroadcastOptions, rootRank=1))",
]
REDUCES = [
    "pg.reduce(x, 0)",
    "pg.reduce(x, 0, MAX)",
    "pg.reduce(x, root=0, op=MAX)",
    "pg.reduce([x], options(dist.ReduceOptions, rootRank=0))",
]
FILLING = [
    "pg.allgather([outputs], [x])",
    "pg.allgather(outputs, x)",
    "pg.allgather(outputs, x, TIME)",
    "pg.allgather(output_tensors=[outputs], input_tensors=[x])",
    "pg._allgather_base(whole, x)",
    "pg.reduce_scatter([out], [inputs])",
    "pg.reduce_scatter(out, inputs)",
    "pg.reduce_scatter(out, inputs, MAX)",
    "pg.reduce_scatter(out, inputs, op=MAX)",
    "pg._reduce_scatter_base(out, torch.cat(inputs))",
    "pg.alltoall(outputs, inputs)",
    "pg.alltoall_base(whole, torch.cat(inputs), [], [])",
    "pg.barrier()",
    "pg.barrier(dist.BarrierOptions())",
    "pg.barrier(timeout=TIME)",
]
# The lists are empty on all ranks but the root.
AT_ROOT = [
    "pg.gather([outputs] if outputs else [], [x], options(dist.GatherOptions, rootRank=0))",
    "pg.gather(outputs, x, 0)",
    "pg.gather(outputs, x, root=0)",
    "pg.scatter([out], [inputs] if inputs else [], options(dist.ScatterOptions, rootRank=0))",
    "pg.scatter(out, inputs, 0)",
    "pg.scatter(out, inputs, root=0)",
]


def options(kind: type, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def called(member: Member, form: str, *, lists: bool = True) -> dict[str, Any]:
    count = member.size if lists else 0
    given = {
        "x": torch.arange(3.0) + member.rank,
        "out": torch.zeros(3),
        "whole": torch.zeros(3 * member.size),
        "inputs": [torch.arange(3.0) + member.rank + other for other in range(count)],
        "outputs": [torch.zeros(3) for _ in range(count)],
    }
    eval(form, {**NAMES, "options": options, "pg": dist.group.WORLD, **given}).wait()
    return given


@program(cases=[*IN_PLACE, *FILLING])
def method(member: Member, form: str) -> Any:
    return called(member, form)


@program(cases=REDUCES)
def method_with_a_result_at_the_root(member: Member, form: str) -> Any:
    given = called(member, form)
    return given["x"] if member.rank == 0 else None


@program(cases=AT_ROOT)
def method_with_lists_at_the_root(member: Member, form: str) -> Any:
    return called(member, form, lists=member.rank == 0)


@program(cases=["pg.recv([received], before, 0)", "pg.recv_anysource([received], 0)"])
def message(member: Member, form: str) -> Any:
    pg: Any = dist.group.WORLD
    received = torch.zeros(3)
    work = pg.send([torch.arange(3.0) + member.rank], (member.rank + 1) % member.size, 0)
    before = (member.rank - 1) % member.size
    wait_for(eval(form, {"pg": pg, "received": received, "before": before}), work)
    return received


@program(cases=["rank", "size", "get_group_store", "group_name", "bound_device_id", "name", "_get_backend_name"])
def about_the_group(member: Member, name: str) -> Any:
    value = getattr(dist.group.WORLD, name)
    value = value() if callable(value) else value
    text = str(value) if isinstance(value, (str, int)) or value is None else type(value).__name__
    return text.replace("phalanx", "gloo")
