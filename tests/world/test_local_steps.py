"""Local steps: replicas that are averaged every K steps, beside the same computation in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DDP needs it; before the ranks are forked, since it takes each of them seconds
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import every_rank, join_world
from torch.distributed.optim import ZeroRedundancyOptimizer

from phalanx.errors import ArgumentError

LONG = pytest.mark.long
EVERY = 4
STEPS = 11


def net(seed: int = 0) -> torch.nn.Sequential:
    # Without a bias before the normalisation: its gradient is zero but for rounding, which Adam makes large.
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 20, bias=False), torch.nn.BatchNorm1d(20), torch.nn.Tanh(), torch.nn.Linear(20, 1)
    )


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(31 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02)


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x, y = batch_of(rank, step)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def contents(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


def in_one_process(size: int, outer: str | None) -> list[list[torch.Tensor]]:
    """The replicas of each rank after all steps, without DDP or process groups."""
    replicas = [net() for _ in range(size)]
    optimizers = [adam(replica) for replica in replicas]
    before = [p.detach().clone() for p in replicas[0].parameters()]
    momentum = [torch.zeros_like(p) for p in before]
    for step in range(STEPS):
        for rank in range(size):
            step_once(replicas[rank], optimizers[rank], rank, step)
        if (step + 1) % EVERY:
            continue
        with torch.no_grad():
            for number, values in enumerate(zip(*(replica.parameters() for replica in replicas), strict=True)):
                mean = torch.stack([value.detach() for value in values]).mean(0)
                if outer is not None:
                    gradient = before[number] - mean
                    momentum[number] = 0.9 * momentum[number] + gradient
                    mean = before[number] - 0.7 * (gradient + 0.9 * momentum[number])
                before[number] = mean.clone()
                for value in values:
                    value.copy_(mean)
            for buffers in zip(*(replica.buffers() for replica in replicas), strict=True):
                if buffers[0].is_floating_point():
                    mean = torch.stack(list(buffers)).mean(0)
                    for buffer in buffers:
                        buffer.copy_(mean)
    return [contents(replica) for replica in replicas]


@pytest.mark.parametrize(("size", "outer"), [(3, None), (3, "diloco"), (1, "diloco")])
def test_every_replica_is_what_one_process_computes(size: int, outer: str | None) -> None:
    def body(member: Member) -> list[torch.Tensor]:
        world = join_world(member)
        module = net(seed=member.rank)
        model = world.data_parallel(module, sync_every=EVERY, outer=outer)
        optimizer = adam(model)
        for step in range(STEPS):
            step_once(model, optimizer, member.rank, step)
        dist.destroy_process_group()
        return contents(module)

    for found, expected in zip(on_ranks(body, size), in_one_process(size, outer), strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("compress", "outer"), [("int8", "diloco"), pytest.param("bf16", None, marks=LONG)])
def test_replicas_are_the_same_after_an_average_and_when_asked(compress: str | None, outer: str | None) -> None:
    def body(member: Member) -> list[list[torch.Tensor]]:
        world = join_world(member)
        module = net(seed=member.rank)
        model = world.data_parallel(module, compress=compress, sync_every=EVERY, outer=outer)
        optimizer = adam(model)
        found = []
        for step in range(EVERY + 3):
            step_once(model, optimizer, member.rank, step)
            if step >= EVERY - 1:
                found.append(contents(module))
        model.synchronize()
        found.append(contents(module))
        dist.destroy_process_group()
        return found

    averaged, _, _, locally, asked = zip(*on_ranks(body, 3), strict=True)
    for same in (averaged, asked):
        assert all(torch.equal(a, b) for other in same for a, b in zip(other, same[0], strict=True))
    assert not torch.equal(locally[0][0], locally[1][0])
    # Asked for, it is the plain mean of what the replicas had.
    mean = torch.stack([each[0] for each in locally]).mean(0)
    torch.testing.assert_close(asked[0][0], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("compress", "outer"), [("int8", "diloco"), pytest.param(None, "diloco", marks=LONG)])
def test_a_resumed_run_ends_with_the_same_bits(compress: str | None, outer: str | None, tmp_path: Path) -> None:
    """It was saved between two averages, and the period goes on."""
    saved_after = EVERY + 2

    def body(member: Member, resumes: bool) -> list[torch.Tensor]:
        world = join_world(member)
        model = world.data_parallel(net(), compress=compress, sync_every=EVERY, outer=outer)
        optimizer = adam(model)
        state = {"model": model.module, "optimizer": optimizer}
        if resumes:
            world.load(tmp_path / "run.pt", state)
        for step in range(saved_after if resumes else 0, STEPS):
            if step == saved_after and not resumes:
                world.save(tmp_path / "run.pt", state)
            step_once(model, optimizer, member.rank, step)
        dist.destroy_process_group()
        return contents(model)

    whole, resumed = (on_ranks(partial(body, resumes=resumes), 2) for resumes in (False, True))
    for expected, found in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@every_rank(2)
def test_steps_of_several_optimizers_are_counted_as_one(member: Member) -> None:
    world, module, foreign = join_world(member), net(), torch.nn.Linear(1, 1)
    model = world.data_parallel(module, sync_every=EVERY)
    halves = [torch.optim.SGD(module[part].parameters(), lr=0.1) for part in (0, 3)]
    other = torch.optim.SGD(foreign.parameters(), lr=0.1)
    for step in range(2 * EVERY):
        x, y = batch_of(member.rank, step)
        torch.nn.functional.mse_loss(model(x), y).backward()
        for optimizer in (*halves, other, other, other):
            optimizer.step()
        first = world.all_gather_object(next(iter(module[0].parameters())).detach())
        assert torch.equal(first[0], first[1]) == ((step + 1) % EVERY == 0)


@every_rank(2, joins=False)
def test_nothing_is_sent_between_two_averages(member: Member) -> None:
    """A rank takes its local steps while another one does nothing."""
    world = join_world(member)
    model = world.data_parallel(net(), sync_every=EVERY, find_unused_parameters=True)
    optimizer = adam(model)
    if member.rank:
        member.await_said("alone")
    for step in range(EVERY - 1):
        step_once(model, optimizer, member.rank, step)
    member.say("alone")
    step_once(model, optimizer, member.rank, EVERY)


@every_rank(2)
def test_what_would_need_every_step_is_refused(member: Member) -> None:
    model = join_world(member).data_parallel(net(), sync_every=EVERY)
    with pytest.raises(ArgumentError, match="equally many batches"):
        model.join()
    with pytest.raises(ArgumentError, match="use a plain optimizer"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).step()
