"""Links over shared memory whose other process dies, stops, forks or writes nonsense; and waits that Ctrl-C ends."""

from __future__ import annotations

import contextlib
import ctypes
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
from tests.support.leaks import Holdings
from tests.support.ranks import Member, run_ranks, values
from tests.support.shared_links import PATIENCE_S, Peer, finish, mappings, read, write
from tests.support.waiting import soon, stop

from phalanx.rpc.links.contract import LinkEnded
from phalanx.rpc.links.shared import SharedHub
from phalanx.rpc.message import Kind, Message

SLAB = 1 << 20
KILLS = 25  # for each side


def hammer(peer: Peer, other: int, seed: int) -> list[threading.Thread]:
    """Threads that call with messages of all sizes until the link ends."""

    def work(chance: random.Random) -> None:
        with_end = (EOFError, LinkEnded)
        try:
            while True:
                nbytes = chance.choice([10, 1000, 50_000, 200_000, 600_000, 3 << 20])
                answer = peer.call(peer.links[other], b"h", [memoryview(bytes(nbytes))])
                assert answer.buffers[0].nbytes == nbytes
        except with_end:
            pass

    threads = [threading.Thread(target=work, args=(random.Random(seed + n),)) for n in range(3)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_killed_at_any_moment_is_noticed_and_leaves_nothing(killed: int, tmp_path: Path) -> None:
    def rank(member: Member) -> None:
        chance = random.Random(killed)
        holdings = Holdings.now()
        for number in range(KILLS):
            folder = tmp_path / str(number)
            folder.mkdir()
            child = os.fork()
            if child == 0:
                try:
                    peer = Peer(SLAB)
                    peer.meet(Member(killed, 2, folder))
                    hammer(peer, 1 - killed, number)[0].join()
                finally:
                    os._exit(1)
            peer = Peer(SLAB)
            peer.meet(Member(1 - killed, 2, folder))
            threads = hammer(peer, killed, number)
            time.sleep(chance.random() * 0.03)
            os.kill(child, signal.SIGKILL)
            assert peer.wait_for_end() == "its process has ended"
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            os.waitpid(child, 0)
            peer.hub.close()
            assert peer.ends == ["its process has ended"]
            peer.links.clear()
            peer.answers.clear()
            del peer
            assert soon(lambda: not holdings.left_by(Holdings.now())), holdings.left_by(Holdings.now())
        gc.collect()
        assert soon(lambda: mappings() == 0)

    values(run_ranks(rank, 1))


def test_an_idle_process_learns_of_a_death_too_and_what_came_from_it_stays() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 1:
            read(member.folder / "over")
            os.kill(os.getpid(), signal.SIGKILL)
        answer = peer.call(peer.links[1], b"", [memoryview(b"x" * 300_000)])
        write(member.folder / "over", b"")
        assert peer.wait_for_end() == "its process has ended"
        with pytest.raises(LinkEnded, match="its process has ended"):
            peer.links[1].send(Message(Kind.NOTICE, 0, "", b""), 1.0)
        peer.hub.close()
        assert bytes(answer.buffers[0]) == b"x" * 300_000

    outcomes = run_ranks(rank, 2)
    assert outcomes[1].signal == signal.SIGKILL
    values(outcomes[:1])


def test_a_stopped_process_is_told_from_a_dead_one() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 0:
            pid = int(read(member.folder / "pid"))
            assert peer.links[1].state()["process"] in ("R", "S")
            stop(pid)
            try:
                with pytest.raises(TimeoutError):
                    while True:
                        peer.links[1].send(Message(Kind.NOTICE, 0, "", bytes(10_000)), 0.5)
                state = peer.links[1].state()
                assert state["process"] == "T"
                assert float(state["alive_s_ago"]) > 0.3
                assert not peer.ends
            finally:
                os.kill(pid, signal.SIGCONT)
            assert bytes(peer.call(peer.links[1], b"again").head) == b"again"
        else:
            write(member.folder / "pid", b"%d" % os.getpid())
        finish(member, peer)

    values(run_ranks(rank, 2))


def test_a_process_whose_interpreter_is_held_is_told_from_a_stopped_one() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 0:
            read(member.folder / "holds")

            def is_told() -> bool:
                state = peer.links[1].state()
                return float(state["python_s_ago"]) >= 1.0 and float(state["alive_s_ago"]) < 0.9

            told = soon(is_told)
            write(member.folder / "seen", b"")
            assert told, peer.links[1].state()
        else:
            until_seen = f"n=0; while [ ! -e {member.folder}/seen -a $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done"
            until_seen = f"touch {member.folder}/holds; {until_seen}"
            ctypes.PyDLL(None).system(until_seen.encode())  # keeps the interpreter's lock
        assert not peer.ends
        finish(member, peer)

    values(run_ranks(rank, 2))


def test_a_process_that_becomes_another_program_has_gone() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 1:
            write(member.folder / "pid", b"%d" % os.getpid())
            read(member.folder / "met")
            os.execv("/bin/sleep", ["sleep", "600"])
        write(member.folder / "met", b"")
        try:
            assert peer.wait_for_end() == "its process has become another program"
        finally:
            os.kill(int(read(member.folder / "pid")), signal.SIGKILL)
        peer.hub.close()

    values(run_ranks(rank, 2)[:1])


def test_a_forked_child_neither_uses_nor_ends_what_its_parent_has() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 0:
            kept = peer.call(peer.links[1], b"", [memoryview(b"x" * 300_000)])
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    assert bytes(kept.buffers[0][:3]) == b"xxx"
                    kept.buffers = ()
                    for use in (
                        lambda: peer.links[1].send(Message(Kind.NOTICE, 0, "", b""), 1.0),
                        lambda: peer.links[1].send(Message(Kind.NOTICE, 0, "", bytes(200_000)), 1.0),
                    ):
                        with pytest.raises(LinkEnded, match="forked"):
                            use()
                    peer.hub.close()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            for number in range(20):
                other = memoryview(bytes([number]) * 300_000)
                assert peer.call(peer.links[1], b"", [other]).buffers[0] == other
            assert bytes(kept.buffers[0]) == b"x" * 300_000
            assert not peer.ends
        finish(member, peer)

    values(run_ranks(rank, 2))


@pytest.mark.parametrize("waits", ["for an answer", "for room", "for room for a large message"])
def test_ctrl_c_ends_a_wait(waits: str) -> None:
    def rank(member: Member) -> None:
        go_on = threading.Event()
        waited: list[bool] = []
        peer = Peer(
            SLAB,
            lambda message: waited.append(go_on.wait(60)),
            stuck=lambda link, message: (b"%d" % go_on.wait(60), []),
        )
        peer.meet(member)
        if member.rank == 0:
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                if waits == "for an answer":
                    peer.call(peer.links[1], service="stuck")
                while True:
                    nbytes = 300_000 if waits.endswith("large message") else 10_000
                    peer.links[1].send(Message(Kind.NOTICE, 0, "", bytes(nbytes)), 60.0)
            assert time.monotonic() - began < 15
            write(member.folder / "go", b"")
            assert bytes(peer.call(peer.links[1], b"small").head) == b"small"
            assert len(peer.call(peer.links[1], bytes(400_000)).head) == 400_000
        else:
            read(member.folder / "go")
            go_on.set()
        finish(member, peer)

    values(run_ranks(rank, 2))


def test_offers_that_lead_nowhere_are_refused_and_leave_nothing() -> None:
    def rank(member: Member) -> None:
        holdings = Holdings.now()
        peer = Peer(SLAB)
        good = json.loads(peer.hub.offer())
        other = Peer(SLAB)
        for change in (
            {"pid": 1 << 22},
            {"pid": -1},
            {"channel": 0},
            {"channel": good["place"]},
            {"place": good["channel"]},
            {"cookie": "00" * 16},
            {"place_cookie": "00" * 16},
            {"cookie": "zz"},
            {"pid": None},
        ):
            assert other.hub.accept(json.dumps(good | change).encode()) is None, change
        for garbage in (b"", b"{}", b"[]", b"\xff", b"3"):
            assert other.hub.accept(garbage) is None
        link = other.hub.accept(json.dumps(good).encode())
        assert link is not None
        link.close()
        offer = peer.hub.offer()
        peer.hub.withdraw(offer)
        assert other.hub.accept(offer) is None
        with pytest.raises(LinkEnded, match="has left"):
            peer.hub.confirm(offer)  # as a thread does that makes a link while this process leaves
        unanswered = peer.hub.offer()
        with pytest.raises(LinkEnded, match="out of reach"):
            peer.hub.confirm(unanswered)
        for one in (peer, other):
            one.hub.close()
        del peer, other, link, one
        gc.collect()
        assert soon(lambda: not holdings.left_by(Holdings.now())), holdings.left_by(Holdings.now())
        assert soon(lambda: mappings() == 0)

    values(run_ranks(rank, 1))


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
        else:
            read(member.folder / "go")
            go_on.set()
            assert peer.wait_for_end() == "the memory shared with it is damaged"
            assert peer.ends == ["the memory shared with it is damaged"]
        finish(member, peer)

    values(run_ranks(rank, 2))


RECORD = {"length": (132, 2), "image": (132, 2), "head": (132, 2), "block": (24, 3)}  # struct phx_rpc_record


def largest() -> str:
    """The line of /proc/self/maps of the channel, which is larger than a hub's page."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:phalanx-rpc" in line]
    return max(lines, key=lambda line: int(line.split("-")[1].split()[0], 16) - int(line.split("-")[0], 16))


def test_a_closed_hub_makes_no_links() -> None:
    def rank(member: Member) -> None:
        peer, other = Peer(SLAB), Peer(SLAB)
        offer = other.hub.offer()
        link = peer.hub.accept(offer)
        assert link is not None
        peer.hub.close()
        with pytest.raises(LinkEnded):
            link.begin()
        with pytest.raises(OSError, match="shared memory"):
            peer.hub.offer()
        other.hub.close()
        other.hub.close()
        assert isinstance(other.hub, SharedHub)

    values(run_ranks(rank, 1))


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


@pytest.mark.parametrize("rounds", [15, pytest.param(300, marks=pytest.mark.long)], ids=["a few times", "many times"])
def test_whatever_the_other_process_writes_into_shared_memory_ends_the_link_at_most(rounds: int) -> None:
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
