"""Children that a rank forks: the group and its messages stay the parent's."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

from phalanx.c10d import leaving
from phalanx.errors import ClosedError


@pytest.mark.parametrize("size", [3])
def test_a_forked_child_has_nothing_of_its_parents_messages(size: int) -> None:
    """Neither new ones nor those under way, nor may its end, by the interpreter's whole way out, disturb the parent."""

    def body(place: Member) -> list[float]:
        place.join()
        group: Any = dist.group.WORLD
        received = torch.zeros(1)
        under_way: Any = dist.irecv(received, (place.rank - 1) % size)
        assert under_way is not None
        with group._messages._starting, under_way._message._lock:  # as if another thread held them
            child = os.fork()
        if child == 0:
            calls: list[Callable[[], object]] = [
                lambda: dist.send(torch.full((1,), 42.0), (place.rank + 1) % size),
                lambda: dist.recv(torch.zeros(1), (place.rank - 1) % size),
                lambda: dist.recv(torch.zeros(1)),
                lambda: dist.isend(torch.full((1,), 42.0), (place.rank + 1) % size),
                lambda: dist.irecv(torch.zeros(1)),
                under_way.wait,
                under_way.get_future,
            ]
            for call in calls:
                with pytest.raises(ClosedError, match="forked"):
                    call()
            group.abort()  # not the parent's group
            group._communicator.close()
            for run in (leaving._at_exit, gc.collect):
                run()
            ctypes.CDLL(None).exit(0)  # with the handlers that C runs, which os._exit would skip
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dist.barrier()
        dist.send(torch.full((1,), float(place.rank)), (place.rank + 1) % size)
        under_way.wait()
        dist.destroy_process_group()
        return received.tolist()

    assert on_ranks(body, size, timeout_s=60) == [[float((rank - 1) % size)] for rank in range(size)]


FORKS = """
import os, sys
import torch, torch.distributed as dist

rank = int(sys.argv[1])
dist.init_process_group("phalanx", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
dist.all_reduce(torch.ones(1), async_op=True).wait()
work = dist.irecv(torch.zeros(1), 1 - rank)
if os.fork() == 0:
    sys.exit()
assert os.wait()[1] == 0
dist.barrier()
dist.send(torch.ones(1), 1 - rank)
work.wait()
print("done")
"""


def test_a_forked_child_that_ends_as_scripts_do_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    ranks = [
        subprocess.Popen([sys.executable, "forks.py", str(rank)], cwd=tmp_path, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=300)
        assert (rank.returncode, out) == (0, "done\n"), err
