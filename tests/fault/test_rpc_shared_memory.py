"""Shared memory between workers where the system or the other process gives less than it should."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.fault.test_rpc_shared_ends import largest
from tests.support.ranks import Member, run_ranks, values
from tests.support.shared_links import Peer, finish, mappings, read, write

from phalanx.native.core import Status
from phalanx.rpc.links.contract import LinkEnded
from phalanx.rpc.message import Kind, Message

SLAB = 1 << 20
SLAB_BYTES_AT = 32  # in struct phx_rpc_channel


def offered(peer: Peer) -> dict[str, Any]:
    offer: dict[str, Any] = json.loads(peer.hub.offer())
    return offer


def test_the_memory_of_a_link_cannot_be_cut_short() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        offer = offered(peer)
        for descriptor in (offer["channel"], offer["place"]):
            for nbytes in (0, 1 << 40):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, nbytes)
        peer.hub.close()

    values(run_ranks(rank, 1))


@pytest.mark.parametrize("slab_bytes", [0, 1, 1 << 50, 1 << 63, (1 << 63) + 4096])
def test_a_channel_whose_sizes_cannot_be_is_refused(slab_bytes: int) -> None:
    """A file of the size that follows from them, although they are so large that the sum overflows."""

    def rank(member: Member) -> None:
        peer, other = Peer(SLAB), Peer(SLAB)
        offer = offered(peer)
        size = os.fstat(offer["channel"]).st_size - 2 * SLAB
        header = os.pread(offer["channel"], 1 << 16, 0)
        file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, (size + 2 * slab_bytes) % (1 << 64))
        os.pwrite(file, header[:SLAB_BYTES_AT] + struct.pack("<Q", slab_bytes) + header[SLAB_BYTES_AT + 8 :], 0)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        assert other.hub.accept(json.dumps(offer | {"channel": file}).encode()) is None
        assert other.hub.accept(json.dumps(offer).encode()) is not None
        os.close(file)
        for one in (peer, other):
            one.hub.close()

    values(run_ranks(rank, 1))


def test_an_offer_that_names_a_terminal_does_not_open_it() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        controller, terminal = os.openpty()
        offer = json.dumps(offered(peer) | {"channel": terminal}).encode()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.setsid()  # the next terminal that this process opens becomes the one it is controlled by
                other = Peer(SLAB)
                assert other.hub.accept(offer) is None
                code = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[4] != "0")
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        os.close(controller)
        os.close(terminal)
        peer.hub.close()

    values(run_ranks(rank, 1))


def test_a_process_that_gives_up_a_link_says_so() -> None:
    """It found nonsense. The other process is alive and may wait for an answer."""

    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 0:
            start = int(largest().split("-")[0], 16)
            ctypes.memset(start + 128, 0x55, 8)  # the head of the ring through which this side sends
            why = "it found the memory shared with this process damaged, or had no memory left for a message"
            assert peer.wait_for_end() == why
            with pytest.raises(LinkEnded, match="damaged"):
                peer.call(peer.links[1])
        else:
            assert peer.wait_for_end() == "the memory shared with it is damaged"
        finish(member, peer)

    values(run_ranks(rank, 2))


def test_many_links_and_few_descriptors_leave_the_watching_thread_asleep() -> None:
    def rank(member: Member) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        peer, others = Peer(SLAB), [Peer(SLAB) for _ in range(40)]
        for other in others:
            offer = peer.hub.offer()
            link = other.hub.accept(offer)
            assert link is not None
            link.begin()
            mine = peer.hub.confirm(offer)
            mine.begin()
            peer.links[len(peer.links)] = mine
            other.links[0] = link
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, before[1]))  # fewer than there are links
        began, used = time.monotonic(), time.process_time()
        time.sleep(1.0)
        share = (time.process_time() - used) / (time.monotonic() - began)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert bytes(others[-1].call(others[-1].links[0], b"still").head) == b"still"
        for one in (peer, *others):
            one.hub.close()
        assert share < 0.4, f"{share:.0%} of a core"

    values(run_ranks(rank, 1))


class Interrupted(BaseException):
    """What a signal's handler raises, such as KeyboardInterrupt."""


class InterruptedCore:
    """The core, when a signal's handler raises as soon as a call that waits has returned with something."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def phx_rpc_await(self, *arguments: Any) -> int:
        status = int(self._core.phx_rpc_await(*arguments))
        if status == Status.OK:
            raise Interrupted
        return status


@pytest.mark.parametrize("nbytes", [10, 150_000, 3 * SLAB])
def test_what_an_interrupted_wait_has_received_is_not_lost(nbytes: int) -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 0:
            link, interrupted = peer.links[1], 0
            core = link._core
            raising: Any = InterruptedCore(core)
            link._core = raising
            for number in range(50):
                link.send(Message(Kind.REQUEST, number, "echo", b"", [memoryview(bytes(nbytes))]), 20.0)
                try:
                    link.wait(partial(peer.answers.__contains__, number), number, 20.0)
                except Interrupted:
                    interrupted += 1
                    assert number in peer.answers
                assert peer.answers.pop(number).buffers[0].nbytes == nbytes
            assert interrupted
            link._core = core
            del link
            write(member.folder / "close", b"")
            assert peer.wait_for_end() == "it has left"
        else:
            read(member.folder / "close")
            peer.links[0].close()
        finish(member, peer)
        peer.links.clear()
        assert member.rank or mappings() == 1  # the hub's own page: nothing that was received keeps the link

    values(run_ranks(rank, 2))
