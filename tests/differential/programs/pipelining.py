"""Pipelines: torch's schedules over stages on the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tests.differential.program import program
from tests.support.ranks import Member

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MORE_STAGES = {
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
}
# The first rank has the first stage and the last one, its neighbour the two beside them.
FOLDED = {"zbv_zero_bubble": ScheduleZBVZeroBubble, "dual_pipe_v": ScheduleDualPipeV}


def stage(member: Member, index: int, count: int) -> PipelineStage:
    torch.manual_seed(index)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    return PipelineStage(layer, index, count, torch.device("cpu"))


def run(member: Member, schedule: Any, stages: list[PipelineStage]) -> Any:
    torch.manual_seed(99)
    x, target = torch.randn(4 * member.size, 8), torch.zeros(4 * member.size, 8)
    losses: list[torch.Tensor] = []
    last = any(one.is_last for one in stages)
    arguments = [x] if any(one.is_first for one in stages) else []
    output = schedule.step(*arguments, target=target, losses=losses) if last else schedule.step(*arguments)
    gradients = [parameter.grad for one in stages for parameter in one.submod.parameters()]
    return output, losses, gradients


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


@program(cases=ONE_STAGE, tolerance=1e-6)
def one_stage_a_rank(member: Member, schedule: Any) -> Any:
    mine = stage(member, member.rank, member.size)
    return run(member, schedule(mine, n_microbatches=member.size, loss_fn=loss), [mine])


@program(cases=MORE_STAGES, tolerance=1e-6)
def two_stages_a_rank(member: Member, schedule: Any) -> Any:
    stages = [stage(member, member.rank + turn * member.size, 2 * member.size) for turn in range(2)]
    return run(member, schedule(stages, n_microbatches=member.size, loss_fn=loss), stages)


@program(cases=FOLDED, tolerance=1e-6)
def two_folded_stages_a_rank(member: Member, schedule: Any) -> Any:
    count = 2 * member.size
    stages = [stage(member, index, count) for index in (member.rank, count - 1 - member.rank)]
    return run(member, schedule(stages, n_microbatches=count, loss_fn=loss), stages)
