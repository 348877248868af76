"""The core refuses an address that is NULL though there are bytes to move: a tensor without memory has such a one."""

from __future__ import annotations

import ctypes
from datetime import timedelta

from tests.support.ranks import Member, on_ranks
from torch._C._distributed_c10d import HashStore

from phalanx.native.core import End, Status, library
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

FLOAT32, SUM = 1, 1


def test_null_with_bytes_is_refused_and_null_without_is_not() -> None:
    def body(_: Member) -> list[int]:
        communicator = SharedMemoryCommunicator(HashStore(), 0, 1, timedelta(seconds=20))
        core, comm = library(), communicator._comm
        none, data, some = (ctypes.c_void_p * 1)(), ctypes.create_string_buffer(64), (ctypes.c_void_p * 1)()
        some[0] = ctypes.addressof(data)
        sizes = (ctypes.c_uint64 * 1)(4)
        statuses = [
            core.phx_all_reduce(comm, None, None, 1, FLOAT32, SUM, 0),
            core.phx_reduce(comm, None, None, 1, FLOAT32, SUM, 0, 0),
            core.phx_reduce_scatter(comm, none, data, 1, FLOAT32, SUM, 0),
            core.phx_reduce_scatter(comm, some, None, 1, FLOAT32, SUM, 0),
            core.phx_broadcast(comm, None, 4, FLOAT32, 0, 0),
            core.phx_all_gather(comm, None, some, 4, FLOAT32, 0),
            core.phx_all_gather(comm, data, none, 4, FLOAT32, 0),
            core.phx_gather(comm, None, some, 4, FLOAT32, 0, 0),
            core.phx_scatter(comm, some, None, 4, FLOAT32, 0, 0),
            core.phx_scatter(comm, none, data, 4, FLOAT32, 0, 0),
            core.phx_all_to_all(comm, none, sizes, some, sizes, FLOAT32),
            core.phx_all_to_all(comm, some, sizes, none, sizes, FLOAT32),
        ]
        end = ctypes.byref(End(4, FLOAT32, 0))
        assert core.phx_send(comm, None, end, 0, 0) is None
        assert core.phx_recv(comm, None, end, 0, 0) is None
        assert core.phx_send_now(comm, None, end, 0, 0) == 0
        assert core.phx_all_reduce(comm, None, None, 0, FLOAT32, SUM, 0) == Status.OK
        assert core.phx_broadcast(comm, None, 0, FLOAT32, 0, 0) == Status.OK
        communicator.close()
        return statuses

    assert on_ranks(body, 1) == [[Status.BAD_ARGUMENT] * 12]
