"""Workers that talk over TCP, as between hosts, though one is stopped or cannot share memory."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from phalanx import rpc
from phalanx.errors import CallTimeout
from phalanx.rpc import connections, session
from phalanx.rpc.links.contract import Kind, LinkEnded, Message
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.shared import Offer, SharedHub, SharedLink
from phalanx.rpc.links.socket import SocketLink
from phalanx.wire.session import Session
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member
from tests.support.waiting import soon, stop

LARGE = torch.zeros(8 << 20)  # more than the connection holds
STOPPED_S = 2.5  # longer than a host that acknowledges nothing is waited for


def test_stopped_worker_is_not_lost_and_holds_up_nobody_for_long() -> None:
    """Whether it is called for the first time then, or is sent more than it can take."""

    def body(member: Member) -> None:
        if member.rank == 1:
            member.await_said("stopped")
            assert rpc.call(2, workers.add, 1, 2) == 3  # for the first time
        if member.rank:
            return
        pid = rpc.call(2, workers.pid)
        since = time.monotonic()
        stop(pid)
        try:
            member.say("stopped")
            # What the quicker ones wait for takes as long as the test may.
            large = threading.Thread(target=rpc.call, args=(2, torch.numel, LARGE), kwargs={"timeout_s": 1000.0})
            large.start()
            for argument, timeout_s in ((LARGE, STOPPED_S), (torch.ones(1), 0.3)):
                with pytest.raises(CallTimeout):
                    rpc.call(2, torch.numel, argument, timeout_s=timeout_s)
            assert large.is_alive()
            assert time.monotonic() - since > STOPPED_S
        finally:
            os.kill(pid, signal.SIGCONT)
        large.join()
        assert rpc.call(2, torch.numel, LARGE) == LARGE.numel()

    with_workers(body, 3, tcp=True)


def test_worker_that_cannot_attach_anothers_memory_talks_over_tcp() -> None:
    def out_of_reach(hub: SharedHub, offer: Offer) -> SharedLink:
        hub.withdraw(offer)
        raise LinkEnded("its shared memory is out of reach: Permission denied")

    def before(member: Member) -> None:
        vars(connections)["SharedHub"] = type("Blind", (SharedHub,), {"confirm": out_of_reach})

    def body(member: Member) -> Any:
        changes: list[str] = []
        watch = rpc.watch(lambda worker, event: changes.append(event))
        assert soon(lambda: bool(changes))
        for number in range(20):
            assert rpc.call(next_of(member), workers.add, number, 1) == number + 1
        member.meet("called")
        watch.stop()
        own = session.worker()
        link: Any = own._connections.link_now(own.directory.find(next_of(member)))
        return link.name, set(changes)

    assert with_workers(body, 2, before=before) == [("tcp", {"came"})] * 2


def test_messages_behind_an_interrupted_one_are_delivered_by_others() -> None:
    side, readers = Mock(), Readers()
    side.deliver.side_effect = [KeyboardInterrupt, None]
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    link, far = (SocketLink(end, Session(b"k" * 32, is_listener=end is ends[1]), side, readers) for end in ends)
    link.begin()
    with link._reading:  # so that both are read at once
        for number in (1, 2):
            far.send(Message(Kind.NOTICE, number, "note", b"", []), 60)
    with pytest.raises(KeyboardInterrupt):
        link.wait(lambda: False, 1, 60)
    assert soon(lambda: side.deliver.call_count == 2)
    for each in (far, link, readers):
        each.close()
