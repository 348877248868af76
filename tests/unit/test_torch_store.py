"""The launcher's store answers torch's own client as torch's own server does, and parses nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from tests.support.stores import Served
from tests.support.waiting import soon
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError

from phalanx.membership import launcher_store
from phalanx.membership.client import ended_ranks
from phalanx.membership.launcher_store import (
    ENDED,
    MOST_COMPLAINTS,
    EndedRank,
    SupervisorLine,
    TorchStoreServer,
)
from phalanx.system import interfaces
from phalanx.system.interfaces import owner_of

GREETING = b"\0" + struct.pack("=I", 0x3C85F7CE)


class Attended:
    """A store that this process serves, turn by turn."""

    def __init__(self, **options: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.where = listener.getsockname()
        self.said: list[str] = []
        self.server = TorchStoreServer(listener, say=self.said.append, **options)

    def __enter__(self) -> Attended:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


def test_wait_that_takes_too_long_is_given_up_and_the_connection_goes_on() -> None:
    with Served() as served:
        store, other = served.client(), served.client()
        with pytest.raises(DistStoreError):
            store.wait(["never"], timedelta(milliseconds=50))
        other.set("never", "1")
        store.set("a", "2")
        assert (store.get("a"), store.get("never")) == (b"2", b"1")


def test_waits_end_when_the_keys_come_and_hold_up_nobody() -> None:
    with Served() as served:
        waiting, other = served.client(), served.client()
        got: list[Any] = []

        def meets(store: Any) -> str:
            store.barrier("all", 2, timedelta(seconds=20))
            return "met"

        threads = [
            threading.Thread(target=lambda: got.append(waiting.get("late"))),
            threading.Thread(target=lambda: got.append(served.client().queue_pop("queue"))),
            threading.Thread(target=lambda: got.append(PrefixStore("p", served.client()).multi_get(["a", "b"]))),
            threading.Thread(target=lambda: got.append(meets(served.client()))),
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        assert got == []
        other.set("p/a", "1")
        other.set("p/b", "2")
        other.queue_push("queue", "x")
        other.set("late", "y")
        meets(other)
        for thread in threads:
            thread.join(20)
        assert sorted(map(str, got)) == sorted(map(str, [b"y", b"x", [b"1", b"2"], "met"]))


class ServedWithEnds(Served):
    """A store like that of ``phalanx run``, which learns of the ranks' ends."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(supervisor=SupervisorLine(there, refers=False))
        there.close()

    def tell(self, ended: EndedRank) -> None:
        self._here.send(json.dumps(ended).encode())

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)
        self._here.close()


def test_store_lists_the_ranks_that_have_ended() -> None:
    served = ServedWithEnds()
    with served:
        client, ended = served.client(), EndedRank(2, 77, "h1", "by signal 9 (SIGKILL)")
        assert ended_ranks(client) == []
        served.tell(ended)
        client.wait([ENDED], timedelta(seconds=20))
        assert ended_ranks(PrefixStore("phalanx/0/world/1", client)) == [ended]


def test_unwelcome_connection_is_closed_unread_and_reported() -> None:
    with Attended(is_welcome=lambda peer, here: False) as attended:
        for _ in range(MOST_COMPLAINTS + 6):
            with socket.create_connection(attended.where) as sock:
                sock.sendall(GREETING)
                attended.server.turn(20)
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(10) == b""
        assert len(attended.said) == MOST_COMPLAINTS
        assert attended.said[-1].endswith("further ones are not reported")


def test_connection_from_another_host_waits_for_what_is_known_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_store, "_ANSWER_S", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        theirs,
        ours,
        Attended(is_welcome=lambda peer, here: False, supervisor=SupervisorLine(ours, refers=True)) as attended,
        socket.create_connection(attended.where) as known,
        socket.create_connection(attended.where) as stranger,
    ):
        known.sendall(GREETING + b"\7")
        attended.server.turn(20)
        questions = [json.loads(theirs.recv(4096)) for _ in range(2)]
        assert [tuple(peer) for _, peer, _ in questions] == [known.getsockname(), stranger.getsockname()]
        assert {tuple(here) for _, _, here in questions} == {attended.where}
        theirs.send(b"77")
        theirs.send(str(questions[0][0]).encode())
        attended.server.turn(20)
        attended.server.turn(20)
        assert known.recv(8) == struct.pack("=q", 0)
        assert soon(lambda: attended.server.turn(0.01) or bool(attended.said))  # type: ignore[func-returns-value]
        assert stranger.recv(8) == b""


@pytest.mark.parametrize(
    ("way", "host", "prefix"), [("kernel", "::1", ""), ("list", "127.0.0.1", ""), ("list", "127.0.0.1", "::ffff:")]
)
def test_owner_of_a_connection_is_found_and_of_a_closed_one_is_nobody(
    way: str, host: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "list":
        monkeypatch.setattr(interfaces, "_kernel_answers", lambda: False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        where = listener.getsockname()[:2]
        client = socket.create_connection((prefix + host, where[1]))  # torch's is of IPv6 always
        accepted, peer = listener.accept()
        with accepted:
            assert owner_of(peer[:2], where) == os.geteuid()
            assert owner_of((host, 1), where) is None
            # The kernel keeps this one alive, as root's: the other side has not closed it yet.
            client.sendall(b"x")
            client.close()
            assert owner_of(peer[:2], where) is None
