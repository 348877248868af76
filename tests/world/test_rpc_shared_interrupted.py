"""Messages through shared memory whose sender or receiver is interrupted by a signal as the core returns."""

from __future__ import annotations

import signal
from contextlib import closing
from ctypes import c_uint64
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from tests.support.ranks import Member, run_ranks, values
from tests.support.shared_links import Peer, finish, read, write

from phalanx.rpc.links.image import pieces
from phalanx.rpc.message import Kind, Message, SentToMany

SLAB = 1 << 20


class Interrupted(Exception):
    """What the handler of a program's own alarm raises."""


def handler(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def interrupted_in(core: Any, name: str) -> Any:
    """The core, but that a signal comes while this function runs: its handler raises as soon as it has returned."""
    function = getattr(core, name)

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        signal.raise_signal(signal.SIGALRM)
        return result

    return SimpleNamespace(**{**vars(core), name: call})


def notice(number: int, nbytes: int) -> Message:
    return Message(Kind.NOTICE, 0, "", b"head", [memoryview(bytes([number]) * nbytes)])


def test_what_was_posted_is_not_written_to_again_while_it_is_held() -> None:
    def rank(member: Member) -> None:
        held: list[Message] = []
        peer = Peer(SLAB, held.append)
        peer.meet(member)
        if member.rank == 0:
            signal.signal(signal.SIGALRM, handler)
            for link in peer.links.values():
                core = link._core
                link._core = interrupted_in(core, "phx_rpc_post")
                with pytest.raises(Interrupted):
                    link.send(notice(1, 200_000), 60.0)
                link._core = core
                link.send(notice(2, 200_000), 60.0)
                peer.call(link, bytes(200_000))  # it comes behind both
            write(member.folder / "sent", b"")
        else:
            read(member.folder / "sent")
            assert [set(bytes(message.buffers[0])) for message in held] == [{1}, {2}]
        finish(member, peer)

    values(run_ranks(rank, 2))


@pytest.mark.parametrize("to_many", [False, True])
def test_the_room_of_what_was_not_posted_is_free_again(to_many: bool) -> None:
    nbytes = SLAB - 8192

    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        link = next(iter(peer.links.values()))
        owner = peer.hub if to_many else link
        core, name = owner._core, "phx_rpc_share" if to_many else "phx_rpc_put"
        signal.signal(signal.SIGALRM, handler)
        for _ in range(3):
            owner._core = interrupted_in(core, name)
            message = notice(1, nbytes)
            with closing(SentToMany(message.buffers)) as shared, pytest.raises(Interrupted):
                link.send(Message(Kind.NOTICE, 0, "", b"head", shared) if to_many else message, 60.0)
            owner._core = core
        there = c_uint64()
        with pieces(notice(1, nbytes)) as where:
            getattr(core, name)(owner._handle, *where, there)
        assert there.value
        finish(member, peer)

    values(run_ranks(rank, 2))
