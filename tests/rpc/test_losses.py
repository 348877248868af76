"""Workers that die, stop, or are cut off while others wait for them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from phalanx import rpc
from phalanx.rpc import session
from tests.launch_support import Launcher, launcher
from tests.rpc import workers
from tests.support.ports import held_port
from tests.support.ranks import Member, run_ranks
from tests.support.shared_links import read, write
from tests.support.waiting import soon, stop

__all__ = ["launcher"]

PATIENCE_S = 60.0


def kill_soon(pid: int, after_s: float) -> None:
    """Have a child of this process kill another."""
    if os.fork() == 0:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)


def test_a_worker_with_whom_nobody_has_talked_dies_during_shutdown_and_holds_nobody() -> None:
    size = 3

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


def test_a_worker_that_is_no_rank_joins_ranks_that_torch_has_brought_together(launcher: Launcher) -> None:
    launcher.script(SERVER, "server.py")
    launcher.script(SERVER.replace("join=sys.argv[1]", "join=sys.argv[1], wait_s=0.5"), "early.py")
    ended = launcher.run("-n", "2", "--no-prefix", launcher.script(JOINED, "client.py"))
    assert ended.code == 0, ended.err
    early, joined = ended.out.decode().splitlines()
    assert "InitializationError: waited 0.5 s for all ranks of the job whose store is at 127.0.0.1:" in early
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
