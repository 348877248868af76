"""Workers that share memory: whose process becomes another, forks, is interrupted, or writes nonsense into it."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import signal
import struct
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.rpc import workers
from tests.rpc.workers import with_workers
from tests.support.leaks import Holdings
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.waiting import soon, stop, when_waiting

from phalanx import rpc
from phalanx.errors import ClosedError, WorkerLost
from phalanx.rpc import connections, session
from phalanx.rpc.links.shared import SharedHub, SharedLink

PATIENCE_S = 60.0
SLAB = 8 << 20  # so that half of it is soon in use, and no message may have more
SLAB_BYTES_AT = 32  # in struct phx_rpc_place
LARGE = torch.ones(16 << 20)  # 64 MiB: few calls have as much as may be under way


def small_slab(_: Member) -> None:
    vars(connections)["SharedHub"] = partial(SharedHub, slab_bytes=SLAB)


def become_another() -> None:
    os.execv("/bin/sleep", ["sleep", "600"])


def test_process_that_becomes_another_program_is_lost() -> None:
    def rank(member: Member) -> None:
        workers.begin(member)
        if member.rank:
            time.sleep(2 * PATIENCE_S)
        pid = rpc.call(1, workers.pid)
        try:
            with pytest.raises(WorkerLost, match="its process has become another program"):
                rpc.call(1, become_another)
        finally:
            os.kill(pid, signal.SIGKILL)
        rpc.shutdown()

    values(run_ranks(rank, 2)[:1])


def test_forked_child_neither_uses_nor_ends_what_its_parent_has() -> None:
    def body(member: Member) -> None:
        sent = torch.arange(100_000.0)
        kept = rpc.call(workers.next_of(member), workers.add, sent, 1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert torch.equal(kept, sent + 1)
                for argument in (1, sent):
                    with pytest.raises(ClosedError):
                        rpc.call(1 - member.rank, workers.add, argument, 1)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        for number in range(20):
            assert torch.equal(rpc.call(1 - member.rank, workers.add, sent, number), sent + number)
        assert torch.equal(kept, sent + 1)

    with_workers(body, 2)


def test_ctrl_c_ends_a_wait_for_room() -> None:
    def body(member: Member) -> None:
        if member.rank:
            return
        pid = rpc.call(1, workers.pid)
        for argument in (torch.ones(1), torch.ones(2_500), LARGE):
            stop(pid)
            try:
                when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    while True:
                        rpc.start(1, torch.numel, argument, timeout_s=PATIENCE_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert rpc.call(1, workers.add, 1, 2) == 3
        assert rpc.call(1, torch.numel, LARGE) == LARGE.numel()

    with_workers(body, 2)


def test_interrupt_leaves_the_room_of_a_message_free() -> None:
    """It comes as the core has placed the message and not yet posted it, as a signal that comes while it copies."""

    def body(member: Member) -> None:
        if member.rank:
            return
        assert rpc.call(1, workers.add, 1, 2) == 3
        links = session.worker()._connections._links()
        link: Any = next(each for each in links if isinstance(each, SharedLink))
        core, placed = link._core, []

        def share(*arguments: Any) -> int:
            status: int = core.phx_rpc_share(*arguments)
            placed.append(bool(arguments[-1].value))
            if len(placed) < 3:
                signal.raise_signal(signal.SIGINT)
            return status

        link._core = SimpleNamespace(**{**vars(core), "phx_rpc_share": share})
        half = torch.ones(SLAB // 8 - 4096)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                rpc.call(1, torch.numel, half)
        assert rpc.call(1, torch.numel, half) == half.numel()
        assert placed == [True] * 3

    with_workers(body, 2, before=small_slab)


def test_offers_that_lead_nowhere_are_refused_and_leave_nothing() -> None:
    def rank(member: Member) -> None:
        holdings = Holdings.now()
        receiver: Any = SimpleNamespace(deliver=None, ended=lambda link, why, left: None)
        offering, accepting = (SharedHub(receiver, slab_bytes=SLAB) for _ in range(2))
        good = offering.offer()
        for change in ({"pid": 1 << 22}, {"channel": 0}, {"channel": good.place}, {"cookie": bytes(16)}):
            assert accepting.accept(replace(good, **change)) is None, change
        size, header = os.fstat(good.place).st_size - SLAB, os.pread(good.place, 4096, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(good.channel, 0)  # it cannot be cut short
        for slab_bytes in (0, 1 << 50, (1 << 63) + 4096):  # sizes that cannot be, although their sum overflows
            file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(file, (size + slab_bytes) % (1 << 63))
            os.pwrite(file, header[:SLAB_BYTES_AT] + struct.pack("<Q", slab_bytes) + header[SLAB_BYTES_AT + 8 :], 0)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            assert accepting.accept(replace(good, place=file)) is None
            os.close(file)
        link = accepting.accept(good)
        assert link is not None
        link.close()
        for hub in (offering, accepting):
            hub.close()
        del offering, accepting, link, hub
        gc.collect()
        assert soon(lambda: not holdings.left_by(Holdings.now())), holdings.left_by(Holdings.now())
        assert soon(lambda: workers.mappings() == 0)

    on_ranks(rank, 1)


def channel() -> int:
    """Where the memory begins that this process has in common with the only other one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if "memfd:phalanx-rpc" in line and end - start < SLAB:
            return start
    raise AssertionError("there is none")


def test_damaged_memory_ends_the_link_and_nothing_else() -> None:
    def body(member: Member) -> str:
        if member.rank == 0:
            pid = rpc.call(1, workers.pid)  # this one offers its memory
            stop(pid)
            late = [rpc.start(1, workers.add, 1, number) for number in range(3)]
            ctypes.memset(channel() + 128, 0x55, 8)  # how far the ring, in which these are, has come
            os.kill(pid, signal.SIGCONT)
            member.say("damaged")
        member.await_said("damaged")
        with pytest.raises(WorkerLost) as caught:
            for waiting in late if member.rank == 0 else [rpc.start(0, workers.add, 1, 2)]:
                waiting.wait()
        member.meet("told")
        return caught.value.why

    assert with_workers(body, 2, before=small_slab) == [
        "it found the memory shared with this process damaged, or had no memory left for a message",
        "the memory shared with it is damaged",
    ]
