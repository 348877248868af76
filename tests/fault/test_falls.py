"""Ranks that fall under ``phalanx run``: one job, in which another thing happens in every attempt."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.ports import held_port
from tests.support.remote import RemoteLauncher, reachable_hosts, remote
from tests.support.waiting import soon, stop

from phalanx.system.host import machine_name

__all__ = ["launcher", "remote"]  # fixtures

PATIENCE_S = 200.0
SCRIPT = """\
import json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
import phalanx
from phalanx.errors import InitializationError, PeerLost

folder, first, ports = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
attempt = str(first + int(os.environ["PHALANX_ATTEMPT"]))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may ask a rank to end before it has raised
phalanx.membership.registrar.LAUNCHER_S = 60.0  # however long a busy machine takes to say it

def put(name, what=""):
    part = folder / f"part-{attempt}-{rank}"
    part.write_text(json.dumps(what))
    part.rename(folder / f"{attempt}-{name}-{rank}")

def wait_for(pattern, count=1):
    while len([*folder.glob(f"{attempt}-{pattern}")]) < count:
        time.sleep(0.01)

def ends_before_it_has_joined():
    if rank == 2:
        sys.exit(0)
    try:
        phalanx.init(timeout_s=600)
    except InitializationError as error:
        put("told", [str(error), error.rank])
        raise

def is_killed():
    world, x = phalanx.init(timeout_s=60), torch.ones(4)
    for _ in range(2):
        world.all_reduce(x)
    put("pid", os.getpid())
    wait_for("pid-*", size)  # none is in the call before any more
    if rank == 1:
        signal.pause()
    try:
        world.all_reduce(x)
    except PeerLost as error:
        names = ("group_rank", "rank", "pid", "host", "signal", "group", "sequence", "last_operation", "last_line")
        put("told", {name: getattr(error, name) for name in (*names, "elapsed_s")})
    wait_for("go")
    os._exit(1)

def sums_at_ports_of_its_own():
    got = []
    put("no-handler")
    wait_for("sent")
    time.sleep(0.3)  # a signal that is passed on at once comes now, and ends it
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    while not got:
        time.sleep(0.01)
    totals = []

    def add():
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        totals.append(total.item())

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=size)
    add()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = ports[1]
    dist.init_process_group("gloo")
    add()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = ports[2]
    phalanx.init(timeout_s=60)
    add()
    phalanx.close()
    put("totals", totals)

(ends_before_it_has_joined, is_killed, sums_at_ports_of_its_own)[int(attempt)]()
"""
LAST = SCRIPT.splitlines().index("        world.all_reduce(x)") + 1
# A place as containers make them: without a home, an input or a language, with a small stack, and an odd name.
ODD = os.fsdecode(b"caf\xe9.py")
STRANGE = "unset HOME; export LC_ALL=C PYTHONUTF8=0; ulimit -c 0; ulimit -l 0; ulimit -s 512; exec <&-"
SAYS_SOON = "from phalanx.launch import conclusion\nconclusion._SAID_AFTER_S = 0.3\n"


def await_files(folder: Path, *names: str) -> None:
    assert soon(lambda: all((folder / name).exists() for name in names), PATIENCE_S), names


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def check_killed(folder: Path, host: str) -> None:
    """The survivors' errors have everything that is known of rank 1."""
    for rank in (0, 2):
        told = read(folder, f"1-told-{rank}")
        assert 0 < told.pop("elapsed_s") < 60
        assert re.match(r"all_reduce #2 \(float32, 16 B, sum\) at ", told.pop("last_operation"))
        assert told.pop("last_line").endswith(f".py:{LAST}")
        pid = read(folder, "1-pid-1")
        where = {"group_rank": 1, "rank": 1, "pid": pid, "host": host, "signal": 9, "group": "0", "sequence": 3}
        assert told == where


def test_ranks_that_fall_are_named_in_every_attempt(launcher: Launcher, tmp_path: Path) -> None:
    """The process that starts the ranks is stopped when one is killed; a signal comes before ranks have a handler."""
    told = tmp_path / "told"
    told.mkdir()
    (tmp_path / "sitecustomize.py").write_text(SAYS_SOON)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\n{STRANGE}\nexec {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(0o755)
    launcher.python = str(program)
    with contextlib.ExitStack() as stack:
        ports = [str(stack.enter_context(held_port())) for _ in range(3)]
        err = stack.enter_context(open(tmp_path / "err", "w+b"))
        arguments = ["-n", "3", "-q", "--restarts", "2", "--grace", "250", launcher.script(SCRIPT, ODD), str(told), "0"]
        own = {"PYTHONPATH": str(tmp_path)}
        job = launcher.start(*arguments, *ports, stderr=err, environment=own)

        def said() -> str:
            return (tmp_path / "err").read_bytes().decode(errors="backslashreplace")

        await_files(told, *(f"1-pid-{rank}" for rank in range(3)))
        agent, victim = job.named("phalanx-agent"), read(told, "1-pid-1")
        stop(agent)
        os.kill(victim, signal.SIGKILL)
        await_files(told, "1-told-0", "1-told-2")
        waits = (
            rf"phalanx: rank 1 on {machine_name()} failed: ended by signal 9 \(SIGKILL\); "
            r"ranks 0, 2 have \d+ s more to end before they are killed \(--grace\)"
        )
        assert soon(lambda: re.search(waits, said()) is not None, PATIENCE_S), said()
        (told / "1-go").touch()
        await_files(told, *(f"2-no-handler-{rank}" for rank in range(3)))
        job.process.send_signal(signal.SIGUSR1)
        (told / "2-sent").touch()
        outcome = job.finish()
    assert (outcome.code, outcome.out) == (0, b""), said()
    for rank in (0, 1):
        text, named = read(told, f"0-told-{rank}")
        assert ("rank 2 has ended" in text, named) == (True, 2), text
    assert "DistStoreError" not in said()
    check_killed(told, machine_name())
    assert "phalanx: rank 1 of 3 failed\n" in said()
    assert f"pid {victim}, " in said()
    assert said().count("ended by signal 9 (SIGKILL)") == 2
    assert [read(told, f"2-totals-{rank}") for rank in range(3)] == [[6.0] * 3] * 3


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize("first", [1, pytest.param(0, marks=pytest.mark.long)])
def test_ranks_that_fall_are_named_with_their_host(remote: RemoteLauncher, tmp_path: Path, first: int) -> None:
    told = tmp_path / "told"
    told.mkdir()
    options = ["-H", "h0:1,h1:2", "-q", "--restarts", str(1 - first), "--grace", "250"]
    job = remote.start(*options, remote.script(SCRIPT), str(told), str(first))
    await_files(told, *(f"1-pid-{rank}" for rank in range(3)))
    in_space = read(told, "1-pid-1")
    victim = next(pid for pid in remote.hosts.processes(1) if number_inside(pid) == in_space)
    os.kill(victim, signal.SIGKILL)
    await_files(told, "1-told-0", "1-told-2")
    (told / "1-go").touch()
    assert job.finish() == 128 + signal.SIGKILL, job.said()
    for rank in () if first else (0, 1):
        text, named = read(told, f"0-told-{rank}")
        assert ("rank 2 on h1 has ended" in text, named) == (True, 2), text
    assert first or "rank 2 on h1 has ended" in job.err
    check_killed(told, "h1")


def number_inside(pid: int) -> int:
    """The number that a process has on its own host."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nNSpid:")[2].splitlines()[0].split()[-1])
