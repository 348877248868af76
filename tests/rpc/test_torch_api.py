"""torch.distributed.rpc over Phalanx: programs written for torch, on forked ranks."""

from __future__ import annotations

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

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from tests.rpc.torch_workers import Counter, add_rank, owned_values, started, until, wait_for_file
from tests.support.ranks import Member, on_ranks, run_ranks, values


class OwnError(Exception):
    pass


def fail(text: str) -> None:
    raise OwnError(text)


def sum_of(references: list[Any]) -> int:
    return sum(reference.to_here() for reference in references)


class Unpicklable:
    def __reduce__(self) -> Any:
        return fail, ("arrives",)


def make_lock() -> Any:
    return threading.Lock()


@functions.async_execution  # type: ignore[untyped-decorator]
def later(to: str, number: int) -> Any:
    from torch.distributed import rpc

    return rpc.rpc_async(to, add_rank, args=(number,)).then(lambda done: done.wait() + 100)


def calls_everywhere(rpc: Any, member: Member) -> None:
    for rank in range(member.size):
        name = f"worker{rank}"
        assert rpc.rpc_sync(name, add_rank, args=(rank,), kwargs={"number": 10}) == rank + 10
        assert rpc.rpc_async(rank, torch.add, args=(torch.ones(2), rank)).wait().tolist() == [1.0 + rank] * 2
        assert rpc.remote(rpc.get_worker_info(name), add_rank, args=(rank,)).to_here() == rank + 1
        counter = rpc.remote(name, Counter, args=(rank,))
        counter.rpc_sync().add(1)
        assert counter.rpc_async().add(2).wait() == rank + 3
        assert counter.remote().add(3).to_here() == rank + 6


def errors_of_calls(rpc: Any, to: str, member: Member) -> None:
    for kind in (OwnError, RuntimeError):  # its own type, which torch raises as well
        with pytest.raises(kind, match="no luck") as caught:
            rpc.rpc_sync(to, fail, args=("no luck",))
        assert to in str(caught.value)
    for call, said in (
        ()
        if member.size == 1
        else (  # to itself nothing is sent
            (lambda: rpc.rpc_sync(to, make_lock), "TypeError: cannot pickle '_thread.lock' object"),
            (lambda: rpc.remote(to, make_lock).to_here(), "TypeError: cannot pickle '_thread.lock' object"),
            (lambda: rpc.rpc_sync(to, Unpicklable), "OwnError: arrives"),
            (lambda: rpc.rpc_sync(to, add_rank, args=(Unpicklable(),)), "OwnError: arrives"),
        )
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == said


def slow_calls(rpc: Any, to: str, member: Member) -> None:
    go = member.folder / f"go{member.rank}"  # its own: the call of a rank that is quicker may be over before
    with pytest.raises(RuntimeError, match=r"^RPC ran for more than set timeout \(200 ms\)"):
        rpc.rpc_sync(to, wait_for_file, args=(str(go),), timeout=0.2)
    futures = [rpc.rpc_async(to, wait_for_file, args=(str(go),)), rpc.rpc_async(to, fail, args=("at once",))]
    with pytest.raises(OwnError, match="at once"):  # without waiting for the rest
        torch.futures.wait_all(futures)
    assert not go.exists()
    go.touch()
    futures[0].wait()
    assert rpc.rpc_sync(to, add_rank, args=(1,), timeout=0) == 2


@pytest.mark.parametrize("size", [1, 3])
def test_every_way_of_calling_reaches_every_worker(size: int) -> None:
    def body(member: Member) -> None:
        rpc, to = started(member), f"worker{(member.rank + 1) % member.size}"
        calls_everywhere(rpc, member)
        errors_of_calls(rpc, to, member)
        slow_calls(rpc, to, member)
        assert rpc.rpc_sync(to, later, args=(f"worker{member.rank}", 1)) == 102
        nested = rpc.rpc_async(to, add_rank, args=(1,))
        assert nested.then(lambda done: rpc.rpc_sync(to, add_rank, args=(done.wait(),))).wait() == 3
        rpc.shutdown()

    on_ranks(body, size)


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


def test_references_are_handed_on_and_their_values_go_with_the_last() -> None:
    assert values(run_ranks(references_handed_on, 3)) == [(12, 0), (0, 0), (0, 0)]


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


def test_what_a_call_ran_begins_after_it_in_a_profile_that_begins_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    own = vars(profiler_legacy)["_enable_profiler_legacy"]

    def slow(config: Any) -> None:
        own(config)
        time.sleep(0.2)

    def body(member: Member) -> bool:
        api = started(member)
        with profiler_legacy.profile() as profile:
            api.rpc_sync(f"worker{1 - member.rank}", torch.add, args=(torch.ones(2), 1))
        api.shutdown()
        began = {each.is_remote: each.time_range.start for each in reversed(profile.function_events)}
        return bool(began[True] >= began[False])

    monkeypatch.setattr(profiler_legacy, "_enable_profiler_legacy", slow)
    assert on_ranks(body, 2) == [True, True]
