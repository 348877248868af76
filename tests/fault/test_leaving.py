"""Ranks that go: in order, by an exception, by exec. What the others learn, and what goes on without them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.waiting import await_stop

from phalanx.c10d import base
from phalanx.errors import CollectiveMismatch, PeerLost, PhalanxError
from phalanx.system.host import machine_name


def until(path: Path) -> None:
    """Wait for another rank's file."""
    while not path.exists():
        time.sleep(0.005)


# -- a rank that has left in order -------------------------------------------------------------------------------------


def test_a_master_receives_from_the_workers_that_are_left() -> None:
    """Rank 1 sends and leaves; rank 2 sends long after that. Then nobody is left who could send."""

    def body(member: Member) -> list[int]:
        member.join()
        gone = member.folder / "gone"
        tensor = torch.tensor([member.rank])
        if member.rank == 1:
            dist.send(tensor, 0)
            dist.destroy_process_group()
            gone.touch()
            return []
        if member.rank == 2:
            until(gone)
            time.sleep(0.3)
            dist.send(tensor, 0)
            dist.destroy_process_group()
            return []
        received = []
        for _ in range(2):
            dist.recv(tensor)
            received.append(int(tensor))
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"all other ranks of the group left .* recv from any rank.*test_leaving"):
            dist.recv(tensor)
        assert time.monotonic() - started < 20  # not the timeout
        return received

    assert on_ranks(body, 3)[0] == [1, 2]


@pytest.mark.parametrize("size", [2, 3])
def test_only_a_message_of_the_rank_that_left_fails(size: int) -> None:
    """A receive from it, and sends to it, small and large; the others of the group go on as before."""

    def body(member: Member) -> bool:
        member.join()
        last, gone = size - 1, member.folder / "gone"
        tensor = torch.zeros(4)
        if member.rank == last:
            dist.send(torch.full((4,), 7.0), 0)
            dist.destroy_process_group()
            (part := member.folder / "part").write_text(str(os.getpid()))
            part.rename(gone)
            return True
        until(gone)
        pid, host = int(gone.read_text()), machine_name()
        if member.rank == 0:
            dist.recv(tensor, last)  # what it sent before it left is there
            assert tensor.tolist() == [7.0] * 4
        text = rf"rank {last} of the group \(pid {pid} on {host}\) left the group in order"
        with pytest.raises(PeerLost, match=text) as caught:
            dist.recv(tensor, last)
        assert (caught.value.group_rank, caught.value.pid, caught.value.host) == (last, pid, host)
        for numel in (4, 3_000_000):
            with pytest.raises(PeerLost, match="send to"):
                dist.send(torch.ones(numel), last)
        work = dist.irecv(tensor, last)
        assert work is not None
        with pytest.raises(RuntimeError, match="left the group in order"):
            work.get_future().wait()
        if size > 2:  # the group is whole
            peer = 1 - member.rank
            receive = dist.irecv(tensor, peer)
            dist.send(torch.full((4,), 3.0), peer)
            assert receive is not None
            receive.wait()
            assert tensor.tolist() == [3.0] * 4
        return True

    assert on_ranks(body, size) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_collective_without_the_rank_that_left_says_so(size: int) -> None:
    def body(member: Member) -> str:
        member.join()
        dist.barrier()
        if member.rank == size - 1:
            dist.destroy_process_group()
            (member.folder / "gone").touch()
            return ""
        until(member.folder / "gone")
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(3))
        return str(caught.value)

    for text in on_ranks(body, size)[:-1]:
        assert f"rank {size - 1} of the group" in text
        assert "has left the group in order" in text
        assert "all_reduce(float32[3], sum) at" in text


SCRIPT = """
import os, sys, threading, time
import torch, torch.distributed as dist

rank = int(sys.argv[1])
dist.init_process_group("phalanx", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
dist.barrier()
"""


def run_pair(tmp_path: Path, first: str, second: str) -> list[subprocess.CompletedProcess[str]]:
    """Two processes, as started by hand; each joins, and then runs its own lines."""
    (tmp_path / "store").unlink(missing_ok=True)
    processes = []
    for rank, body in enumerate((first, second)):
        (tmp_path / f"rank{rank}.py").write_text(SCRIPT + body)
        command = [sys.executable, f"rank{rank}.py", str(rank)]
        processes.append(
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    ends = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        ends.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return ends


RECEIVES = """
try:
    dist.recv(torch.zeros(1))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_script_that_comes_to_its_end_has_left(tmp_path: Path) -> None:
    waits, _ = run_pair(tmp_path, RECEIVES, "")
    assert "PeerLost all other ranks of the group left the group in order" in waits.stdout, waits.stderr


def test_a_script_that_exits_with_a_code_has_failed(tmp_path: Path) -> None:
    waits, exits = run_pair(tmp_path, RECEIVES, "sys.exit(3)")
    assert exits.returncode == 3
    assert "PeerLost rank 1 of the group" in waits.stdout, waits.stderr
    assert "has failed (exit code 3) while rank 0 was in recv from any rank" in waits.stdout


def test_a_script_that_has_caught_an_exit_and_comes_to_its_end_has_left(tmp_path: Path) -> None:
    caught = "try:\n    sys.exit(2)\nexcept SystemExit as error:\n    kept = error\n"
    waits, ends = run_pair(tmp_path, RECEIVES, caught)
    assert ends.returncode == 0
    assert "PeerLost all other ranks of the group left the group in order" in waits.stdout, waits.stderr


# The handler stands for all that may keep a process alive long after its script has failed.
RAISES = """
import atexit
atexit.register(lambda: (print("ends", flush=True), sys.stdin, time.sleep(600)))
raise ValueError("this batch is empty")
"""


def test_an_exception_is_told_long_before_its_process_ends(tmp_path: Path) -> None:
    (tmp_path / "rank0.py").write_text(SCRIPT + "dist.all_reduce(torch.ones(1))")
    (tmp_path / "rank1.py").write_text(SCRIPT + RAISES)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    waits, raises = (
        subprocess.Popen([sys.executable, f"rank{rank}.py", str(rank)], cwd=tmp_path, **streams)  # type: ignore[call-overload]
        for rank in range(2)
    )
    try:
        _, err = waits.communicate(timeout=300)
        assert raises.poll() is None
    finally:
        raises.kill()
        raises.communicate()
    assert "has failed (ValueError: this batch is empty at " in err
    assert "rank1.py:" in err


CIRCLE = """
try:
    raise ValueError("this batch is empty")
except ValueError as error:
    raise error from error
"""


def test_an_exception_that_is_its_own_cause_is_told_like_any_other(tmp_path: Path) -> None:
    waits, raises = run_pair(tmp_path, RECEIVES, CIRCLE)
    assert "has failed (ValueError: this batch is empty at " in waits.stdout, waits.stderr
    assert "ValueError: this batch is empty" in raises.stderr


GOES_ON = """
try:
    raise ValueError("caught")
except ValueError as error:
    sys.excepthook(type(error), error, error.__traceback__)  # as a program prints what it has caught
time.sleep(0.3)
"""


def test_an_exception_that_is_only_printed_ends_nothing(tmp_path: Path) -> None:
    together = "tensor = torch.ones(1); dist.all_reduce(tensor); print(tensor.item())"
    for end in run_pair(tmp_path, together, GOES_ON + together):
        assert (end.returncode, end.stdout) == (0, "2.0\n"), end.stderr


@pytest.mark.parametrize(("fails", "words"), [(False, "left the group in order"), (True, "ValueError: in a worker")])
def test_a_forked_worker_of_multiprocessing_tells_how_it_ends(fails: bool, words: str) -> None:
    def worker(member: Member) -> None:
        member.join()
        if fails:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the traceback is expected
            raise ValueError("in a worker")

    def body(member: Member) -> str:
        if member.rank:
            process = multiprocessing.get_context("fork").Process(target=worker, args=(member,))
            process.start()
            process.join()
            return ""
        member.join()
        with pytest.raises(PeerLost) as caught:
            dist.recv(torch.zeros(1))
        return str(caught.value)

    assert words in on_ranks(body, 2)[0]


# -- a rank that another program replaces ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_execs_is_named(size: int) -> None:
    def body(member: Member) -> str:
        member.join()
        dist.barrier()
        if member.rank == size - 1:
            (member.folder / "pid").write_text(str(os.getpid()))
            os.execvp("sleep", ["sleep", "600"])
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1))
        except PeerLost as error:
            assert time.monotonic() - started < 40  # not the timeout
            return str(error)
        finally:
            if member.rank == 0:
                os.kill(int((member.folder / "pid").read_text()), signal.SIGKILL)
        return "no error"

    for outcome in run_ranks(body, size)[:-1]:
        assert outcome.error is None, outcome.traceback
        assert "has replaced itself by another program (exec)" in outcome.value


# -- the last call -----------------------------------------------------------------------------------------------------

LAST_CALLS_S = 100.0  # a rank that leaves would wait a second for the others, and a busy machine holds them up longer


def wait_long_for_last_calls() -> None:
    vars(base)["LAST_CALLS_S"] = LAST_CALLS_S


@pytest.mark.parametrize("size", [2, 3])
def test_a_mismatch_in_the_last_call_is_raised_when_the_group_is_destroyed(size: int) -> None:
    """The root of a broadcast waits for nobody, and calls nothing more."""

    def body(member: Member) -> str:
        member.join()
        wait_long_for_last_calls()
        if member.rank:
            time.sleep(0.2)
        with pytest.raises(CollectiveMismatch) as caught:
            dist.broadcast(torch.ones(4 if member.rank else 5), 0)
            dist.destroy_process_group()
        dist.destroy_process_group()  # nothing is left to tell
        return str(caught.value)

    for text in on_ranks(body, size):
        assert "rank 0: broadcast(float32[5], src=0) at" in text
        assert "broadcast(float32[4], src=0) at" in text


def test_a_rank_that_leaves_without_the_last_call_is_named() -> None:
    def body(member: Member) -> str:
        member.join()
        wait_long_for_last_calls()
        if member.rank:
            dist.destroy_process_group()
            return ""
        dist.broadcast(torch.ones(4), 0)
        with pytest.raises(PeerLost) as caught:
            dist.destroy_process_group()
        return str(caught.value)

    text = on_ranks(body, 2)[0]
    assert "rank 1 of the group" in text
    assert "has left the group in order" in text
    assert "broadcast(float32[4], src=0) at" in text


def test_a_program_that_ends_right_after_a_mismatch_prints_it(tmp_path: Path) -> None:
    patient = f"from phalanx.c10d import leaving; leaving.LAST_CALLS_S = {LAST_CALLS_S}\n"
    calls = [f"{patient}dist.broadcast(torch.ones({count}), 0)" for count in (5, 4)]
    root, reader = run_pair(tmp_path, *calls)
    assert root.returncode == 0
    assert "CollectiveMismatch: the ranks of a group called different operations" in root.stderr
    assert reader.returncode == 1
    assert "CollectiveMismatch" in reader.stderr


@pytest.mark.parametrize("how", ["killed", "stopped", "late"])
def test_destroying_a_group_does_not_wait_for_a_rank_that_does_not_come(how: str) -> None:
    def body(member: Member) -> float:
        member.join()
        dist.barrier()
        done = member.folder / "done"
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        pid = int(pids[1].item())
        if member.rank == 1:
            if how != "late":
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            until(done)
            dist.broadcast(torch.ones(1), 0)
            return 0.0
        if how == "stopped":
            await_stop(pid)  # else it may stop when it has been told to go on
        dist.broadcast(torch.ones(1), 0)
        started = time.monotonic()
        dist.destroy_process_group()
        took_s = time.monotonic() - started
        done.touch()
        if how == "stopped":
            os.kill(pid, signal.SIGCONT)
        return took_s

    outcomes = run_ranks(body, 2)
    assert values(outcomes[:1])[0] < 20
    if how != "killed":
        values(outcomes)


def test_an_error_on_its_way_out_is_not_replaced() -> None:
    def body(member: Member) -> bool:
        member.join()
        with pytest.raises(KeyError):
            try:
                if member.rank == 0:
                    dist.broadcast(torch.ones(4), 0)
                raise KeyError("the script's own")
            finally:
                dist.destroy_process_group()
        return True

    assert on_ranks(body, 2) == [True, True]


def test_a_group_that_told_its_error_tells_nothing_more() -> None:
    def body(member: Member) -> bool:
        member.join()
        with pytest.raises(PhalanxError):
            dist.all_reduce(torch.ones(4 + member.rank))
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 2) == [True, True]
