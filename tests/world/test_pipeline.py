"""Pipelines: every schedule of torch.distributed.pipelining computes what one process computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.support.pool import Pool
from tests.support.ranks import Member
from torch import nn
from torch.distributed import pipelining

ROWS = 3  # in a micro-batch
LARGE_ROWS = 10_000  # then the micro-batches do not fit into the memory between two ranks, and a sender has to wait
ONE_STAGE = ("GPipe", "1F1B")
FOLDED = ("ZBVZeroBubble", "DualPipeV")  # of 3 ranks, rank 0 has the stages 0 and 5, in the other schedules 0 and 3
SCHEDULES = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *FOLDED)
MICRO_BATCHES, WIDTH = 8, 16
STEPS = 3  # in the first one, a schedule also finds out the shapes of what the stages send
LR = 0.5

# The gradients by stage and step, in the order of the stage's parameters, and the losses of each step's micro-batches.
Answer = tuple[dict[int, list[list[torch.Tensor]]], list[list[torch.Tensor]]]


class Stage(nn.Module):
    """A stage that passes on two tensors. The last one returns the second only."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.last = stage == stages - 1
        self.layer, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, known: torch.Tensor, scores: torch.Tensor | None = None) -> Any:
        """What it knows, and the scores."""
        known = known + self.layer(known).tanh()
        # Not of `known` itself: schedules with a separate pass for the weights detach what a stage sends, in place.
        own = self.score(known.relu())
        scores = own if scores is None else scores + own
        return scores if self.last else (known, scores)


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and labels of a step, with so many rows in each micro-batch."""
    generator = torch.Generator().manual_seed(step)
    rows *= MICRO_BATCHES
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(4, (rows,), generator=generator)


def update(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Take a step; the gradients."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.data -= LR * parameter.grad
        parameter.grad = None
    return gradients


def in_one_process(stages: int, rows: int, *, backwards: bool) -> Answer:
    """What must come out, if the gradients of the micro-batches are added up in their order, or backwards."""
    model = [Stage(stage, stages) for stage in range(stages)]
    gradients: dict[int, list[list[torch.Tensor]]] = {stage: [] for stage in range(stages)}
    losses = []
    for step in range(STEPS):
        parts = list(zip(*(part.chunk(MICRO_BATCHES) for part in batch(step, rows)), strict=True))
        now = []
        for inputs, labels in reversed(parts) if backwards else parts:
            values: Any = (inputs,)
            for stage in model:
                values = stage(*values)
            now.append(nn.functional.cross_entropy(values, labels))
            now[-1].backward()
        losses.append([loss.detach() for loss in (reversed(now) if backwards else now)])
        for at, stage in enumerate(model):
            for parameter in stage.parameters():
                assert parameter.grad is not None
                parameter.grad /= MICRO_BATCHES
            gradients[at].append(update(list(stage.parameters())))
    return gradients, losses


def run(rank: int, ranks: int, name: str, rows: int) -> Answer:
    """On each rank: the gradients of its stages, and the losses where the last stage is."""
    stages = ranks * (1 if name in ONE_STAGE else 2)
    mine = [rank] if name in ONE_STAGE else [rank, stages - 1 - rank if name in FOLDED else rank + ranks]
    parts = {at: pipelining.PipelineStage(Stage(at, stages), at, stages, torch.device("cpu")) for at in mine}
    kind: Any = pipelining.schedules.get_schedule_class(name)
    schedule = kind(
        parts[rank] if name in ONE_STAGE else list(parts.values()),
        n_microbatches=MICRO_BATCHES,
        loss_fn=nn.functional.cross_entropy,
    )
    gradients: dict[int, list[list[torch.Tensor]]] = {at: [] for at in mine}
    losses: list[list[torch.Tensor]] = []
    for step in range(STEPS):
        inputs, labels = batch(step, rows)
        now: list[torch.Tensor] = []
        schedule.step(*((inputs,) if 0 in mine else ()), target=labels, losses=now)
        losses.append([loss.detach() for loss in now])
        for at in mine:
            gradients[at].append(update(list(parts[at].submod.parameters())))
    return gradients, losses


def check(ranks: int, name: str, rows: int, answers: Sequence[Answer]) -> None:
    """Whether the ranks have computed what one process does, to the bit."""
    stages = ranks * (1 if name in ONE_STAGE else 2)
    expected, expected_losses = in_one_process(stages, rows, backwards=name == "LoopedBFS")
    found = {at: steps for gradients, _ in answers for at, steps in gradients.items()}
    assert sorted(found) == list(range(stages))
    (losses,) = [losses for gradients, losses in answers if stages - 1 in gradients]
    torch.testing.assert_close(losses, expected_losses, rtol=0.0, atol=0.0)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def joining(hosts: int) -> Callable[[Member], Member]:
    """What makes a process a rank on one of the hosts. Ranks of two hosts do not share memory."""

    def join(member: Member) -> Member:
        os.environ["PHALANX_HOST"] = f"h{member.rank * hosts // member.size}"
        member.join()
        return member

    return join


@pytest.fixture(
    scope="module",
    params=[pytest.param((2, 1), id="2 ranks", marks=pytest.mark.long), pytest.param((3, 2), id="3 ranks on 2 hosts")],
)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    ranks, hosts = request.param
    with Pool(ranks, joining(hosts)) as started:
        started.do(repr)
        yield started


def run_here(member: Member, name: str, rows: int) -> Answer:
    return run(member.rank, member.size, name, rows)


@pytest.mark.parametrize("rows", [ROWS, pytest.param(LARGE_ROWS, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_one_process(pool: Pool, name: str, rows: int) -> None:
    check(pool.size, name, rows, pool.do(run_here, name, rows))
