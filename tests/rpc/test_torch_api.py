"""torch.distributed.rpc over Phalanx: programs written for torch, on forked ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import functions

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from tests.rpc.torch_workers import Counter, add_rank, owned_values, started, until, wait_for_file
from tests.support.ranks import Member, run_ranks, values


class OwnError(Exception):
    pass


def fail(text: str) -> None:
    raise OwnError(text)


def sum_of(references: list[Any]) -> int:
    return sum(reference.to_here() for reference in references)


def calls_everywhere(member: Member) -> list[Any]:
    rpc = started(member)
    results: list[Any] = []
    for rank in range(member.size):
        name = f"worker{rank}"
        results.append(rpc.rpc_sync(name, add_rank, args=(rank,), kwargs={"number": 10}))
        results.append(rpc.rpc_async(rank, torch.add, args=(torch.ones(2), rank)).wait().tolist())
        results.append(rpc.remote(rpc.get_worker_info(name), add_rank, args=(rank,)).to_here())
        counter = rpc.remote(name, Counter, args=(rank,))
        counter.rpc_sync().add(1)
        results.append(counter.rpc_async().add(2).wait())
        results.append(counter.remote().add(3).to_here())
    rpc.shutdown()
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_way_of_calling_reaches_every_worker(size: int) -> None:
    expected: list[Any] = []
    for rank in range(size):
        expected += [rank + 10, [1.0 + rank, 1.0 + rank], rank + 1, rank + 3, rank + 6]
    assert values(run_ranks(calls_everywhere, size)) == [expected] * size


def errors_of_a_call(member: Member) -> list[str]:
    rpc = started(member)
    found = []
    to = f"worker{(member.rank + 1) % member.size}"
    for caught in (OwnError, RuntimeError):
        try:
            rpc.rpc_sync(to, fail, args=("no luck",))
        except caught as error:
            found.append(str(error))
    rpc.shutdown()
    return found


def test_what_a_function_raises_is_caught_by_its_own_type_and_as_torch_raises_it() -> None:
    for rank, texts in enumerate(values(run_ranks(errors_of_a_call, 2))):
        assert len(texts) == 2
        for text in texts:
            assert "no luck" in text
            assert f"worker{1 - rank}" in text


class Unpicklable:
    def __reduce__(self) -> Any:
        return fail, ("arrives",)


def make_lock() -> Any:
    return threading.Lock()


def not_to_be_pickled(member: Member) -> list[str]:
    rpc = started(member)
    to, found = f"worker{(member.rank + 1) % member.size}", []
    for call in (
        lambda: rpc.rpc_sync(to, make_lock),
        lambda: rpc.rpc_async(to, make_lock).wait(),
        lambda: rpc.remote(to, make_lock).to_here(),
        lambda: rpc.rpc_sync(to, Unpicklable),
        lambda: rpc.rpc_sync(to, add_rank, args=(Unpicklable(),)),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        found.append(str(caught.value))
    rpc.shutdown()
    return found


def test_what_cannot_be_pickled_raises_torchs_runtime_error() -> None:
    said = [*["TypeError: cannot pickle '_thread.lock' object"] * 3, *["OwnError: arrives"] * 2]
    assert values(run_ranks(not_to_be_pickled, 2)) == [said] * 2


def references_handed_on(member: Member) -> tuple[int, int]:
    rpc = started(member)
    result = 0
    if member.rank == 0:
        references = [rpc.remote(f"worker{rank}", add_rank, args=(rank,)) for rank in range(member.size)]
        second = rpc.remote(f"worker{member.size - 1}", sum_of, args=(references,))
        handed = rpc.rpc_async("worker1", sum_of, args=([second, *references],))
        del references, second
        result = handed.wait()
        del handed
    rpc.api._barrier([f"worker{rank}" for rank in range(member.size)])
    until(lambda: owned_values() == 0)
    left = owned_values()
    rpc.shutdown()
    return result, left


@pytest.mark.parametrize("size", [2, 3, 5])
def test_references_are_handed_on_and_their_values_go_with_the_last(size: int) -> None:
    total = sum(rank + 1 for rank in range(size))
    assert values(run_ranks(references_handed_on, size)) == [(2 * total, 0)] + [(0, 0)] * (size - 1)


def slow_calls(member: Member) -> str:
    rpc = started(member, timeout_s=60)
    go = member.folder / f"go{member.rank}"  # its own: the call of a rank that is quicker may be over before
    to = f"worker{(member.rank + 1) % member.size}"
    try:
        rpc.rpc_sync(to, wait_for_file, args=(str(go),), timeout=0.2)
    except RuntimeError as error:
        text = str(error)
    go.touch()
    assert rpc.rpc_sync(to, add_rank, args=(1,), timeout=0) == 2
    rpc.shutdown()
    return text


@pytest.mark.parametrize("size", [1, 2])
def test_a_call_that_takes_too_long_says_so_in_torchs_words(size: int) -> None:
    for text in values(run_ranks(slow_calls, size)):
        assert text.startswith("RPC ran for more than set timeout (200 ms)")


@functions.async_execution  # type: ignore[untyped-decorator]
def later(to: str, number: int) -> Any:
    from torch.distributed import rpc

    return rpc.rpc_async(to, add_rank, args=(number,)).then(lambda done: done.wait() + 100)


def callbacks(member: Member) -> tuple[int, int]:
    rpc = started(member)
    to = f"worker{(member.rank + 1) % member.size}"
    me = f"worker{member.rank}"
    asynchronous = rpc.rpc_sync(to, later, args=(me, 1))
    nested = rpc.rpc_async(to, add_rank, args=(1,)).then(lambda done: rpc.rpc_sync(to, add_rank, args=(done.wait(),)))
    result = nested.wait()
    rpc.shutdown()
    return asynchronous, result


@pytest.mark.parametrize("size", [1, 3])
def test_functions_that_return_futures_and_callbacks_that_call(size: int) -> None:
    assert values(run_ranks(callbacks, size)) == [(102, 3)] * size


def first_failure(member: Member) -> str:
    rpc = started(member)
    to = f"worker{(member.rank + 1) % member.size}"
    file = member.folder / f"go{member.rank}"
    futures = [rpc.rpc_async(to, wait_for_file, args=(str(file),)), rpc.rpc_async(to, fail, args=("at once",))]
    try:
        torch.futures.wait_all(futures)
    except OwnError as error:
        text = str(error)
    file.touch()
    futures[0].wait()
    rpc.shutdown()
    return text


def test_wait_all_raises_the_first_error_without_waiting_for_the_rest() -> None:
    assert all("at once" in text for text in values(run_ranks(first_failure, 2)))


def comes_and_goes(member: Member) -> list[str]:
    if member.rank == 2:
        until((member.folder / "ready1").exists)
    rpc = started(member, size=None)
    (member.folder / f"ready{member.rank}").touch()
    if member.rank == 2:
        names = sorted(info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos())
        assert rpc.rpc_sync("worker0", add_rank, args=(5,)) == 6
        rpc.shutdown()
        (member.folder / "gone2").touch()
        return names
    until((member.folder / "gone2").exists)
    names = sorted(info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos())
    rpc.shutdown()
    return names


def test_workers_of_a_dynamic_group_come_and_go() -> None:
    first, second, third = values(run_ranks(comes_and_goes, 3))
    assert third == ["worker0", "worker1", "worker2"]
    assert "worker2" not in first
    assert "worker2" not in second


@torch.jit.script
def scripted(first: torch.Tensor, second: int = 2) -> torch.Tensor:
    return first * second


def script_functions(member: Member) -> tuple[list[float], str, str]:
    rpc = started(member)
    to = f"worker{(member.rank + 1) % member.size}"
    result = rpc.rpc_sync(to, scripted, args=(torch.ones(2),)).tolist()
    with pytest.raises(RuntimeError) as too_many:
        rpc.rpc_async(to, scripted, args=(torch.ones(2), 3, 4))
    with pytest.raises(RuntimeError) as reference:
        rpc.rpc_sync(to, scripted, args=(rpc.RRef(torch.ones(2)),))
    rpc.shutdown()
    return result, str(too_many.value), str(reference.value)


def test_script_functions_are_called_and_wrong_arguments_are_refused() -> None:
    for result, too_many, reference in values(run_ranks(script_functions, 2)):
        assert result == [2.0, 2.0]
        assert too_many.startswith("scripted() expected at most 2 argument(s) but received 3")
        assert "Expected a value of type 'Tensor" in reference


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.weight

    def weight_reference(self) -> Any:
        from torch.distributed import rpc

        return rpc.RRef(self.weight)


def one_step(member: Member) -> Any:
    rpc = started(member)
    found = None
    if member.rank == 0:
        dist_autograd: Any = torch.distributed.autograd
        name = f"worker{member.size - 1}"
        layer = rpc.remote(name, Layer)
        own = torch.ones(3, requires_grad=True)
        weight = layer.rpc_sync().weight_reference()
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight, rpc.RRef(own)], lr=0.5)
        with dist_autograd.context() as context:
            loss = layer.rpc_sync().forward(own * 3).sum()
            dist_autograd.backward(context, [loss])
            gradient = dist_autograd.get_gradients(context)[own]
            optimizer.step(context)
        found = gradient.tolist(), own.tolist(), weight.to_here().tolist()
    rpc.shutdown()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_follow_calls_and_torchs_distributed_optimizer_steps(size: int) -> None:
    own = torch.ones(3, requires_grad=True)
    weight = torch.full((3,), 2.0, requires_grad=True)
    (own * 3 * weight).sum().backward()
    assert own.grad is not None
    assert weight.grad is not None
    expected = (own.grad.tolist(), (own - 0.5 * own.grad).tolist(), (weight - 0.5 * weight.grad).tolist())
    assert values(run_ranks(one_step, size))[0] == expected


PROGRAM = dedent(
    """
    import os
    import torch
    import torch.distributed.rpc as rpc

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    to = f"worker{(rank + 1) % size}"
    counted = rpc.remote(to, torch.add, args=(torch.ones(2), rank))
    print(rank, counted.to_here().sum().item(), type(rpc.api._get_current_rpc_agent()).__module__, flush=True)
    rpc.shutdown()
    """
)


def test_a_script_that_imports_torchs_rpc_runs_over_phalanx_unmodified(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "phalanx", "run", "-n", "3", "--replace", "rpc", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    for rank in range(3):
        assert f"{rank} {2.0 * (1 + rank)} phalanx.rpc.torch_api" in ran.stdout
