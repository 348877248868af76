"""Ranks over MPI that do not come, leave, or are interrupted: what the others' errors know; and what is unfinished."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher
from tests.mpi.environments import MpiEnvironment, run

from phalanx.system.host import machine_name

# The second argument says how rank 1 does not come: it is "late", has left the world in order ("leaves"), has left the
# call by an exception of its own ("interrupted"), does not send what rank 0 waits for ("silent"), or is "stopped".
SCRIPT = """\
import json, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
from datetime import timedelta
from phalanx.errors import CollectiveTimeout, PeerLost

folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
waiting = 1 if how in ("silent", "stopped") else size - 1

def await_files(pattern, count=1):
    until = time.monotonic() + 200
    while len([*folder.glob(pattern)]) < count and time.monotonic() < until:
        time.sleep(0.01)

def stopped(pid):
    return "State:\\tT" in pathlib.Path(f"/proc/{pid}/status").read_text()

class Alarm(Exception):
    pass

def raises(*_):
    raise Alarm

def call():
    dist.all_reduce(torch.ones(4))

def tell(error, name=rank):
    names = ("group_rank", "rank", "pid", "host", "signal", "group", "sequence", "last_operation", "last_line",
             "elapsed_s")
    said = {"type": type(error).__name__, "text": str(error), **{name: getattr(error, name) for name in names}}
    (folder / f"part-{rank}").write_text(json.dumps(said))
    (folder / f"part-{rank}").rename(folder / f"{name}.json")

call()
call()
dist.barrier()
(folder / f"own-{rank}").write_text(str(os.getpid()))
(folder / f"own-{rank}").rename(folder / f"pid-{rank}")
if how in ("late", "silent", "stopped"):
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
if rank == 1:
    if how == "leaves":
        dist.destroy_process_group()
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "interrupted":
        signal.signal(signal.SIGALRM, raises)
        begun = dist.group.WORLD._communicator._agreement.sequence
        # On a busy machine the signal may fall before the call begins, where it does no harm.
        while dist.group.WORLD._communicator._agreement.sequence == begun:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                call()
            except Alarm:
                pass
        try:
            call()
        except PeerLost:
            dist.destroy_process_group()
            (folder / "interrupted").touch()
elif rank == 0 or how not in ("silent", "stopped"):
    if how == "interrupted":
        await_files("interrupted")
    while how == "stopped" and not ((folder / "pid-1").exists() and stopped((folder / "pid-1").read_text())):
        time.sleep(0.01)
    try:
        if how == "silent":
            dist.recv(torch.ones(4), 1)
        else:
            call()
    except (PeerLost, CollectiveTimeout) as error:
        tell(error)
await_files("*.json", waiting)
if how == "late" and rank == 1:
    try:
        call()  # which the others have given up
    except CollectiveTimeout as error:
        tell(error, "late")
if how == "late":
    await_files("late.json")
if how == "stopped" and rank == 0:
    os.kill(int((folder / "pid-1").read_text()), signal.SIGCONT)
sys.stdout.flush()
os._exit(0)
"""
BARRIER = ("barrier #3 at ", "dist.barrier()")
LAST = dict.fromkeys(("late", "leaves", "silent", "stopped"), BARRIER) | {
    "interrupted": ("all_reduce #5 (float32, 16 B, sum) at ", "    dist.all_reduce(torch.ones(4))")
}


def check(folder: Path, how: str, output: str) -> None:
    operation, text = LAST[how]
    line = SCRIPT.splitlines().index(text) + 1
    pid = int((folder / "pid-1").read_text())
    for rank in [0] if how in ("silent", "stopped") else [0, 2]:
        assert (folder / f"{rank}.json").exists(), output
        said: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
        text = said.pop("text")
        assert f"rank 1 of the group (pid {pid} on {machine_name()})" in text
        assert said["last_operation"] in text or how == "interrupted"
        assert how != "stopped" or ", which was stopped (state T), did not come within 3 s" in text
        assert how != "late" or re.search(r", which is at await_files \(\S+:\d+\), did not come within 3 s", text)
        assert how != "interrupted" or ") was interrupted in" in text
        assert 0 < said.pop("elapsed_s") < 200
        assert said.pop("last_operation").startswith(operation)
        assert said.pop("last_line").endswith(f"script.py:{line}")
        assert said == {
            "type": "PeerLost" if how in ("leaves", "interrupted") else "CollectiveTimeout",
            "group_rank": 1,
            "rank": 1,
            "pid": pid,
            "host": machine_name(),
            "signal": 0,
            "group": "0",
            "sequence": 1 if how == "silent" else 4,
        }
    if how == "late":
        said = json.loads((folder / "late.json").read_text())
        assert (said["rank"], said["pid"]) == (1, pid)  # it blames itself
        assert "given up when rank 1 came to all_reduce(float32[4], sum)" in said["text"]


@pytest.mark.parametrize("how", LAST)
def test_errors_know_who_did_not_come_and_how(mpi: MpiEnvironment, how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run(mpi, 3, script, tmp_path, how)
    check(tmp_path, how, done.stdout + done.stderr)


def test_errors_know_it_where_the_launcher_keeps_the_recorders(launcher: Launcher) -> None:
    done = launcher.run("-n", "3", "--grace", "60", launcher.script(SCRIPT), str(launcher.directory), "late")
    check(launcher.directory, "late", done.err_text)


UNFINISHED = """\
import atexit, signal, sys, time
import torch
import torch.distributed as dist

how = sys.argv[1]
if how == "exit handler":
    atexit.register(dist.destroy_process_group)
dist.init_process_group("mpi")
rank, numbers = dist.get_rank(), 1 << 22
dist.barrier()
if how == "exit handler":
    if rank == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(1000))
if how == "exits within":
    if rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    else:
        time.sleep(300)  # so that nobody else says it
    dist.all_reduce(torch.ones(4))
elif rank == 0:
    work = dist.isend(torch.full((numbers,), 7.0), 1)
    if how == "message, destroyed":
        dist.destroy_process_group()
elif rank == 1:
    time.sleep(1)
    got = torch.zeros(numbers)
    dist.recv(got, 0)
    print(got.min().item(), got.max().item())
"""


@pytest.mark.parametrize("how", ["message", "message, destroyed", "exit handler", "exits within"])
def test_what_is_unfinished_arrives_or_is_told(mpi: MpiEnvironment, how: str, tmp_path: Path) -> None:
    """A message that nobody waits for arrives whole; an exit handler keeps the exit code.

    Within a call MPI cannot end in order, so that end is a failure, although the exit code was 0.
    """
    script = tmp_path / "script.py"
    script.write_text(UNFINISHED)
    ended = run(mpi, 3, script, how)
    said = ended.stdout + ended.stderr
    if how.startswith("message"):
        assert (ended.returncode, ended.stdout.split()) == (0, ["7.0", "7.0"]), said
    elif how == "exit handler":
        assert ended.returncode == 3, said
    else:
        assert ended.returncode != 0, said
        why = r"all_reduce\(float32\[4\], sum\) at \S*script\.py:\d+ was interrupted by SystemExit"
        words = r"rank 1: MPI cannot end in order, .* may still answer \({}\); the job is aborted when this rank ends"
        assert re.search(words.format(why), said), said
