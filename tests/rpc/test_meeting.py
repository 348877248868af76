"""Ranks that become workers again: after they were, after an attempt that failed, beside a worker that still ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import InitializationError, PhalanxError, WorkerLost
from phalanx.rpc.agent import Agent
from phalanx.rpc.meeting import Meeting
from phalanx.rpc.members import Members
from tests.rpc.workers import add, add_later, count_to, next_of
from tests.support.ranks import Member, on_ranks, run_ranks
from tests.support.waiting import soon

SIZES = [2, 3, 5]
FIRST_OR_LAST = pytest.mark.parametrize("first", [True, False], ids=["rank 0", "the last rank"])


@contextmanager
def no_store() -> Iterator[None]:
    """No rank can become a worker in this process."""

    def fail(*_: Any) -> None:
        raise PhalanxError("the store does not answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Members, "join", fail)
        yield


def works(member: Member) -> Any:
    """Call the next rank, then stop being a worker; returns what the call has returned."""
    assert len(rpc.workers()) == member.size
    value = rpc.call((member.rank + 1) % member.size, add, member.rank, 1)
    rpc.shutdown()
    return value


@FIRST_OR_LAST
@pytest.mark.parametrize("size", SIZES)
def test_one_that_could_not_become_a_worker_meets_the_others_when_it_tries_again(size: int, first: bool) -> None:
    """They wait for it meanwhile."""

    def body(member: Member) -> Any:
        member.join()
        if member.rank == (0 if first else size - 1):
            for _ in range(2):
                with no_store(), pytest.raises(PhalanxError, match="does not answer"):
                    rpc.init()
        rpc.init()
        return works(member)

    assert on_ranks(body, size) == [rank + 1 for rank in range(size)]


@FIRST_OR_LAST
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "is late"])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_have_waited_in_vain_for_one_meet_it_when_all_try_again(size: int, fails: bool, first: bool) -> None:
    def body(member: Member) -> Any:
        member.join()
        rpc.serve("adder", Adder(), ["sum"])
        if member.rank == (0 if first else size - 1):
            if fails:
                with no_store(), pytest.raises(PhalanxError, match="does not answer"):
                    rpc.init()
        else:
            with pytest.raises(InitializationError):
                rpc.init(wait_s=1.0)
        member.meet("again")
        rpc.init()
        served = rpc.service(next_of(member), "adder", Adder).sum(member.rank, 2)
        return works(member), served

    assert on_ranks(body, size) == [(rank + 1, rank + 2) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_one_that_is_slow_is_not_left_alone_in_what_the_others_have_given_up(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, last = Members.join, size - 1

    def body(member: Member) -> Any:
        def join_late(members: Members, *arguments: Any) -> None:
            member.await_said(*[f"in-vain-{rank}" for rank in range(last)])
            join(members, *arguments)

        member.join()
        with monkeypatch.context() as patch:
            if member.rank == last:
                patch.setattr(Members, "join", join_late)
            with pytest.raises(InitializationError, match="given up" if member.rank == last else None):
                rpc.init(wait_s=3.0)
            member.say(f"in-vain-{member.rank}")
        member.meet("again")
        rpc.init()
        return works(member)

    assert on_ranks(body, size) == [rank + 1 for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_one_whose_name_was_taken_meets_the_others_under_another(size: int) -> None:
    def body(member: Member) -> list[str]:
        member.join()
        refused = ""
        try:
            rpc.init("x" if member.rank in (0, size - 1) else None)
        except InitializationError as error:
            refused = str(error)
        if refused:
            assert "is called x already" in refused
            rpc.init("y")
        names = sorted(worker.name for worker in rpc.workers())
        works(member)
        return names

    expected = sorted(["x", "y", *[f"worker{rank}" for rank in range(1, size - 1)]])
    assert on_ranks(body, size) == [expected] * size


@pytest.mark.parametrize("size", [3, 5])
def test_those_that_wait_are_told_that_another_has_given_up(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    join, last = Members.join, size - 1

    def body(member: Member) -> str:
        def join_and_say(members: Members, *arguments: Any) -> None:
            join(members, *arguments)
            member.say(f"joined-{member.rank}")

        monkeypatch.setattr(Members, "join", join_and_say)
        member.join()
        if member.rank == last:
            member.await_said(*[f"told-{rank}" for rank in range(last)])
            return ""
        if member.rank == 1:
            member.await_said(*[f"joined-{rank}" for rank in range(last) if rank != 1])
        with pytest.raises(InitializationError) as told:
            rpc.init(wait_s=0.5 if member.rank == 1 else 300.0)
        member.say(f"told-{member.rank}")
        return str(told.value)

    texts = on_ranks(body, size)
    said = texts[1]
    assert said.startswith(f"waited 0.5 s for rpc.init() of rank {last}.")
    told = f"rpc.init() cannot succeed: rank 1 has given up ({said}). Call it again on all ranks"
    assert texts == [told, said, *[told] * (size - 3), ""]


@pytest.mark.parametrize("part", ["before it has come", "after it has come", "before it gives up"])
@pytest.mark.parametrize("size", [3, 5])
def test_one_that_is_killed_beside_a_key_of_the_meeting_holds_nobody(
    size: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank is. Those that had to wait for it say so; for those that had not it is a worker that is lost."""
    come, last = Meeting.come, size - 1

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def come_and_be_killed(meeting: Meeting, rank: int) -> None:
        come(meeting, rank)
        kill()

    def body(member: Member) -> str:
        def say_and_be_killed(*_: Any) -> None:
            member.say("waited in vain")
            kill()

        member.join("gloo")
        if member.rank == last:
            if part == "before it gives up":
                monkeypatch.setattr(Meeting, "give_up", say_and_be_killed)
            else:
                monkeypatch.setattr(Meeting, "come", kill if "before" in part else come_and_be_killed)
            rpc.init(wait_s=1.0 if "gives up" in part else 300.0)
        if "gives up" in part and member.rank == 1:
            member.await_said("waited in vain")
        try:
            rpc.init(wait_s=5.0 if part == "before it has come" else 300.0)
            rpc.call(last, add, 1, 1)
        except (InitializationError, WorkerLost) as error:
            return type(error).__name__
        return ""

    outcomes = run_ranks(body, size)
    assert outcomes[last].signal == signal.SIGKILL
    expected = "InitializationError" if part == "before it has come" else "WorkerLost"
    assert [outcome.value for outcome in outcomes[:last]] == [expected] * last


@pytest.mark.parametrize("size", SIZES)
def test_a_second_init_changes_nothing(size: int) -> None:
    def body(member: Member) -> Any:
        member.join()
        values = []
        for _ in range(3):
            rpc.init()
            if member.rank == 0:
                with pytest.raises(InitializationError, match="called twice"):
                    rpc.init()
            values.append(works(member))
        return values

    assert on_ranks(body, size) == [[rank + 1] * 3 for rank in range(size)]


@pytest.mark.parametrize("launched", [True, False])
def test_init_without_a_group_joins_the_launchers_ranks(launched: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent(
            """
            import torch
            from phalanx import rpc
            for _ in range(2):
                rpc.init()
                print(*(worker.name for worker in rpc.workers()), flush=True)
                rpc.shutdown()
                assert not torch.distributed.is_initialized()
            """
        )
    )
    command = [sys.executable, *(["-m", "phalanx", "run", "-q", "-n", "2"] if launched else []), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.partition("] ")[2] or line for line in done.stdout.splitlines()]
    assert lines == ["worker0 worker1"] * 4 if launched else ["worker0"] * 2


WORLDS = """
    import sys, time
    import phalanx
    from phalanx import rpc

    for turn in range(3):
        with phalanx.init() as world:
            if world.rank == 0:
                time.sleep(0.5)  # the others are there before it
            rpc.init(f"{world.rank}")
            assert len(rpc.workers()) == world.world_size, rpc.workers()
            rpc.shutdown()
        rpc.init()
        assert len(rpc.workers()) == world.world_size, rpc.workers()
        rpc.shutdown()
"""


@pytest.mark.parametrize("size", SIZES)
def test_ranks_meet_again_with_and_without_a_world_of_their_own(size: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(WORLDS))
    command = [sys.executable, "-m", "phalanx", "run", "-n", str(size), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


SERVER = """
    import sys
    from phalanx import rpc

    print("comes", flush=True)
    rpc.init("server", join=sys.argv[1])
    print("joined", flush=True)
    sys.stdin.read()
"""
IN_VAIN_FIRST = """
    import os, subprocess, sys, time
    import phalanx
    from phalanx import rpc
    from phalanx.errors import InitializationError

    with phalanx.init() as world:
        late = world.rank == world.world_size - 1
        if world.rank == 0:
            where = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
            server = subprocess.Popen(
                [sys.executable, sys.argv[1], where], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert server.stdout.readline() == b"comes\\n"
        world.barrier()
        try:
            if not late:
                rpc.init(wait_s=3.0)
        except InitializationError:
            pass
        world.barrier()
        rpc.init()
        if world.rank == 0:
            assert server.stdout.readline() == b"joined\\n"
            assert rpc.call("server", os.getpid) == server.pid
        rpc.shutdown()
        if world.rank == 0:
            server.stdin.close()
            assert server.wait() == 0
"""


@pytest.mark.parametrize("size", SIZES)
def test_a_worker_that_is_no_rank_is_not_left_alone_in_what_the_ranks_have_given_up(size: int, tmp_path: Path) -> None:
    """It comes while they wait for one of them."""
    (tmp_path / "server.py").write_text(dedent(SERVER))
    script = tmp_path / "script.py"
    script.write_text(dedent(IN_VAIN_FIRST))
    command = [sys.executable, "-m", "phalanx", "run", "-n", str(size), str(script), str(tmp_path / "server.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


class Adder:
    def sum(self, one: int, other: int) -> int:
        return one + other


@pytest.mark.parametrize("size", SIZES)
def test_a_new_worker_loses_nothing_to_the_one_before_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread is shutting that one down, and a third tries to."""
    close = Agent.close
    closing, go_on = threading.Event(), threading.Event()

    def close_late(agent: Agent) -> None:
        if not closing.is_set():
            closing.set()
            go_on.wait(60.0)
        close(agent)

    def body(member: Member) -> tuple[Any, ...]:
        member.join()
        rpc.init()
        assert rpc.call(next_of(member), add_later, 1, 1) == 2
        member.meet("called")
        with monkeypatch.context() as patch:
            patch.setattr(Agent, "close", close_late)
            leaving = [threading.Thread(target=rpc.shutdown) for _ in range(2)]
            for thread in leaving:
                thread.start()
            assert closing.wait(60.0)
            rpc.init()
            rpc.serve("adder", Adder(), ["sum"])
            member.meet("begun")
            stream = rpc.call(next_of(member), count_to, 1000)
            assert next(stream) == 0
            go_on.set()
            for thread in leaving:
                thread.join()
        member.meet("left")
        assert list(stream) == list(range(1, 1000))
        with rpc.context() as number:
            weight = torch.ones(2, requires_grad=True)
            rpc.backward(number, [rpc.call(next_of(member), add, weight, 1).sum()])
            gradient = rpc.get_gradients(number)[weight]
        served = rpc.service(next_of(member), "adder", Adder).sum(member.rank, 2)
        later = rpc.call(next_of(member), add_later, member.rank, 3)
        return works(member), served, later, gradient.tolist()

    assert on_ranks(body, size) == [(rank + 1, rank + 2, rank + 3, [1.0, 1.0]) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_a_callback_may_make_a_new_worker_while_the_old_one_ends(size: int) -> None:
    """The end of the old one waits for its callbacks."""

    def body(member: Member) -> Any:
        member.join()
        rpc.init()
        begun, ending = threading.Event(), threading.Event()

        def again(*_: object) -> None:
            if not begun.is_set():
                begun.set()
                ending.wait(60.0)
                assert soon(lambda: _closing(watch))
                rpc.init()

        watch = rpc.watch(again)
        assert begun.wait(60.0)
        ending.set()
        rpc.shutdown()
        return works(member)

    assert on_ranks(body, size) == [rank + 1 for rank in range(size)]


def _closing(watch: rpc.Watch) -> bool:
    """Whether its agent has come to the end of its watches."""
    return watch._stopped


def test_what_is_served_before_a_failed_init_is_served_after_the_next() -> None:
    def body(member: Member) -> Any:
        member.join()
        rpc.serve("adder", Adder(), ["sum"])
        with no_store(), pytest.raises(PhalanxError):
            rpc.init()
        rpc.init()
        value = rpc.service(next_of(member), "adder", Adder).sum(member.rank, 2)
        rpc.shutdown()
        return value

    assert on_ranks(body, 3) == [2, 3, 4]
