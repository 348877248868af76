"""What shows of the collectives in profilers, dispatch modes and traces: how many, and under which names."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.differential.program import program
from tests.differential.programs.data_parallel import batch, model
from tests.differential.programs.forms_of_call import CALLS, Call
from tests.support.ranks import Member


def counted(names: Any) -> dict[str, int]:
    """How often each name of a collective occurs, whatever the backend that it begins with."""
    plain = [name.replace("phalanx:", "gloo:") for name in names]
    return dict(sorted(Counter(name for name in plain if name.startswith(("gloo:", "c10d::"))).items()))


NAMES = dict.fromkeys(
    ("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single"), "Names in a profile"
)


@program(cases=CALLS, differs=NAMES)
def profiled(member: Member, call: Call) -> Any:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call(None, False)
        work, _ = call(None, True)
        work.wait()
    return counted(event.name for event in profiler.events() or [])


@program()
def profiled_messages(member: Member) -> Any:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        received = torch.zeros(2)
        work = dist.isend(torch.ones(2), (member.rank + 1) % member.size)
        dist.recv(received, (member.rank - 1) % member.size)
        assert work is not None
        work.wait()
    return counted(event.name for event in profiler.events() or [])


@program()
def profiled_data_parallel(member: Member) -> Any:
    net = DistributedDataParallel(model())
    net(batch(member, 0)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        net(batch(member, 0)).sum().backward()
    return counted(event.name for event in profiler.events() or [])


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@program(cases=CALLS)
def under_a_dispatch_mode(member: Member, call: Call) -> Any:
    with Seen() as seen:
        _, filled = call(None, False)
    return [name for name in seen.names if name.startswith("c10d")], filled


@program(cases=CALLS)
def counted_by_comm_debug_mode(member: Member, call: Call) -> Any:
    with CommDebugMode() as mode:
        call(None, False)
    return mode.get_total_counts(), {str(name): count for name, count in mode.get_comm_counts().items()}


@program()
def execution_trace(member: Member) -> Any:
    path = member.folder / f"trace-{dist.get_backend()}-{member.rank}.json"
    observer = ExecutionTraceObserver()
    observer.register_callback(str(path))
    with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer):
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0)
    observer.unregister_callback()
    return counted(node["name"] for node in json.loads(path.read_text())["nodes"])


@program()
def shapes_in_the_profile(member: Member) -> Any:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(3, 5))
    names = ("gloo:all_reduce", "phalanx:all_reduce")
    return [event.input_shapes for event in profiler.events() or [] if event.name in names]
