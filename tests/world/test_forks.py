"""Children that a rank forks: the group and its messages stay the parent's."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

from phalanx.c10d import leaving
from phalanx.errors import ClosedError


def test_forked_child_has_nothing_of_its_parents_messages() -> None:
    """Neither new ones nor those under way, nor may its end, by the interpreter's whole way out, disturb the parent."""

    size = 3

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
