"""torch.distributed.rpc over Phalanx: programs written for torch, on forked ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import functions

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from phalanx.rpc import inquiry, session
from phalanx.words import tell
from tests.support.ranks import Member, run_ranks, values

WAIT_S = 60.0


def started(member: Member, *, size: int | None = -1, timeout_s: float = 60.0) -> Any:
    """torch's module, in which this rank is a worker."""
    import phalanx.rpc.torch_api as rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{member.folder}/rpc", rpc_timeout=timeout_s)
    world_size = member.size if size == -1 else size
    rpc.init_rpc(f"worker{member.rank}", rank=member.rank, world_size=world_size, rpc_backend_options=options)
    return rpc


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another process brings about."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def debug_info() -> dict[str, str]:
    from torch.distributed import rpc

    found: dict[str, str] = rpc._rref_context_get_debug_info()  # type: ignore[attr-defined]
    return found


def owned_values() -> int:
    return int(debug_info()["num_owner_rrefs"])


def forks() -> int:
    return int(debug_info()["num_forks"])


def add_rank(rank: int, number: int = 1) -> int:
    return rank + number


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


class OwnError(Exception):
    pass


def fail(text: str) -> None:
    raise OwnError(text)


def sum_of(references: list[Any]) -> int:
    return sum(reference.to_here() for reference in references)


def wait_for_file(path: str) -> None:
    until(Path(path).exists)


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


held: list[Any] = []


def hold(reference: Any) -> int:
    held.append(reference)
    return os.getpid()


def holder_is_killed(member: Member) -> Any:
    rpc = started(member)
    from phalanx.rpc.serving import Incoming
    from phalanx.rpc.torch_api import current
    from phalanx.rpc.torch_api.references import FORKED, Identity, Owned

    if member.rank == 1:
        signal.pause()
    if member.rank == 2:
        until((member.folder / "over").exists)
        rpc.shutdown(graceful=False)
        return None
    reference = rpc.RRef(torch.ones(3))
    pid = rpc.rpc_sync("worker1", hold, args=(reference,))
    rpc.rpc_sync("worker2", hold, args=(reference,))
    before = forks()
    os.kill(pid, signal.SIGKILL)
    until(lambda: forks() == 1)
    rpc.rpc_sync("worker2", let_go)
    until(lambda: owned_values() == 0)
    dead = {each.name: each for each in current.agent().phalanx.known_gone()}["worker1"]
    for number in (1, 2):  # what it sent before is read after its end
        name = Identity(1, number, dead.incarnation)
        references = current.agent().references
        if number == 1:
            references.keep(Owned(name), name, dead.incarnation)
        else:
            references.own(name)
            references._serve(Incoming(dead), (FORKED, name, name))
        assert owned_values() == 0
    (member.folder / "over").touch()
    rpc.shutdown(graceful=False)
    return before


def let_go() -> None:
    held.clear()


def test_a_holder_that_is_killed_frees_what_it_held() -> None:
    first, second, third = run_ranks(holder_is_killed, 3)
    assert values([first, third]) == [2, None]
    assert second.signal == signal.SIGKILL


def owner_is_killed(member: Member) -> str:
    rpc = started(member)
    if member.rank == 1:
        signal.pause()
    reference = rpc.remote("worker1", Counter, args=(1,))
    pid = rpc.rpc_sync("worker1", os.getpid)
    assert reference.rpc_sync().add(1) == 2
    waiting = reference.rpc_async().add(wait_s := 1)
    assert waiting.wait() == 2 + wait_s
    started_call = rpc.rpc_async("worker1", time.sleep, args=(WAIT_S,))
    os.kill(pid, signal.SIGKILL)
    try:
        started_call.wait()
    except RuntimeError as error:
        text = str(error)
    with pytest.raises(RuntimeError, match="worker1"):
        reference.to_here()
    with pytest.raises(RuntimeError, match="worker1"):
        rpc.shutdown()
    return text


def test_who_waits_for_a_killed_worker_is_told_and_shutdown_ends() -> None:
    first, second = run_ranks(owner_is_killed, 2)
    text = values([first])[0]
    assert "worker1 (rank 1, pid" in text
    assert second.signal == signal.SIGKILL


def shutdown_without_one(member: Member, victim: int) -> str:
    rpc = started(member)
    if member.rank == victim:
        (member.folder / "pid").write_text(str(os.getpid()))
        (member.folder / "pid_written").touch()
        signal.pause()
    until((member.folder / "pid_written").exists)
    if member.rank == (victim + 1) % member.size:
        os.kill(int((member.folder / "pid").read_text()), signal.SIGKILL)
    try:
        rpc.shutdown()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_shutdown_ends_on_all_that_are_left_when_a_worker_is_killed(victim: int) -> None:
    outcomes = run_ranks(partial(shutdown_without_one, victim=victim), 3)
    assert outcomes[victim].signal == signal.SIGKILL
    texts = values([outcome for outcome in outcomes if outcome.rank != victim])
    assert any(f"worker{victim}" in text for text in texts)


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


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_a_shutdown_whose_time_is_over_says_for_whom_it_has_waited_and_what_they_do(
    size: int, late: int, tmp_path: Path
) -> None:
    def stays_until_over() -> None:
        while len(os.listdir(tmp_path)) < 2 * (size - 1):  # it calls no Python, whose line would be said
            time.sleep(0.01)

    def body(member: Member) -> Any:
        rpc = started(member)
        if member.rank == late:
            stays_until_over()
            rpc.shutdown(graceful=False)
            return f"rank {late}. worker{late} (rank {late}, pid {os.getpid()} on "
        vars(inquiry)["_LEAST_S"] = WAIT_S / 2  # the late one is asked what it does, and may have to wait for a core
        (tmp_path / f"comes-{member.rank}").touch()
        until(lambda: len(list(tmp_path.glob("comes-*"))) == size - 1)
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            rpc.shutdown(timeout=3)
        assert time.monotonic() - began < WAIT_S
        (tmp_path / f"over-{member.rank}").touch()
        return str(caught.value)

    said = values(run_ranks(body, size))
    for rank in set(range(size)) - {late}:
        assert said[rank].startswith(f"waited 3 s for rpc.shutdown() of {said[late]}")
        assert re.search(r"its main thread is at \S*stays_until_over \(", said[rank]), said[rank]


@pytest.mark.parametrize("size", [2, 3])
def test_a_shutdown_without_a_limit_says_now_and_then_for_whom_it_waits(
    size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(member: Member) -> None:
        rpc = started(member)
        vars(session)["_TELL_S"] = 0.5
        if member.rank:

            def tell_and_note(text: str) -> None:
                tell(text)
                (tmp_path / str(member.rank)).touch()

            vars(session)["tell"] = tell_and_note
        else:
            until(lambda: len(list(tmp_path.iterdir())) == size - 1)
        rpc.shutdown()

    assert values(run_ranks(body, size)) == [None] * size
    said = capfd.readouterr().err
    assert said.count("waiting for rpc.shutdown() of rank 0. worker0 (rank 0, ") >= size - 1
