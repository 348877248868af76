"""What the errors about other ranks have as attributes over MPI, for programs that act on them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher
from tests.mpi.environments import MpiEnvironment, run

from phalanx.system.host import machine_name

# The second argument says how rank 1 does not come: "late" is alive, "leaves" has left the world in order,
# "interrupted" has left the call by an exception of its own, and "silent" does not send what rank 0 waits for.
SCRIPT = """\
import json, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
from datetime import timedelta
from phalanx.errors import CollectiveTimeout, PeerLost

folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
waiting = 1 if how == "silent" else size - 1

def await_files(pattern, count):
    until = time.monotonic() + 200
    while len([*folder.glob(pattern)]) < count and time.monotonic() < until:
        time.sleep(0.01)

class Alarm(Exception):
    pass

def raises(*_):
    raise Alarm

def call():
    dist.all_reduce(torch.ones(4))

call()
call()
dist.barrier()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
if how in ("late", "silent"):
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
if rank == 1:
    if how == "leaves":
        dist.destroy_process_group()
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
        (folder / "interrupted").touch()
elif rank == 0 or how != "silent":
    if how == "interrupted":
        await_files("interrupted", 1)
    try:
        if how == "silent":
            dist.recv(torch.ones(4), 1)
        else:
            call()
    except (PeerLost, CollectiveTimeout) as error:
        names = ("group_rank", "rank", "pid", "host", "signal", "group", "sequence", "last_operation", "last_line",
                 "elapsed_s")
        said = {"type": type(error).__name__, "text": str(error), **{name: getattr(error, name) for name in names}}
        (folder / f"part-{rank}").write_text(json.dumps(said))
        (folder / f"part-{rank}").rename(folder / f"{rank}.json")
await_files("*.json", waiting)
sys.stdout.flush()
os._exit(0)
"""
LAST = {
    "late": ("barrier #3 at ", "dist.barrier()"),
    "leaves": ("barrier #3 at ", "dist.barrier()"),
    "interrupted": ("all_reduce #4 (float32, 16 B, sum) at ", "    dist.all_reduce(torch.ones(4))"),
    "silent": ("barrier #3 at ", "dist.barrier()"),
}

# Rank 1 differs in the size of a collective, or receives a message of another size than it was sent.
DIFFERS = """\
import json, os, pathlib, sys
import torch
import torch.distributed as dist
from phalanx.errors import CollectiveMismatch

folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("mpi")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
for group in [None, pair, pair, pair][: 4 if rank < 2 else 1]:
    dist.all_reduce(torch.ones(4), group=group)

def tell(name, call, *arguments):
    try:
        call(*arguments)
    except CollectiveMismatch as error:
        said = [error.group, error.sequence, error.elapsed_s, pair.group_name if rank < 2 else ""]
        (folder / f"{name}-{rank}.json").write_text(json.dumps(said))

large = torch.ones(4 + rank)
if how == "message":
    if rank == 0:
        dist.send(torch.ones(4), 1)
    elif rank == 1:
        tell("world", dist.recv, large, 0)
    dist.barrier()
else:
    if rank < 2:
        tell("pair", lambda: dist.all_reduce(large, group=pair))
    tell("world", dist.all_reduce, large)
sys.stdout.flush()
dist.destroy_process_group()
"""


def check(folder: Path, how: str, size: int, output: str) -> None:
    operation, text = LAST[how]
    line = SCRIPT.splitlines().index(text) + 1
    for rank in [0] if how == "silent" else [rank for rank in range(size) if rank != 1]:
        assert (folder / f"{rank}.json").exists(), output
        said: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
        pid = int((folder / "pid-1").read_text())
        assert f"(pid {pid} on {machine_name()})" in said["text"]
        assert said["last_operation"] in said.pop("text") or how == "interrupted"
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


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", LAST)
def test_all_of_them_are_known_under_mpiexec(mpi: MpiEnvironment, how: str, size: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done: subprocess.CompletedProcess[str] = run(mpi, size, script, tmp_path, how)
    check(tmp_path, how, size, done.stdout + done.stderr)


@pytest.mark.parametrize("how", ["late", "interrupted"])
def test_all_of_them_are_known_where_the_launcher_keeps_the_recorders(launcher: Launcher, how: str) -> None:
    done = launcher.run("-n", "3", "--grace", "60", launcher.script(SCRIPT), str(launcher.directory), how)
    check(launcher.directory, how, 3, done.err_text)


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["collective", "message"])
def test_calls_that_differ_are_told_with_the_operation_and_its_group(
    mpi: MpiEnvironment, how: str, size: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DIFFERS)
    done = run(mpi, size, script, tmp_path, how)
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    expected = {"world-1"}
    if how == "collective":
        expected = {*(f"world-{rank}" for rank in range(size)), "pair-0", "pair-1"}
    assert set(told) == expected, done.stdout + done.stderr
    for name, (group, sequence, elapsed_s, pair) in told.items():
        in_world = ("0", 1 if how == "message" else 2)
        assert (group, sequence) == (in_world if name.startswith("world") else (pair, 4))
        assert 0 < elapsed_s < 200
