"""Workers that die, stop, or are cut off while others wait for them."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from phalanx import rpc
from phalanx.errors import PeerLost, WorkerLost
from phalanx.rpc import session
from phalanx.rpc.autograd import engine
from phalanx.rpc.autograd.contexts import COUNT_BITS, LIFE_BITS, contexts, worker_id
from phalanx.rpc.objects import _tables
from phalanx.rpc.parameter_server.service import ATTACH, PUSH
from phalanx.rpc.parameter_server.shard import Settings
from phalanx.rpc.parameter_server.sharing import Piece
from phalanx.rpc.serving import Incoming
from tests.launch_support import Launcher, launcher
from tests.rpc import workers
from tests.support.ports import held_port
from tests.support.ranks import Member, run_ranks
from tests.support.shared_links import read, write
from tests.support.waiting import soon, stop

__all__ = ["launcher"]

PATIENCE_S = 60.0


def with_a_victim(body: Callable[[Member], Any], size: int) -> list[Any]:
    """What the ranks but the last return, which is killed meanwhile and does nothing by itself."""

    def run(member: Member) -> Any:
        member.join()
        rpc.init()
        if member.rank == size - 1:
            time.sleep(2 * PATIENCE_S)
        outcome = body(member)
        rpc.shutdown()
        return outcome

    outcomes = run_ranks(run, size)
    for outcome in outcomes[:-1]:
        assert outcome.error is None, f"rank {outcome.rank}:\n{outcome.traceback}"
    return [outcome.value for outcome in outcomes[:-1]]


def kill_soon(pid: int, after_s: float) -> None:
    """Have a child of this process kill another."""
    if os.fork() == 0:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_who_wait_learn_who_is_gone_and_what_it_was_asked(size: int) -> None:
    victim = f"worker{size - 1}"

    def body(member: Member) -> Any:
        pid = rpc.call(victim, workers.pid)
        future = rpc.start(victim, workers.sleep, PATIENCE_S, timeout_s=2 * PATIENCE_S)
        write(member.folder / f"waits-{member.rank}", b"")
        if member.rank == 0:
            for rank in range(size - 1):
                read(member.folder / f"waits-{rank}")
            kill_soon(pid, 0.2)
        began = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            future.wait()
        lost = caught.value
        assert isinstance(lost, PeerLost)
        assert (lost.worker, lost.rank, lost.pid, lost.asked) == (victim, size - 1, pid, "sleep")
        with pytest.raises(WorkerLost, match="worker"):
            rpc.call(victim, workers.pid)
        return str(lost), time.monotonic() - began < PATIENCE_S

    for text, in_time in with_a_victim(body, size):
        assert in_time
        assert f"{victim} (rank {size - 1}" in text
        assert "sleep" in text
        assert "test_losses.py:" in text


def test_the_middle_of_a_chain_dies() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return None
        pid = rpc.call("worker2", workers.pid)
        kill_soon(pid, 0.3)
        with pytest.raises(WorkerLost) as caught:
            rpc.call("worker1", rpc.call, "worker2", workers.sleep, PATIENCE_S)
        return caught.value.worker

    assert with_a_victim(body, 3)[0] == "worker2"


def begin_a_context(pid: int) -> None:
    with rpc.context():
        rpc.call("worker1", stop_and_ask_another, pid, torch.ones(1, requires_grad=True))


def stop_and_ask_another(pid: int, tensor: torch.Tensor) -> torch.Tensor:
    stop(pid)
    kill_soon(pid, 0.5)
    result: torch.Tensor = rpc.call("worker2", torch.add, tensor, tensor)
    return result


def count_contexts() -> int:
    return len(contexts.all())


def test_a_context_is_forgotten_if_its_creator_dies_while_it_is_told_who_takes_part() -> None:
    """The creator is stopped, so that the one who is asked last is dialling it when it dies."""

    def body(member: Member) -> Any:
        if member.rank:
            read(member.folder / "over")  # in shutdown() it would have a link to the victim already
            return True
        with pytest.raises(WorkerLost):
            rpc.call("worker3", begin_a_context, rpc.call("worker3", workers.pid))
        forgotten = soon(lambda: [rpc.call(rank, count_contexts) for rank in (1, 2)] == [0, 0])
        write(member.folder / "over", b"")
        return forgotten

    assert with_a_victim(body, 4) == [True] * 3


def test_a_worker_that_dies_during_shutdown_holds_nobody() -> None:
    def body(member: Member) -> Any:
        if member.rank == 0:
            kill_soon(rpc.call("worker2", workers.pid), 0.5)
        began = time.monotonic()
        rpc.shutdown(timeout_s=PATIENCE_S)
        return time.monotonic() - began < PATIENCE_S / 2

    assert with_a_victim(body, 3) == [True, True]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_worker_with_whom_nobody_has_talked_dies_during_shutdown_and_holds_nobody(size: int) -> None:
    def run(member: Member) -> Any:
        member.join()
        rpc.init()
        if member.rank == size - 1:
            write(member.folder / "pid", str(os.getpid()).encode())
            time.sleep(2 * PATIENCE_S)
        if member.rank == 0:
            kill_soon(int(read(member.folder / "pid")), 0.3)
        began = time.monotonic()
        rpc.shutdown(timeout_s=PATIENCE_S)
        return time.monotonic() - began < PATIENCE_S / 2

    outcomes = run_ranks(run, size)
    assert [outcome.value for outcome in outcomes[:-1]] == [True] * (size - 1), outcomes[0].traceback


def test_what_a_lost_worker_held_is_freed_though_the_store_does_not_answer() -> None:
    """As when the host that serves the store is cut off together with the worker."""

    def run(member: Member) -> Any:
        port = member.folder / "port"
        if member.rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            write(member.folder / "store", str(os.getpid()).encode())
            write(port, str(store.port).encode())
            read(member.folder / "over")
            return True
        store = TCPStore("127.0.0.1", int(read(port)), is_master=False, wait_for_workers=False)
        session.begin(PrefixStore("rpc", store), f"worker{member.rank}", -1, "127.0.0.1", PATIENCE_S)
        write(member.folder / f"joined-{member.rank}", b"")
        read(member.folder / f"joined-{3 - member.rank}")
        if member.rank == 2:
            time.sleep(2 * PATIENCE_S)
        thing = rpc.make("worker1", workers.Account, 1)
        pid = rpc.call("worker2", workers.pid)
        rpc.call("worker2", workers.keep, thing)
        del thing
        gc.collect()
        assert soon(lambda: [info.holders for info in rpc.objects()] == [("worker2",)])
        stop(int(read(member.folder / "store")))
        try:
            os.kill(pid, signal.SIGKILL)
            freed = soon(lambda: not rpc.objects())
        finally:
            os.kill(int(read(member.folder / "store")), signal.SIGCONT)
        rpc.shutdown()
        write(member.folder / "over", b"")
        return freed

    outcomes = run_ranks(run, 3)
    assert outcomes[1].value is True, outcomes[1].traceback


def test_what_is_read_after_the_end_of_its_sender_leaves_nothing() -> None:
    """What a worker has sent before it died may be handled by a thread that runs after the death was noticed."""

    def body(member: Member) -> Any:
        victim = session.agent().member("worker1")
        thing = rpc.make("worker0", workers.Account, 1)
        kill_soon(rpc.call("worker1", workers.pid), 0.0)
        assert soon(lambda: victim in session.agent().known_gone())
        table = _tables[session.agent()]
        assert soon(lambda: victim.incarnation in table.gone)
        table.note(victim, [thing._number], [])
        assert [info.holders for info in rpc.objects()] == [("worker0",)]
        of_victim = worker_id(victim) << COUNT_BITS | (victim.incarnation & 0xFFFF) << LIFE_BITS
        with engine.running_in((of_victim, None, ())):
            assert contexts.all() == []
        serving = session.agent()._serving._services
        settings = Settings("synchronous", 0, 1, torch.optim.SGD, torch.optim.SGD, {}, {}, "", 1)
        asked = ("model", settings, [Piece(0, 0, 1, False)], [torch.ones(1)], True)
        serving[ATTACH].handler(Incoming(victim), asked)
        assert serving[PUSH].handler(Incoming(victim), ("model", [torch.ones(1)])) is None  # it is no trainer
        return "nothing"

    assert with_a_victim(body, 2) == ["nothing"]


def note(path: str, number: int) -> int:
    with open(path, "a") as file:
        file.write(f"{number}\n")
    time.sleep(0.001)
    return number


@pytest.mark.parametrize("seed", range(4))
def test_no_call_runs_twice_and_none_hangs_when_the_callee_is_killed(seed: int, tmp_path: Path) -> None:
    path = str(tmp_path / "ran")

    def body(member: Member) -> Any:
        if member.rank:
            return None
        kill_soon(rpc.call("worker2", workers.pid), random.Random(seed).uniform(0.01, 0.2))
        done = 0
        for number in range(100_000):
            try:
                assert rpc.call("worker2", note, path, number) == number
                done += 1
            except WorkerLost:
                break
        return done

    done = with_a_victim(body, 3)[0]
    ran = [int(line) for line in Path(path).read_text().splitlines()] if os.path.exists(path) else []
    assert len(ran) == len(set(ran))
    assert done <= len(ran) <= done + 1  # the last one may have run without an answer


SERVER = """
import sys, time
from phalanx import rpc
rpc.init("server", join=sys.argv[1])
time.sleep(600)
"""
CLIENT = """
import os, signal, subprocess, sys, time
import phalanx
from phalanx import rpc
from phalanx.errors import RankError, WorkerLost
def started():
    where = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
    return subprocess.Popen([sys.executable, "server.py", where])
def wait_for(name):
    while True:
        try:
            return rpc.call(name, os.getpid)
        except RankError:
            time.sleep(0.05)
with phalanx.init():
    rpc.init()
    first = started()
    assert wait_for("server") == first.pid
    first.kill()
    first.wait()
    try:
        rpc.call("server", os.getpid)
    except WorkerLost as error:
        print(error.worker, error.pid == first.pid, flush=True)
    second = started()
    print(rpc.call("server", os.getpid, retry=True) == second.pid, flush=True)
    second.kill()
    second.wait()
    rpc.shutdown()
"""


def test_a_worker_that_comes_back_is_reached_by_its_name(launcher: Launcher) -> None:
    launcher.script(SERVER, "server.py")
    ended = launcher.run("-n", "1", "--no-prefix", launcher.script(CLIENT, "client.py"))
    assert ended.code == 0, ended.err
    assert ended.out.split() == [b"server", b"True", b"True"]


JOINED = """
import os, subprocess, sys, time
import torch.distributed as dist
from phalanx import rpc
from phalanx.errors import RankError
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    where = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
    early = subprocess.run([sys.executable, "early.py", where], capture_output=True, text=True)
    print(early.stderr.strip().splitlines()[-1], flush=True)
dist.barrier()
rpc.init()
if dist.get_rank() == 0:
    server = subprocess.Popen([sys.executable, "server.py", where])
    until = time.monotonic() + 120
    while True:
        try:
            print(rpc.call("server", os.getpid) == server.pid, flush=True)
            break
        except RankError:
            assert time.monotonic() < until
            time.sleep(0.05)
    server.kill()
    server.wait()
rpc.shutdown()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_worker_that_is_no_rank_joins_ranks_that_torch_has_brought_together(launcher: Launcher, ranks: int) -> None:
    launcher.script(SERVER, "server.py")
    launcher.script(SERVER.replace("join=sys.argv[1]", "join=sys.argv[1], wait_s=5"), "early.py")
    ended = launcher.run("-n", str(ranks), "--no-prefix", launcher.script(JOINED, "client.py"))
    assert ended.code == 0, ended.err
    early, joined = ended.out.decode().splitlines()
    assert "InitializationError: waited 5 s for all ranks of the job whose store is at 127.0.0.1:" in early
    assert early.endswith(" to call rpc.init()")
    assert joined == "True"


BY_HAND = """
import os, subprocess, sys
import phalanx
with phalanx.init(quiet=True) as world:
    if world.rank == 0:
        where = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
        tried = subprocess.run([sys.executable, "server.py", where], capture_output=True, text=True)
        print(tried.stderr.strip().splitlines()[-1], flush=True)
    world.barrier()
"""


def test_a_store_that_only_ranks_can_use_is_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "script.py").write_text(BY_HAND)
    with held_port() as port:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "script.py"],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **place, "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert f"what listens at 127.0.0.1:{port} is no store of torch's" in said[0]
    assert "start them with phalanx run or torchrun" in said[0]
