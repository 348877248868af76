"""Processes that are joined by shared memory as workers are, with a receiver that serves what the tests ask for."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.rpc.links.contract import Link
from phalanx.rpc.links.shared import SharedHub, SharedLink
from phalanx.rpc.message import Kind, Message
from tests.support.ranks import Member

PATIENCE_S = 60.0


class Peer:
    """One process: its hub, its links, what it got, and calls over them.

    Args:
        handlers: what a service does with the link and the message; what it returns is sent back as head and buffers.
        notice: gets every notice.
    """

    def __init__(
        self,
        slab_bytes: int = 1 << 20,
        notice: Callable[[Message], None] = lambda message: None,
        **handlers: Callable[[Link, Message], tuple[bytes, Sequence[memoryview]]],
    ) -> None:
        self.handlers = {"echo": lambda link, message: (bytes(message.head), message.buffers), **handlers}
        self.notice = notice
        self.answers: dict[int, Message] = {}
        self.came = threading.Condition()
        self.ends: list[str] = []
        self.links: dict[int, SharedLink] = {}
        self._numbers = itertools.count(1)
        self.hub = SharedHub(self, slab_bytes=slab_bytes)

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        """See ``Receiver``."""
        if message.kind is Kind.NOTICE:
            self.notice(message)
        elif message.kind is Kind.REQUEST:
            head, buffers = self.handlers[message.service](link, message)
            with contextlib.suppress(Exception):  # the caller may be gone
                link.send(Message(Kind.ANSWER, message.call, "", head, buffers), PATIENCE_S)
        else:
            with self.came:
                self.answers[message.call] = message
                self.came.notify_all()

    def ended(self, link: Link, why: str) -> None:
        """See ``Receiver``."""
        with self.came:
            self.ends.append(why)
            self.came.notify_all()

    def call(self, link: Link, head: bytes = b"", buffers: Sequence[memoryview] = (), service: str = "echo") -> Message:
        """Ask and wait. Raises EOFError if the link ends first."""
        number = next(self._numbers)
        link.send(Message(Kind.REQUEST, number, service, head, buffers), PATIENCE_S)
        link.wait(lambda: number in self.answers or bool(self.ends), number, PATIENCE_S)
        with self.came:
            if not self.came.wait_for(lambda: number in self.answers or bool(self.ends), PATIENCE_S):
                raise TimeoutError(f"call {number} was not answered")
            if number not in self.answers:
                raise EOFError(self.ends[0])
            return self.answers.pop(number)

    def wait_for_end(self) -> str:
        """Why the first link ended."""
        with self.came:
            assert self.came.wait_for(lambda: bool(self.ends), PATIENCE_S), "no link has ended"
            return self.ends[0]

    def meet(self, member: Member) -> None:
        """Be joined to every other rank."""
        for other in range(member.size):
            if other < member.rank:
                offer = read(member.folder / f"offer-{other}-{member.rank}")
                link = self.hub.accept(offer)
                assert link is not None
                self.links[other] = link
                link.begin()
                write(member.folder / f"accepted-{other}-{member.rank}", b"yes")
            elif other > member.rank:
                offer = self.hub.offer()
                write(member.folder / f"offer-{member.rank}-{other}", offer)
                read(member.folder / f"accepted-{member.rank}-{other}")
                self.links[other] = self.hub.confirm(offer)
                self.links[other].begin()


def write(path: Path, data: bytes) -> None:
    """Make a file that is whole as soon as it is there."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")  # several processes may make the same file
    part.write_bytes(data)
    os.rename(part, path)


def read(path: Path) -> bytes:
    """The content of a file that another process makes."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < until, f"nobody made {path.name}"
        time.sleep(0.001)
    return path.read_bytes()


def finish(member: Member, peer: Peer) -> None:
    """Close the hub when every rank is done."""
    write(member.folder / f"done-{member.rank}", b"")
    for other in range(member.size):
        read(member.folder / f"done-{other}")
    peer.hub.close()


def mappings() -> int:
    """How many pieces of memory of links this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:phalanx-rpc")
