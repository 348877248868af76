"""torch.distributed.rpc over Phalanx: programs written for torch, on forked ranks, and when a worker is killed."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.distributed.rpc import functions

from phalanx.rpc import inquiry, session
from phalanx.rpc.torch_api import agent
from tests.rpc.workers import add, fail, keep, let_go, open_gate, pid, torch_started, wait_for_gate
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.waiting import soon


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


class Unpicklable:
    def __reduce__(self) -> Any:
        return fail, ("arrives",)


def debug_info(name: str) -> int:
    return int(torch.distributed.rpc._rref_context_get_debug_info()[name])  # type: ignore[attr-defined]


def owned_values() -> int:
    return debug_info("num_owner_rrefs")


def sum_of(references: list[Any]) -> int:
    return sum(reference.to_here() for reference in references)


def make_lock() -> Any:
    return threading.Lock()


@functions.async_execution  # type: ignore[untyped-decorator]
def later(to: str, number: int) -> Any:
    from torch.distributed import rpc

    return rpc.rpc_async(to, add, args=(number, 1)).then(lambda done: done.wait() + 100)


def calls_everywhere(rpc: Any, member: Member) -> None:
    for rank in range(member.size):
        name = f"worker{rank}"
        assert rpc.rpc_sync(name, add, args=(rank,), kwargs={"b": 10}) == rank + 10
        assert rpc.rpc_async(rank, torch.add, args=(torch.ones(2), rank)).wait().tolist() == [1.0 + rank] * 2
        assert rpc.remote(rpc.get_worker_info(name), add, args=(rank, 1)).to_here() == rank + 1
        counter = rpc.remote(name, Counter, args=(rank,))
        counter.rpc_sync().add(1)
        assert counter.rpc_async().add(2).wait() == rank + 3
        assert counter.remote().add(3).to_here() == rank + 6


def errors_of_calls(rpc: Any, to: str, member: Member) -> None:
    for kind in (KeyError, RuntimeError):  # its own type, which torch raises as well
        with pytest.raises(kind, match="no luck") as caught:
            rpc.rpc_sync(to, fail, args=("no luck",))
        assert to in str(caught.value)
    if member.size == 1:
        return  # to itself nothing is sent
    for call, said in (
        (lambda: rpc.rpc_sync(to, make_lock), "TypeError: cannot pickle '_thread.lock' object"),
        (lambda: rpc.remote(to, make_lock).to_here(), "TypeError: cannot pickle '_thread.lock' object"),
        (lambda: rpc.rpc_sync(to, Unpicklable), "KeyError: 'arrives'"),
        (lambda: rpc.rpc_sync(to, add, args=(Unpicklable(), 1)), "KeyError: 'arrives'"),
    ):
        with pytest.raises(RuntimeError) as failed:
            call()
        assert str(failed.value) == said


def slow_calls(rpc: Any, member: Member) -> None:
    with pytest.raises(RuntimeError, match=r"^RPC ran for more than set timeout \(200 ms\)"):
        rpc.rpc_sync("worker1", wait_for_gate, timeout=0.2)
    futures = [rpc.rpc_async("worker1", wait_for_gate), rpc.rpc_async("worker1", fail, args=("at once",))]
    with pytest.raises(KeyError, match="at once"):  # without waiting for the rest
        torch.futures.wait_all(futures)
    assert not futures[0].done()
    rpc.rpc_sync("worker1", open_gate, timeout=0)
    futures[0].wait()


@pytest.mark.parametrize("size", [1, 3])
def test_every_way_of_calling_reaches_every_worker(size: int) -> None:
    def body(member: Member) -> None:
        rpc, to = torch_started(member), f"worker{(member.rank + 1) % member.size}"
        calls_everywhere(rpc, member)
        errors_of_calls(rpc, to, member)
        if size > 1 and member.rank == 0:
            slow_calls(rpc, member)
        if size == 1:  # optimizers that torch would compile, which then asked its own C++ for the gradients
            assert not importlib.import_module("torch.distributed.optim.optimizer").functional_optim_map
        assert rpc.rpc_sync(to, later, args=(f"worker{member.rank}", 1)) == 102
        nested = rpc.rpc_async(to, add, args=(1, 1))
        assert nested.then(lambda done: rpc.rpc_sync(to, add, args=(done.wait(), 1))).wait() == 3
        rpc.shutdown()

    on_ranks(body, size)


def test_references_are_handed_on_and_their_values_go_with_the_last() -> None:
    def body(member: Member) -> None:
        rpc = torch_started(member)
        if member.rank == 0:
            references = [rpc.remote(f"worker{rank}", add, args=(rank, 1)) for rank in range(member.size)]
            second = rpc.remote(f"worker{member.size - 1}", sum_of, args=(references,))
            handed = rpc.rpc_async("worker1", sum_of, args=([second, *references],))
            del references, second
            assert handed.wait() == 12
            del handed
        rpc.api._barrier([f"worker{rank}" for rank in range(member.size)])
        assert soon(lambda: owned_values() == 0)
        rpc.shutdown()

    on_ranks(body, 3)


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


def test_script_for_torchs_rpc_runs_over_phalanx_unmodified(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "phalanx", "run", "-n", "3", "--replace", "rpc", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    for rank in range(3):
        assert f"{rank} {2.0 * (1 + rank)} phalanx.rpc.torch_api" in ran.stdout


def test_killed_holder_frees_what_it_held_and_its_callers_are_told() -> None:
    def body(member: Member) -> None:
        rpc = torch_started(member)
        if member.rank == 1:
            signal.pause()
        if member.rank == 2:
            member.await_said("over")
            rpc.shutdown(graceful=False)
            return
        held, there = rpc.RRef(torch.ones(3)), rpc.remote("worker1", Counter, args=(1,))
        assert there.rpc_sync().add(1) == 2
        for rank in (1, 2):
            rpc.rpc_sync(rank, keep, args=(held,))
        assert debug_info("num_forks") >= 2
        waiting = rpc.rpc_async("worker1", wait_for_gate)
        os.kill(rpc.rpc_sync("worker1", pid), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"worker1 \(rank 1, pid"):
            waiting.wait()
        with pytest.raises(RuntimeError, match="worker1"):
            there.to_here()
        rpc.rpc_sync("worker2", let_go)
        del there
        assert soon(lambda: owned_values() == 0)
        member.say("over")
        rpc.shutdown(graceful=False)

    first, second, third = run_ranks(body, 3)
    values([first, third])
    assert second.signal == signal.SIGKILL


@pytest.mark.parametrize("victim", [0, 1])
def test_shutdown_ends_and_names_a_killed_worker(victim: int) -> None:
    def body(member: Member) -> str:
        rpc = torch_started(member)
        told: list[str] = []
        vars(agent)["tell"] = told.append
        member.meet("started")
        if member.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            rpc.shutdown()
        except RuntimeError as error:
            told.append(str(error))
        return " ".join(told)

    outcomes = run_ranks(body, 3)
    assert outcomes.pop(victim).signal == signal.SIGKILL
    assert any(f"worker{victim}" in text for text in values(outcomes))


def test_shutdown_says_for_whom_it_waits_and_when_its_time_is_over() -> None:
    def stays_until_over(folder: Path) -> None:
        while len(list(folder.glob("over-*"))) < 2:
            time.sleep(0.01)

    def body(member: Member) -> Any:
        rpc = torch_started(member)
        vars(inquiry)["_LEAST_S"] = 30.0  # the late one is asked what it does, and may have to wait for a core
        if member.rank == 0:
            stays_until_over(member.folder)
            rpc.shutdown(graceful=False)
            return f"rank 0. worker0 (rank 0, pid {os.getpid()} on "
        told: list[str] = []
        vars(session).update(_TELL_S=0.2, tell=told.append)
        member.say(f"comes-{member.rank}")
        member.await_said("comes-1", "comes-2")
        with pytest.raises(RuntimeError) as caught:
            rpc.shutdown(timeout=1)
        member.say(f"over-{member.rank}")
        return str(caught.value), told

    late, *others = on_ranks(body, 3)
    for error, told in others:
        assert error.startswith(f"waited 1 s for rpc.shutdown() of {late}")
        assert re.search(r"its main thread is at \S*stays_until_over \(", error), error
        assert told[0].startswith(f"waiting for rpc.shutdown() of {late}")


def test_what_a_call_ran_begins_after_it_in_a_profile_that_begins_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    own = vars(profiler_legacy)["_enable_profiler_legacy"]

    def slow(config: Any) -> None:
        own(config)
        time.sleep(0.2)

    def body(member: Member) -> bool:
        api = torch_started(member)
        with profiler_legacy.profile() as profile:
            api.rpc_sync(f"worker{1 - member.rank}", torch.add, args=(torch.ones(2), 1))
        api.shutdown()
        began = {each.is_remote: each.time_range.start for each in reversed(profile.function_events)}
        return bool(began[True] >= began[False])

    monkeypatch.setattr(profiler_legacy, "_enable_profiler_legacy", slow)
    assert on_ranks(body, 2) == [True, True]
