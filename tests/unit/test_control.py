"""The control socket between the launcher and the process that starts the ranks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from phalanx.launch.rank.descriptors import LARGEST_PIECE, Control, Descriptors, open_descriptors
from phalanx.launch.relay.announcer import Announcer
from phalanx.launch.relay.crew import Member
from phalanx.topology.table import RankRow

RANKS = 1_500
PIDS = [4_194_304 - rank for rank in range(RANKS)]
# The text of a message whose only value has no characters.
EMPTY = len(json.dumps({"text": ""}))


@pytest.fixture
def descriptors() -> Descriptors:
    return open_descriptors(0, "test-control")


def received(send: Callable[[], None], sender: Control, receiver: Control) -> list[dict[str, Any]]:
    """All that arrives while another thread sends, and then closes its end: no error here makes this wait for ever."""

    def send_and_close() -> None:
        try:
            send()
        finally:
            sender.close()

    thread = threading.Thread(target=send_and_close)
    thread.start()
    try:
        return list(iter(receiver.receive, None))
    finally:
        receiver.close()
        thread.join()


def test_a_signals_handler_may_send_when_the_socket_has_been_closed() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control = Control(here)
    control.send(do="stacks")
    assert there.recv(1 << 16)
    control.close()
    control.send(do="stacks")
    assert not there.recv(1 << 16)
    there.close()


def test_what_a_relay_says_of_1500_ranks_arrives_whole(descriptors: Descriptors) -> None:
    rows = [
        RankRow(rank, rank // 8, f"node-{rank // 8:04}.cluster.example.org", rank % 8, f"cuda:{rank % 8}", pid, 12, 6)
        for rank, pid in enumerate(PIDS)
    ]
    announcer = Announcer(descriptors, [Member(rank, {}, pid=pid) for rank, pid in enumerate(PIDS)])

    def announce() -> None:
        announcer.place(rows, "the note")
        announcer.start()

    placed, started = received(announce, descriptors.zygote, descriptors.supervisor)
    descriptors.close_files()
    assert len(json.dumps(placed)) > 3 * LARGEST_PIECE
    assert placed == {"event": "placed", "rows": [asdict(row) for row in rows], "notes": ["the note"]}
    assert started.pop("time") > 0
    assert started == {"event": "started", "pids": PIDS}


@pytest.mark.parametrize("direction", ["to the supervisor", "from the supervisor"])
def test_messages_at_the_limits_of_a_piece_arrive_whole_in_order(descriptors: Descriptors, direction: str) -> None:
    ends = descriptors.zygote, descriptors.supervisor
    sender, receiver = ends if direction == "to the supervisor" else ends[::-1]
    lengths = [pieces * LARGEST_PIECE + more for pieces in (1, 2, 5) for more in (-1, 0, 1)]
    texts = ["".join(chr(ord("a") + at % 26) for at in range(length - EMPTY)) for length in lengths]

    def send() -> None:
        for text in texts:
            sender.send(text=text)
        sender.send(pids=PIDS)

    assert received(send, sender, receiver) == [*({"text": text} for text in texts), {"pids": PIDS}]
    descriptors.close_files()
