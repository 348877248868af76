"""Parameter servers: the same training as in one process, and what becomes of it when workers come and go."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer of a process imports it; the ranks are forked from this one
from torch import nn

from phalanx import rpc
from phalanx.errors import ArgumentError, InitializationError, WorkerLost
from phalanx.rpc import session
from tests.rpc.workers import with_workers
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import soon

PATIENCE_S = 60.0


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


class Lookup(nn.Module):
    """An embedding whose gradients are sparse, and a layer whose gradients are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(1000, 4, sparse=True)
        self.linear = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(self.embedding(rows).sum(dim=1))
        return found


def inputs_of(step: int, trainer: int = 0) -> torch.Tensor:
    return torch.rand(8, 6, generator=torch.Generator().manual_seed(100 * step + trainer), dtype=torch.float64)


def rows_of(step: int) -> torch.Tensor:
    return torch.randint(1000, (4, 5), generator=torch.Generator().manual_seed(step))


def alone(steps: int, trainers: int) -> nn.Module:
    """The model after so many steps with the batches of all trainers, in one process."""
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for trainer in range(trainers):
            (model(inputs_of(step, trainer)).square().sum() / trainers).backward()
        optimizer.step()
    return model


def train(trained: rpc.Parameters, model: nn.Module, steps: int, trainer: int) -> None:
    for step in range(steps):
        trained.zero_grad()
        model(inputs_of(step, trainer)).square().sum().backward()
        trained.step()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "servers"), [(1, 1), (4, 2)])
def test_synchronous_training_is_that_of_one_process(size: int, servers: int) -> None:
    trainers = max(1, size - servers)

    def body(member: Member) -> None:
        if member.rank >= trainers:
            return
        model = model_of(member.rank)  # the first trainer's values are the beginning, so they must be those of seed 0
        names = [f"worker{size - 1 - server}" for server in range(servers)]
        if member.rank:
            member.await_said("begun")
        with rpc.parameters(model, on=names, optimizer=torch.optim.AdamW, lr=0.05, trainers=trainers) as trained:
            member.say("begun")
            train(trained, model, 6, member.rank)
            assert_same(model, alone(6, trainers))
            assert trained.steps == 6

    with_workers(body, size)


SPARSE: dict[str, Any] = {"sparse_optimizer": torch.optim.SparseAdam, "sparse_options": {"lr": 0.1}}


def sparse_adam(model: Lookup) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.embedding.parameters(), lr=0.1)


def test_sparse_rows_travel_only_if_looked_up_and_train_the_same() -> None:
    def body(member: Member) -> None:
        if member.rank:
            return
        model, plain = Lookup(), Lookup()
        optimizers = [torch.optim.SGD(plain.linear.parameters(), lr=0.1), sparse_adam(plain)]
        with rpc.parameters(model, on=["worker1", "worker2"], optimizer=torch.optim.SGD, lr=0.1, **SPARSE) as trained:
            model.embedding.weight.detach().fill_(99.0)  # what is not pulled would show
            for step in range(5):
                trained.zero_grad()
                plain.zero_grad()
                for one in (model, plain):
                    one(rows_of(step)).square().sum().backward()
                trained.step()
                for optimizer in optimizers:
                    optimizer.step()
            touched = torch.cat([rows_of(step).flatten() for step in range(5)]).unique()
            untouched = (model.embedding.weight == 99.0).all(dim=1).sum().item()
            assert untouched == 1000 - len(touched)
            trained.pull(rows=True)
            assert_same(model, plain)

    with_workers(body, 3)


@pytest.mark.parametrize("mode", ["bounded", "asynchronous"])
def test_quick_trainer_is_ahead_as_far_as_the_mode_allows(mode: str) -> None:
    staleness = {"staleness": 3} if mode == "bounded" else {}

    def body(member: Member) -> Any:
        if member.rank == 2:
            return None
        model = model_of(0)
        settings: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.01, "mode": mode, **staleness}
        with rpc.parameters(model, on=["worker2"], **settings) as trained:
            member.say(f"come-{member.rank}")
            member.await_said("come-0", "come-1")
            if member.rank:
                member.await_said("ahead")
                for _ in range(4):
                    trained.step()
                return trained.steps
            taken = 0
            while taken < 3:  # with the other at 0, three steps are answered at once
                trained.step()
                taken += 1
            if mode == "asynchronous":
                for _ in range(20):
                    trained.step()
            member.say("ahead")
            trained.step()  # the bounded one waits for the other's first step
            return trained.steps

    quick, slow, _ = with_workers(body, 3)
    assert quick >= (5 if mode == "bounded" else 24)
    assert slow >= 7


def test_options_change_and_what_cannot_be_is_refused() -> None:
    def body(member: Member) -> None:
        if member.rank:
            return
        model, sgd = model_of(0), torch.optim.SGD
        for wrong, said in (({"mode": "any"}, "none of synchronous"), ({"mode": "bounded"}, "staleness")):
            with pytest.raises(ArgumentError, match=said):
                rpc.parameters(model, on=[1], optimizer=sgd, **wrong)  # type: ignore[arg-type]
        with rpc.parameters(model, on=[1], optimizer=sgd, lr=1.0) as trained:
            with pytest.raises(ArgumentError, match="other parameters"):
                rpc.parameters(nn.Linear(2, 2), on=[1], optimizer=sgd, lr=1.0)
            trained.set(lr=0.0)
            train(trained, model, 1, 0)
        with pytest.raises(ArgumentError, match="closed"):
            trained.step()
        assert_same(model, model_of(0))
        left = rpc.parameters(nn.Linear(2, 2), on=[1], optimizer=sgd, lr=1.0, name="left open")
        rpc.shutdown()
        left.close()

    with_workers(body, 2)


# Workers that are no ranks, so that one can be killed and come back: its second life is a process of its own.


def as_worker(member: Member, name: str) -> None:
    def begun() -> bool:
        try:
            session.begin(member.store(), name, -1, "127.0.0.1", PATIENCE_S)
        except InitializationError:  # the first life has said that it is about to end, and has not yet
            return False
        return True

    assert soon(begun)


def die(member: Member) -> None:
    member.say("died")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", [{"mode": "synchronous", "trainers": 2}, {"mode": "bounded", "staleness": 1}])
def test_trainer_that_is_killed_holds_nobody_back_and_joins_again(how: dict[str, Any]) -> None:
    def body(member: Member) -> Any:
        if member.rank == 3:
            member.await_said("alone", "died")
        as_worker(member, ("server", "survivor", "mortal", "mortal")[member.rank])
        if member.rank == 0:
            member.await_said("done-1", "done-3")
            return 13
        model = model_of(0)
        trained = rpc.parameters(model, on=["server"], optimizer=torch.optim.SGD, lr=0.1, **how)
        if member.rank == 1:
            train(trained, model, 10, 0)  # also while nobody else is there
            member.say("alone")
            member.await_said("back")
        if member.rank == 2:
            train(trained, model, 1, 1)  # no more: the survivor may have ended its steps before
            die(member)
        member.say("back")
        train(trained, model, 3, member.rank // 3)
        trained.close()
        member.say(f"done-{member.rank}")
        return trained.steps

    outcomes = run_ranks(body, 4)
    assert outcomes.pop(2).signal == signal.SIGKILL
    assert min(values(outcomes)) >= 13


@pytest.mark.parametrize("kept", ["", "saved", "at every step"])
def test_a_server_that_comes_back_restores_its_shard(kept: str, tmp_path: Path) -> None:
    """From the trainer, or from its file, which keeps what trainers do not have: its optimizers' states, and rows."""

    def body(member: Member) -> Any:
        name = ("trainer", "other", "mortal", "mortal")[member.rank]
        if member.rank == 3:
            member.await_said("died")
        as_worker(member, name)
        if member.rank == 2:
            member.await_said("die")
            die(member)
        if member.rank:
            member.await_said("over")
            return "served"
        model, plain = (Lookup(), Lookup()) if kept else (model_of(0), model_of(0))
        options: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1}
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(plain.parameters(), lr=0.1)]
        if isinstance(plain, Lookup):
            options = {**SPARSE, "optimizer": torch.optim.AdamW, "lr": 0.1, "checkpoint": tmp_path / "shard"}
            options["checkpoint_steps"] = 1000 if kept == "saved" else 1
            optimizers = [torch.optim.AdamW(plain.linear.parameters(), lr=0.1), sparse_adam(plain)]
        trained = rpc.parameters(model, on=["other", "mortal"], **options)
        for step in range(6):
            if step == 3:
                if kept == "saved":
                    trained.save()
                member.say("die")
                member.await_said("died")
            trained.zero_grad()
            for one in (model, plain):
                one.zero_grad()
                inputs = rows_of(step) if kept else inputs_of(step)
                one(inputs).square().sum().backward()
            trained.step()
            for optimizer in optimizers:
                optimizer.step()
        trained.pull(rows=True)
        if kept:
            with pytest.raises(ArgumentError, match="another number of servers"):
                rpc.parameters(
                    nn.Linear(2, 2), on=["other"], optimizer=torch.optim.SGD, name="b", checkpoint=tmp_path / "shard"
                )
        trained.close()
        member.say("over")
        assert_same(model, plain)
        return "trained"

    assert values(run_ranks(body, 4)[:2]) == ["trained", "served"]


def test_a_server_that_does_not_come_back_is_named() -> None:
    def body(member: Member) -> Any:
        as_worker(member, ("trainer", "server")[member.rank])
        if member.rank:
            member.await_said("die")
            die(member)
        model = model_of(0)
        trained = rpc.parameters(model, on=["server"], optimizer=torch.optim.SGD, lr=0.1, restore_s=0.5)
        member.say("die")
        member.await_said("died")
        with pytest.raises(WorkerLost, match="server"):
            train(trained, model, 1, 0)
        trained.close()
        return "done"

    assert values(run_ranks(body, 2)[:1]) == ["done"]


def test_one_that_only_pulls_is_not_waited_for() -> None:
    def body(member: Member) -> Any:
        if member.rank == 2:
            return None
        model = model_of(member.rank)
        settings: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1, "trainers": 1}
        if member.rank:
            member.await_said("begun-0")
        with rpc.parameters(model, on=[2], trains=not member.rank, **settings) as trained:
            member.say(f"begun-{member.rank}")
            if member.rank:
                member.await_said("trained")
                trained.pull()
            else:
                member.await_said("begun-1")
                train(trained, model, 3, 0)
                member.say("trained")
            return model.state_dict()

    one, other, _ = with_workers(body, 3)
    assert all(torch.equal(one[name], other[name]) for name in one)
