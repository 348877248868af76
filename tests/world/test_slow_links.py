"""Gradients that travel in fewer bytes: what arrives, beside a plain computation of what should."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP needs it; before the ranks are forked, since it takes each of them seconds
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import Ranks, every_rank, in_worlds, join_world

import phalanx
from phalanx.errors import ArgumentError, PeerLost
from phalanx.parallel.data_parallel import data_parallel
from phalanx.parallel.exchange import Narrow, quickest
from phalanx.parallel.integers import BLOCK, Integers, packed, unpacked

CPU = torch.device("cpu")
LONG = pytest.mark.long


def values(rank: int, step: int, count: int = 3001) -> torch.Tensor:
    """What a rank contributes in a step: numbers of very different sizes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(count, generator=generator) * torch.logspace(-3, 3, count)


def mean_of(size: int, step: int) -> torch.Tensor:
    return torch.stack([values(rank, step) for rank in range(size)]).double().mean(0)


class Net(torch.nn.Module):
    """A table (tall), two matrices, biases, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5000, 1, dtype=dtype)
        self.first = torch.nn.Linear(20, 300, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(300, dtype=dtype)
        self.last = torch.nn.Linear(300, 1, dtype=dtype)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        scores: torch.Tensor = hidden + self.table(words).sum(1)
        return scores


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch_of(rank: int, step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(97 * step + rank)
    x = torch.randn(rows, 20, generator=generator)
    words = torch.randint(0, 5000, (rows, 10), generator=generator)
    return x, words, x.sum(1, keepdim=True).sin()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> float:
    loss = torch.zeros(())
    for step in steps:
        x, words, y = batch_of(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x, words), y)
        loss.backward()
        optimizer.step()
    return float(loss)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("bits", [8, 3])
def test_integers_are_within_half_a_step_of_their_block(bits: int) -> None:
    """Zeros stay, and an infinity makes its block unknown."""
    rows = torch.stack([values(rank, 0, 1024) for rank in range(3)])
    arrived = unpacked(packed(rows, bits), 1024, bits)
    for row, back in zip(rows.split(BLOCK, 1), arrived.split(BLOCK, 1), strict=True):
        bound = row.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) / 2
        assert bool(((row - back).abs() <= bound * 1.0001).all())
    assert packed(rows, bits).shape[1] == 1024 * bits // 8 + 4 * math.ceil(1024 / BLOCK)
    rows = torch.zeros(1, 3 * BLOCK)
    rows[0, BLOCK], rows[0, -1] = math.inf, 1e-44
    zeros, unknown, tiny = unpacked(packed(rows, bits), 3 * BLOCK, bits)[0].split(BLOCK)
    assert zeros.tolist() == tiny.tolist() == [0.0] * BLOCK
    assert unknown.isnan().all()


@in_worlds()
def test_bf16_and_fp16_are_the_mean_of_rounded_shares(world: Ranks) -> None:
    """What is finite does not overflow, and infinities stay."""
    size = world.size

    def body(member: Member) -> list[torch.Tensor]:
        found = [values(member.rank, 0), values(member.rank, 0), torch.tensor([1e30, -65504.0, 30000.0, math.inf, 1])]
        for name, tensor in zip(("bf16", "fp16", "fp16"), found, strict=True):
            Narrow(dist.group.WORLD, name).mean_([tensor], [[tensor.shape]])  # type: ignore[arg-type]
        return found

    everywhere = world.run(body)
    for number, dtype in enumerate((torch.bfloat16, torch.float16)):
        rounded = torch.stack([(values(rank, 0) / size).to(dtype).double() for rank in range(size)])
        spacing = torch.finfo(dtype).eps * rounded.abs().sum(0) + torch.finfo(dtype).smallest_normal
        for arrived in everywhere:
            assert bool(((arrived[number].double() - rounded.sum(0)).abs() <= spacing).all())
            assert torch.equal(arrived[number], everywhere[0][number])
    for arrived in everywhere:
        assert arrived[2].tolist() == pytest.approx([32768, -32768, 30000, math.inf, 1], rel=1e-3)


@pytest.mark.parametrize(("size", "hosts"), [(3, 1), pytest.param(4, 2, marks=LONG)])
def test_what_int8_leaves_out_is_pending_and_nothing_else(size: int, hosts: int) -> None:
    """After any number of means their sum, and what is pending, is the sum of the exact means."""
    steps = range(12)

    def body(member: Member) -> tuple[list[torch.Tensor], torch.Tensor]:
        world = join_world(member, hosts=hosts)
        exchange = Integers(world._lanes())
        arrived = []
        for step in steps:
            tensor = values(member.rank, step)
            exchange.mean_([tensor], [[tensor.shape]])
            arrived.append(tensor)
        exchange.settle()
        pending: torch.Tensor = exchange.state_dict()["pending"][0]
        dist.destroy_process_group()
        return arrived, pending

    everywhere = on_ranks(body, size)
    for arrived, pending in everywhere:
        total = torch.stack(arrived).double().sum(0)
        exact = torch.stack([mean_of(size, step) for step in steps]).sum(0)
        scale = torch.stack([values(rank, step).abs() for rank in range(size) for step in steps]).max(0).values
        for step in steps:
            # Each rank's share is rounded once, and the sum once more; what was pending is in both.
            largest = torch.nn.functional.max_pool1d(scale[None, None], 2 * BLOCK + 1, 1, BLOCK)[0, 0]
            off = (arrived[step].double() - mean_of(size, step)).abs()
            assert bool((off <= 4.2 * largest / 127).all())
        assert bool(((total + pending[: len(total)] - exact).abs() <= 1e-5 * len(steps) * scale).all())
        assert all(torch.equal(a, b) for a, b in zip(arrived, everywhere[0][0], strict=True))


@every_rank(2)
def test_an_infinite_gradient_is_seen_by_all_ranks_and_does_not_stay(member: Member) -> None:
    world = join_world(member)
    for name in ("int8", "powersgd"):
        model = world.data_parallel(net(), compress=name, broadcast_buffers=False)
        for step in range(14):
            model.zero_grad()
            x, words, _ = batch_of(member.rank, step)
            if step == 11 and member.rank == 1:
                x[0, 0] = float("inf")
            model(x, words).sum().backward()
            if step == 11:
                model.module.norm.reset_running_stats()
            finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            assert finite == (step != 11), (name, step)


@pytest.mark.parametrize("compress", ["int8", "powersgd"])
def test_replicas_have_the_same_bits_and_learn_as_plain_ones(compress: str) -> None:
    def body(member: Member) -> tuple[torch.Tensor, float, float]:
        world = join_world(member)
        losses = []
        for name in (None, compress):
            model = world.data_parallel(net(seed=member.rank), compress=name, bucket_cap_mb=0.01)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            train(model, optimizer, member.rank, range(40))
            parameters = flat(model)
            with torch.no_grad():
                model.eval()
                x, words, y = batch_of(0, 1000, rows=64)
                losses.append(float(torch.nn.functional.mse_loss(model.module(x, words), y)))
        dist.destroy_process_group()
        return parameters, losses[0], losses[1]

    everywhere = on_ranks(body, 3)
    for parameters, plain, compressed in everywhere:
        assert torch.equal(parameters, everywhere[0][0])
        assert compressed == pytest.approx(plain, rel=0.15)


def test_ddps_options_and_accumulation_work_with_compression() -> None:
    options: tuple[dict[str, Any], ...] = (
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    )

    def gradients_of(world: phalanx.World, how: str | None, given: dict[str, Any]) -> torch.Tensor:
        model = world.data_parallel(net(), compress=how, **given)
        for step in range(3):
            model.zero_grad(set_to_none=True)
            halves = (0,) if "static_graph" in given else (0, 1)  # torch's static graph cannot begin with no_sync
            for half in world.accumulate(model, halves):
                x, words, y = batch_of(world.rank, 2 * step + half)
                torch.nn.functional.mse_loss(model(x, words), y).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

    def body(member: Member) -> list[tuple[torch.Tensor, torch.Tensor]]:
        world = join_world(member)
        found = [(gradients_of(world, None, given), gradients_of(world, "int8", given)) for given in options]
        dist.destroy_process_group()
        return found

    everywhere = on_ranks(body, 2)
    for found in everywhere:
        for plain, compressed in found:
            torch.testing.assert_close(compressed, plain, rtol=0.05, atol=0.02 * float(plain.abs().max()))
        assert all(torch.equal(one[1], other[1]) for one, other in zip(found, everywhere[0], strict=True))


def test_ranks_with_unequally_many_batches_can_join() -> None:
    def body(member: Member) -> torch.Tensor:
        world = join_world(member)
        model = world.data_parallel(torch.nn.Linear(70, 70), compress="powersgd")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(12 + 3 * member.rank):
                optimizer.zero_grad()
                model(torch.full((2, 70), 0.1 * step)).mean().backward()
                optimizer.step()
        dist.destroy_process_group()
        return flat(model)

    everywhere = on_ranks(body, 3)
    assert all(torch.equal(parameters, everywhere[0]) for parameters in everywhere)


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Mixed(torch.nn.Module):
    """Layers of several dtypes, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Parameter(torch.ones(300, dtype=torch.complex64))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(100, 100, dtype=dtype) for dtype in DTYPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (self.numbers * torch.complex(x.mean(), 2 * x.mean())).sum()
        total = total + sum(
            layer(x.to(dtype)).double().mean() for layer, dtype in zip(self.layers, DTYPES, strict=True)
        )
        result: torch.Tensor = total.real + total.imag
        return result


@pytest.mark.parametrize("compress", ["int8", pytest.param("fp16", marks=LONG), pytest.param("powersgd", marks=LONG)])
def test_gradients_of_several_dtypes(compress: str) -> None:
    def body(member: Member) -> list[torch.Tensor]:
        model = join_world(member).data_parallel(Mixed(), compress=compress)
        for _ in range(13):
            model.zero_grad()
            model(torch.full((2, 100), member.rank + 1.0)).backward()
        dist.destroy_process_group()
        return [p.grad for p in model.parameters() if p.grad is not None]

    everywhere = on_ranks(body, 2)
    for gradients in everywhere:
        for gradient, dtype in zip(gradients[1::2], DTYPES, strict=True):
            torch.testing.assert_close(gradient.double(), torch.full((100, 100), 1.5 / 100).double(), rtol=0.02, atol=0)
            assert gradient.dtype == dtype
        # d/dn of real and imaginary part of n·(m + 2im), with the mean m = 1.5: conj(m + 2im)·(1 + i).
        expected = torch.full((300,), (1 - 2j) * 1.5 * (1 + 1j), dtype=torch.complex64)
        torch.testing.assert_close(gradients[0], expected, rtol=0.02, atol=0.01)
        assert all(torch.equal(one, other) for one, other in zip(gradients, everywhere[0], strict=True))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Also in the bucket that DDP uses in its first step alone; with another number of ranks it goes on from there."""

    def body(member: Member, resumes: bool) -> torch.Tensor:
        world = join_world(member)
        model = world.data_parallel(net(), compress="powersgd", bucket_cap_mb=0.01)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = {"model": model, "optimizer": optimizer}
        if resumes:
            world.load(tmp_path / "run.pt", state)
        else:
            train(model, optimizer, member.rank, range(15))
            world.save(tmp_path / "run.pt", state)
        loss = train(model, optimizer, member.rank, range(15, 20))
        assert math.isfinite(loss)
        dist.destroy_process_group()
        return flat(model)

    expected = on_ranks(lambda member: body(member, resumes=False), 2)
    for size in (2, 3):
        for parameters in on_ranks(lambda member: body(member, resumes=True), size):
            assert size == 3 or torch.equal(parameters, expected[0])


@every_rank(1)
def test_a_world_of_one_sends_nothing_and_rounds_nothing(member: Member) -> None:
    world, found = join_world(member), []
    for name in (None, "int8", "powersgd", "auto"):
        model = world.data_parallel(net(), compress=name)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, range(12))
        found.append(flat(model))
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_auto_takes_what_is_clearly_quicker_than_none() -> None:
    for times, taken in (((0.5, 0.3), "int8"), ((0.5, 0.6), "bf16"), ((0.85, 3.0), "none"), ((1.1, 1.2), "none")):
        assert quickest({"none": 1.0, "bf16": times[0], "int8": times[1]}) == taken


def test_auto_is_the_same_on_all_ranks_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    def body(member: Member) -> str:
        world = join_world(member)
        model = world.data_parallel(net(seed=member.rank), compress="auto")
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), member.rank, range(3))
        dist.destroy_process_group()
        return model.compress

    (chosen,) = set(on_ranks(body, 3))
    said = [line for line in capfd.readouterr().err.splitlines() if 'compress="auto"' in line]
    assert len(said) == 1
    assert repr(chosen) in said[0]
    assert all(name in said[0] for name in {"none", "bf16", "int8"} - {chosen})


REFUSED: list[tuple[torch.nn.Module, dict[str, Any], str]] = [
    (torch.nn.Linear(1, 1), {"compress": "int4"}, "one of bf16, fp16, int8, powersgd, auto"),
    (torch.nn.Linear(1, 1), {"compress": "bf16", "comm_hook": "bf16"}, "two ways to send the same gradients"),
    (torch.nn.Linear(1, 1), {"compress": "powersgd", "sync_every": 4}, "use compress='int8' with sync_every"),
    (torch.nn.Linear(1, 1), {"outer": "diloco"}, "give sync_every=K with it"),
    (torch.nn.Linear(1, 1), {"outer": "adam", "sync_every": 4}, "None or diloco"),
    (torch.nn.Linear(1, 1), {"sync_every": 0}, "is not a number of steps"),
    (torch.nn.Linear(1, 1), {"sync_every": 4, "comm_hook": "bf16"}, "would never be called"),
    (torch.nn.Linear(1, 1), {"sync_every": 4, "broadcast_buffers": True}, "averaged with the parameters"),
    (torch.nn.Linear(1, 1), {"sync_every": 4, "init_sync": False}, "begin with the same parameters"),
    (torch.nn.EmbeddingBag(10, 2, sparse=True), {"compress": "int8"}, "sparse=False"),
]


@pytest.mark.parametrize(("module", "options", "reason"), REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(
    module: torch.nn.Module, options: dict[str, Any], reason: str
) -> None:
    nobody: Any = None  # it is refused before any group is used
    with pytest.raises(ArgumentError, match=reason):
        data_parallel(module, nobody, CPU, **options)


@in_worlds()
@pytest.mark.parametrize("options", [{"compress": "int8"}, {"sync_every": 2}])
def test_a_rank_that_is_lost_ends_the_exchange_of_the_others(world: Ranks, options: dict[str, Any]) -> None:
    """In backward, or in the step of the optimizer after which replicas are averaged."""

    def body(member: Member) -> int:
        model = join_world(member).data_parallel(net(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, member.rank, range(2))
        if member.rank == 1:
            os._exit(0)
        with pytest.raises(PeerLost) as caught:
            train(model, optimizer, member.rank, range(2))
        return caught.value.group_rank

    outcomes = world.outcomes(body, leaves=False)
    assert [outcomes[0].value, outcomes[2].value] == [1, 1], outcomes
