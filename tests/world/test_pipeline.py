"""Pipelines: every schedule of torch.distributed.pipelining, and stages that call each other, end and compute what one
process computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.examples import example
from tests.support.pool import Pool
from tests.support.ranks import Member
from torch import nn
from torch.distributed import pipelining

from phalanx import rpc

ONE_STAGE = ("GPipe", "1F1B")
TWO_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
MICRO_BATCHES, ROWS, WIDTH = 8, 3, 16
STEPS = 3  # the first one also finds out the shapes of what the stages send
LR = 0.5

Gradients = dict[int, list[list[torch.Tensor]]]  # by stage and step, in the order of its parameters


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
        own = self.score(known.relu())
        scores = own if scores is None else scores + own
        return scores if self.last else (known, scores)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and labels of a step."""
    generator = torch.Generator().manual_seed(step)
    rows = MICRO_BATCHES * ROWS
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(4, (rows,), generator=generator)


def update(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Take a step; the gradients."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.data -= LR * parameter.grad
        parameter.grad = None
    return gradients


def in_one_process(stages: int, *, backwards: bool = False) -> tuple[Gradients, list[list[torch.Tensor]]]:
    """The gradients and the losses of the micro-batches, whose gradients are added up in their order, or backwards."""
    model = [Stage(stage, stages) for stage in range(stages)]
    gradients: Gradients = {stage: [] for stage in range(stages)}
    losses = []
    for step in range(STEPS):
        now = {}
        parts = list(enumerate(zip(*(part.chunk(MICRO_BATCHES) for part in batch(step)), strict=True)))
        for number, (rows, labels) in reversed(parts) if backwards else parts:
            values: Any = (rows,)
            for stage in model:
                values = stage(*values)
            now[number] = nn.functional.cross_entropy(values, labels)
            now[number].backward()
        losses.append([now[number].detach() for number in range(MICRO_BATCHES)])
        for at, stage in enumerate(model):
            for parameter in stage.parameters():
                assert parameter.grad is not None
                parameter.grad /= MICRO_BATCHES
            gradients[at].append(update(list(stage.parameters())))
    return gradients, losses


class Case(NamedTuple):
    """So many ranks on so many hosts."""

    ranks: int
    hosts: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.hosts} hosts"


def start(hosts: int) -> Any:
    """A function that makes a process a rank on one of the hosts, and a worker."""

    def join(member: Member) -> Member:
        os.environ["PHALANX_HOST"] = f"h{member.rank * hosts // member.size}"
        member.join()
        rpc.init()
        return member

    return join


CASES = [Case(ranks, hosts) for ranks in (2, 3, 4) for hosts in (1, 2)]
SHORT = (Case(2, 1), Case(3, 2))


@pytest.fixture(
    scope="module",
    params=[case if case in SHORT else pytest.param(case, marks=pytest.mark.long) for case in CASES],
    ids=lambda case: str(case),
)
def world(request: pytest.FixtureRequest) -> Iterator[tuple[Case, Pool]]:
    case = request.param
    with Pool(case.ranks, start(case.hosts)) as pool:
        pool.do(repr)
        yield case, pool


def run_schedule(member: Member, name: str) -> tuple[Gradients, list[list[torch.Tensor]]]:
    """On a rank: the gradients of its stages, and the losses if it has the last one."""
    stages = member.size * (1 if name in ONE_STAGE else 2)
    mine = [member.rank]
    if name in TWO_STAGES:
        mine.append(stages - 1 - member.rank if name in ("ZBVZeroBubble", "DualPipeV") else member.rank + member.size)
    parts = {at: pipelining.PipelineStage(Stage(at, stages), at, stages, torch.device("cpu")) for at in mine}
    kind: Any = pipelining.schedules.get_schedule_class(name)
    schedule = kind(
        parts[member.rank] if name in ONE_STAGE else list(parts.values()),
        n_microbatches=MICRO_BATCHES,
        loss_fn=nn.functional.cross_entropy,
    )
    gradients: Gradients = {at: [] for at in mine}
    losses: list[list[torch.Tensor]] = []
    for step in range(STEPS):
        rows, labels = batch(step)
        now: list[torch.Tensor] = []
        schedule.step(*((rows,) if 0 in mine else ()), target=labels, losses=now)
        losses.append([loss.detach() for loss in now])
        for at in mine:
            gradients[at].append(update(list(parts[at].submod.parameters())))
    return gradients, losses


@pytest.mark.parametrize("name", [*ONE_STAGE, *TWO_STAGES])
def test_a_schedule_gives_the_gradients_of_one_process_to_the_bit(world: tuple[Case, Pool], name: str) -> None:
    case, pool = world
    stages = case.ranks * (1 if name in ONE_STAGE else 2)
    expected, expected_losses = in_one_process(stages, backwards=name == "LoopedBFS")
    answers = pool.do(run_schedule, name)
    found = {at: steps for gradients, _ in answers for at, steps in gradients.items()}
    assert sorted(found) == list(range(stages))
    for at, steps in expected.items():
        for got, want in zip(found[at], steps, strict=True):
            assert all(torch.equal(*each) for each in zip(got, want, strict=True)), f"stage {at}"
    (losses,) = [losses for gradients, losses in answers if stages - 1 in gradients]
    assert losses == expected_losses


def remote_gradients(stage: Any, context_id: int) -> list[torch.Tensor]:
    """Where a stage lives: the gradients of its parameters, after it has taken a step."""
    parameters = list(stage._layers.parameters())
    found = rpc.get_gradients(context_id)
    for parameter in parameters:
        parameter.grad = found[parameter]
    return update(parameters)


def run_remote(member: Member) -> Gradients:
    """On rank 0: the gradients of all stages, which are on all ranks."""
    module = example("pipeline")
    gradients: Gradients = {at: [] for at in range(member.size)}
    if member.rank:
        return gradients
    remote: list[Any] = []
    for at in reversed(range(member.size)):
        layers = module.Layers([Stage(at, member.size)])
        remote.insert(0, rpc.make(at, module.RemoteStage, layers, 0.0, remote[0] if remote else None))
    for step in range(STEPS):
        rows, labels = batch(step)
        with rpc.context() as context_id:
            under_way = [remote[0].start.forward(part) for part in rows.chunk(MICRO_BATCHES)]
            scores = torch.cat([each.wait() for each in under_way])
            rpc.backward(context_id, [nn.functional.cross_entropy(scores, labels)])
            for at, stage in enumerate(remote):
                gradients[at].append(rpc.call(stage, remote_gradients, context_id))
    return gradients


def test_stages_that_call_each_other_give_the_gradients_of_one_process(world: tuple[Case, Pool]) -> None:
    pytest.importorskip("tqdm")
    case, pool = world
    expected, _ = in_one_process(case.ranks)
    found = pool.do(run_remote)[0]
    for at, steps in expected.items():
        for got, want in zip(found[at], steps, strict=True):
            # The sum over the micro-batches is taken in the order in which they come back.
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
