"""Workers that share memory: whose process becomes another, forks, is interrupted, or writes nonsense into it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import random
import re
import signal
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.rpc import workers
from tests.rpc.workers import with_workers
from tests.support.leaks import Holdings
from tests.support.ranks import Member, run_ranks, values
from tests.support.shared_links import PATIENCE_S, Peer, finish, mappings, read, write
from tests.support.waiting import soon, stop

from phalanx import rpc
from phalanx.errors import ClosedError, WorkerLost
from phalanx.rpc.links.contract import LinkEnded
from phalanx.rpc.message import Kind, Message

SLAB = 1 << 20
SLAB_BYTES_AT = 32  # in struct phx_rpc_channel
LARGE = torch.ones(16 << 20)  # 64 MiB, more than there is room for


def become_another() -> None:
    os.execv("/bin/sleep", ["sleep", "600"])


def test_a_process_that_becomes_another_program_is_lost() -> None:
    def rank(member: Member) -> None:
        workers.begin(member, tcp=False)
        if member.rank:
            time.sleep(PATIENCE_S)
        pid = rpc.call(1, workers.pid)
        try:
            with pytest.raises(WorkerLost, match="its process has become another program"):
                rpc.call(1, become_another)
        finally:
            os.kill(pid, signal.SIGKILL)
        rpc.shutdown()

    values(run_ranks(rank, 2)[:1])


def test_a_forked_child_neither_uses_nor_ends_what_its_parent_has() -> None:
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


@pytest.mark.parametrize("argument", [torch.ones(1), torch.ones(2_500), LARGE], ids=["small", "medium", "large"])
def test_ctrl_c_ends_a_wait_for_room(argument: torch.Tensor) -> None:
    def body(member: Member) -> None:
        if member.rank:
            return
        pid = rpc.call(1, workers.pid)
        stop(pid)
        try:
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                while True:
                    rpc.start(1, torch.numel, argument, timeout_s=PATIENCE_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert rpc.call(1, workers.add, 1, 2) == 3
        assert rpc.call(1, torch.numel, LARGE) == LARGE.numel()

    with_workers(body, 2)


def test_offers_that_lead_nowhere_are_refused_and_leave_nothing() -> None:
    def rank(member: Member) -> None:
        holdings = Holdings.now()
        peer, other = Peer(SLAB), Peer(SLAB)
        good = json.loads(peer.hub.offer())
        for change in (
            {"pid": 1 << 22},
            {"pid": -1},
            {"channel": 0},
            {"channel": good["place"]},
            {"cookie": "00" * 16},
            {"cookie": "zz"},
            {"pid": None},
        ):
            assert other.hub.accept(json.dumps(good | change).encode()) is None, change
        for garbage in (b"", b"{}", b"[]", b"\xff"):
            assert other.hub.accept(garbage) is None
        size, header = os.fstat(good["channel"]).st_size - 2 * SLAB, os.pread(good["channel"], 1 << 16, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(good["channel"], 0)  # it cannot be cut short
        for slab_bytes in (0, 1 << 50, (1 << 63) + 4096):  # sizes that cannot be, although their sum overflows
            file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(file, (size + 2 * slab_bytes) % (1 << 64))
            os.pwrite(file, header[:SLAB_BYTES_AT] + struct.pack("<Q", slab_bytes) + header[SLAB_BYTES_AT + 8 :], 0)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            assert other.hub.accept(json.dumps(good | {"channel": file}).encode()) is None
            os.close(file)
        link = other.hub.accept(json.dumps(good).encode())
        assert link is not None
        link.close()
        for one in (peer, other):
            one.hub.close()
        del peer, other, link, one
        gc.collect()
        assert soon(lambda: not holdings.left_by(Holdings.now())), holdings.left_by(Holdings.now())
        assert soon(lambda: mappings() == 0)

    values(run_ranks(rank, 1))


RECORD = {"length": (132, 2), "image": (132, 2), "head": (132, 2), "block": (24, 3)}  # struct phx_rpc_record


def largest() -> str:
    """The line of /proc/self/maps of the channel, which is larger than a hub's page."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:phalanx-rpc" in line]
    return max(lines, key=lambda line: int(line.split("-")[1].split()[0], 16) - int(line.split("-")[0], 16))


@pytest.mark.parametrize("what", ["length", "image", "head", "block"])
def test_memory_that_makes_no_sense_ends_the_link_and_nothing_else(what: str) -> None:
    def rank(member: Member) -> None:
        go_on = threading.Event()
        waited: list[bool] = []
        peer = Peer(SLAB, lambda message: waited.append(go_on.wait(60)))
        peer.meet(member)
        if member.rank == 0:
            nbytes = 300_000 if what == "block" else 100
            for _ in range(3):
                peer.links[1].send(Message(Kind.NOTICE, 0, "", bytes(nbytes)), 60.0)
            region = re.search(r"^(\w+)-(\w+) .*memfd:phalanx-rpc", largest(), re.MULTILINE)
            assert region
            start, end = int(region[1], 16), int(region[2], 16)
            rings = end - 2 * SLAB
            rings = (
                start
                + bytes(ctypes.string_at(start, rings - start)).index(struct.pack("<II", *RECORD[what])) // 4096 * 4096
            )
            if what == "head":
                ctypes.memset(start + 128, 0x55, 8)  # the first ring's
            else:
                for at in range(rings, rings + 4096, 16):  # every record there, and what it says
                    if ctypes.string_at(at, 8) == struct.pack("<II", *RECORD[what]):
                        ctypes.memset(at + (0 if what == "length" else 16), 0xFF, 4 if what == "length" else 32)
            write(member.folder / "go", b"")
            why = "it found the memory shared with this process damaged, or had no memory left for a message"
            assert peer.wait_for_end() == why
        else:
            read(member.folder / "go")
            go_on.set()
            assert peer.wait_for_end() == "the memory shared with it is damaged"
            assert peer.ends == ["the memory shared with it is damaged"]
        finish(member, peer)

    values(run_ranks(rank, 2))


def poke(chance: random.Random) -> None:
    """Change something in the memory that this process shares with the other: the words, or the records."""
    region = re.search(r"^(\w+)-(\w+) .*memfd:phalanx-rpc", largest(), re.MULTILINE)
    assert region
    start, end = int(region[1], 16), int(region[2], 16)
    words = end - start - 2 * SLAB
    at = start + chance.choice([chance.randrange(4096), chance.randrange(20_000), chance.randrange(words)])
    value = chance.choice([chance.randbytes(8), b"\xff" * 8, b"\0" * 8, struct.pack("<Q", chance.randrange(1 << 20))])
    ctypes.memmove(at, value, min(chance.choice([1, 4, 8]), start + words - at))


def chatter(peer: Peer, over: threading.Event, seed: int) -> None:
    """Send notices of all sizes until the link ends or it is over, whatever becomes of them."""
    chance = random.Random(seed)
    while not over.is_set() and not peer.ends:
        with contextlib.suppress(LinkEnded, TimeoutError):
            nbytes = chance.choice([0, 10, 1000, 50_000, 200_000, 600_000])
            peer.links[1 - seed % 2].send(Message(Kind.NOTICE, 0, "", b"", [memoryview(bytes(nbytes))]), 0.05)


@pytest.mark.parametrize("rounds", [10, pytest.param(300, marks=pytest.mark.long)], ids=["a few times", "many times"])
def test_garbage_in_shared_memory_ends_the_link_at_most(rounds: int) -> None:
    def rank(member: Member) -> None:
        holdings = Holdings.now()
        for number in range(rounds):
            folder = member.folder / str(number)
            folder.mkdir(exist_ok=True)
            chance = random.Random(number)
            peer, over = Peer(SLAB), threading.Event()
            peer.meet(Member(member.rank, 2, folder))
            thread = threading.Thread(target=chatter, args=(peer, over, 2 * number + member.rank))
            thread.start()
            if member.rank == 0:
                for _ in range(20):
                    poke(chance)
                    time.sleep(0.001)
            time.sleep(0.01)
            over.set()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
            write(folder / f"done-{member.rank}", b"")
            read(folder / f"done-{1 - member.rank}")
            peer.hub.close()
            peer.links.clear()
            assert len(peer.ends) <= 1
        del peer, thread
        gc.collect()
        assert soon(lambda: not holdings.left_by(Holdings.now())), holdings.left_by(Holdings.now())
        assert soon(lambda: mappings() == 0)

    values(run_ranks(rank, 2))
