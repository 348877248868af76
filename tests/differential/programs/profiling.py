"""What shows of the collectives in profilers, dispatch modes and traces: how many, and under which names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.differential.calls import CALLS, Call, send_and_receive
from tests.differential.program import program
from tests.differential.programs.data_parallel import batch, model
from tests.support.ranks import Member

CPU = [ProfilerActivity.CPU]
NAMES = ("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single")


def counted(names: Any) -> dict[str, int]:
    """How often each name of a collective occurs, whatever the backend that it begins with."""
    plain = [name.replace("phalanx:", "gloo:") for name in names]
    return dict(sorted(Counter(name for name in plain if name.startswith(("gloo:", "c10d::"))).items()))


def events_of(profiler: Any) -> dict[str, int]:
    return counted(event.name for event in profiler.events() or [])


@program(cases=CALLS, differs=dict.fromkeys(NAMES, "Names in a profile"))
def profiled(member: Member, call: Call) -> Any:
    with profile(activities=CPU) as profiler:
        call(torch.ones(4))
        call(torch.ones(4), None, True)[0].wait()
    return events_of(profiler)


@program()
def profiled_messages_and_data_parallel(member: Member) -> Any:
    net = DistributedDataParallel(model())
    net(batch(member, 0)).sum().backward()
    with profile(activities=CPU) as messages:
        send_and_receive(torch.ones(2))
    with profile(activities=CPU) as training:
        net(batch(member, 0)).sum().backward()
    return events_of(messages), events_of(training)


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
        _, filled = call(torch.ones(4))
    with CommDebugMode() as mode:
        call(torch.ones(4))
    counts = {str(name): count for name, count in mode.get_comm_counts().items()}
    return [name for name in seen.names if name.startswith("c10d")], filled, mode.get_total_counts(), counts
