"""Scripts over several hosts that come to their end without destroying a group, also under Python 3.12 and later.

From 3.12 on no thread can be started when the interpreter ends; where Python starts one, the script forbids it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

SCRIPT = """
    import atexit, os, sys, threading, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host
    from phalanx.errors import PeerLost

    def forbid():
        def start(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threading.Thread.start = start

    rank, size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pretend_host(rank * 2 // size)
    store = FileStore(file, size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 4
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, size - 1)
    if rank == 0:  # nothing was sent before, so no way between the two is open
        while sys.argv[4:] == ["gone"] and open(f"/proc/{pid.item()}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        try:
            dist.recv(tensor, size - 1)
        except PeerLost as error:
            print("left in order" if "in order" in str(error) else error)
    atexit.register(forbid)
"""


def run_to_the_end(text: str, size: int, folder: Path, *arguments: str) -> list[tuple[str, str, int]]:
    """Run a script as so many ranks: what each printed, on both streams, and its exit code."""
    script = folder / "script.py"
    script.write_text(dedent(text))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(size), folder / "store", *arguments],
            # On a busy machine a rank may wait for so long that it says so.
            env={"PYTHONPATH": ":".join(sys.path), "PHALANX_WARN_AFTER": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [(*rank.communicate(timeout=300), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("when", ["ends", "gone"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_script_that_comes_to_its_end_has_left(size: int, when: str, tmp_path: Path) -> None:
    ends = run_to_the_end(SCRIPT, size, tmp_path, when)
    assert ends == [("left in order\n", "", 0), *[("", "", 0)] * (size - 1)]


FAILS = """
    import os, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host
    from phalanx.errors import PeerLost

    rank, size, file, call = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    pretend_host(rank * 2 // size)
    store = FileStore(file, size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    tensor = torch.ones(4)
    if call == "recv after another":
        dist.barrier()
        if rank == size - 1:
            dist.send(tensor, 0)
        elif rank == 0:
            dist.recv(tensor, size - 1)
    try:
        dist.all_reduce(tensor)  # the last rank may be through it before the others are
        if rank == size - 1:
            raise ValueError("this batch is empty")
        if call == "all_reduce" or rank:
            dist.all_reduce(tensor)
        else:
            dist.recv(tensor, size - 1)
    except PeerLost as error:
        print(error.group_rank, error)
"""


@pytest.mark.parametrize("call", ["all_reduce", "recv", "recv after another"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_script_that_fails_has_not_left(size: int, call: str, tmp_path: Path) -> None:
    """The last rank is alone on its host, where nobody else could say how it ended."""
    ends = run_to_the_end(FAILS, size, tmp_path, call)
    assert ends[-1][2] == 1
    for out, err, _ in ends[:-1]:
        assert out.startswith(f"{size - 1} rank {size - 1} of the group (pid "), out + err
        assert f"has failed (ValueError: this batch is empty at {tmp_path / 'script.py'}:" in out, out


EXITS = """
    import argparse, os, sys, threading
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host
    from phalanx.errors import PeerLost

    rank, size, file, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    pretend_host(rank * 2 // size)
    store = FileStore(file, size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    tensor = torch.ones(4)

    def is_kept():
        try:
            sys.exit(3)
        except SystemExit as error:
            globals()["kept"] = error
            raise

    def by_system_exit():
        raise SystemExit(3)

    class Exit(SystemExit):
        pass

    def by_subclass():
        raise Exit(3)

    def by_thread():
        threading.Timer(0.2, os._exit, [3]).start()
        dist.recv(tensor, 0)

    WAYS = {
        "with nothing": sys.exit,
        "with 0": lambda: sys.exit(0),
        "with text": lambda: sys.exit("this batch is empty"),
        "which is kept": is_kept,
        "by SystemExit": by_system_exit,
        "by SystemExit, caught": by_system_exit,
        "by a subclass of it": by_subclass,
        "by exit()": lambda: exit(3),
        "by argparse": lambda: argparse.ArgumentParser().parse_args(["--no-such-option"]),
        "by os._exit": lambda: os._exit(3),
        "by os._exit of a thread": by_thread,
    }
    leave = WAYS.get(how, lambda: sys.exit(3))

    def main():
        with open(os.devnull):
            try:
                leave()
            finally:
                tensor.zero_()

    if rank == size - 1:
        dist.all_reduce(tensor)
        try:
            main()
        except SystemExit as error:
            if not how.endswith("caught"):
                raise
            assert type(error) is SystemExit and error.code == 3
        dist.all_reduce(tensor)
    else:
        try:
            dist.all_reduce(tensor)  # the last rank may be through it, and have failed, before the others are
            dist.all_reduce(tensor)
            dist.recv(tensor, size - 1)
        except PeerLost as error:
            print(error)
"""


WAYS = [
    ("with 3", 3, "has failed (exit code 3)"),
    ("with text", 1, "has failed (exit code 1)"),
    ("with 0", 0, "in order"),
    ("with nothing", 0, "in order"),
    ("and is caught", 0, "in order"),
]
OTHER_WAYS = [
    ("which is kept", 3, "has failed (exit code 3)"),
    ("by SystemExit", 3, "has failed (exit code 3)"),
    ("by SystemExit, caught", 0, "in order"),
    ("by a subclass of it", 3, "has failed (exit code 3)"),
    ("by exit()", 3, "has failed (exit code 3)"),
    ("by argparse", 2, "has failed (exit code 2)"),
    ("by os._exit", 3, "has failed (exit code 3)"),
    ("by os._exit of a thread", 3, "has ended"),
]


@pytest.mark.parametrize(
    ("how", "code", "said", "size"),
    [*[(*way, size) for way in WAYS for size in (2, 3)], *[(*way, 2) for way in OTHER_WAYS]],
)
def test_how_a_script_exits_is_told(size: int, how: str, code: int, said: str, tmp_path: Path) -> None:
    """By the one that is alone on its host: if it exits by itself, no launcher sees its exit code."""
    ends = run_to_the_end(EXITS, size, tmp_path, how)
    assert [end[2] for end in ends] == [0] * (size - 1) + [code], ends
    assert "PeerLost" not in ends[-1][1]
    for out, err, _ in ends[:-1]:
        assert f"rank {size - 1} of the group" in out, out + err
        assert said in out, out + err


FORKS = """
    import os, sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host

    rank, size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pretend_host(rank * 2 // size)
    store = FileStore(file, size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if rank == size - 1:
        child = os.fork()
        if child == 0:
            raise ValueError("this is the child's")
        assert os.waitpid(child, 0)[1] != 0
        time.sleep(3)  # rank 0 waits for a message meanwhile, and looks once in a while whether the group is broken
        dist.send(tensor, 0)
    elif rank == 0:
        dist.recv(tensor, size - 1)
    dist.all_reduce(tensor)
    print(tensor[0].item())
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_a_child_that_fails_breaks_nothing_of_its_parents(size: int, tmp_path: Path) -> None:
    ends = run_to_the_end(FORKS, size, tmp_path)
    assert [(out, code) for out, _, code in ends] == [(f"{float(size * size)}\n", 0)] * size, ends


# Ranks 1 and 2 are on one host. Rank 1 waits for the last call of rank 2, to compare it with its own, before it leaves.
LATE = """
    import sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host

    rank, size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    seen = Path(file).with_name("seen")
    pretend_host(min(rank, 1))
    store = FileStore(file, size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    dist.barrier()
    if rank < 2:
        dist.broadcast(torch.ones(4), 0)
    if rank == 0:
        reason = dist.group.WORLD._communicator._reason
        while not reason.guard.is_silent_for_good(1):
            time.sleep(0.01)
        print("has left" if reason.unwanting([1]) else "is gone without a word")
        seen.touch()
    while rank == 2 and not seen.exists():
        time.sleep(0.01)
"""


def test_a_rank_answers_until_it_has_said_that_it_leaves(tmp_path: Path) -> None:
    """Or else a rank that asks in between, because it has not been connected with it, takes it for dead."""
    (said, _, code), *_ = run_to_the_end(LATE, 3, tmp_path)
    assert said.strip() == "has left"
    assert code == 0
