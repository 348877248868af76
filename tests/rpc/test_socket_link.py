"""A link over TCP by itself: who reads it, and that nothing is lost when that changes."""

from __future__ import annotations

import itertools
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from phalanx.rpc.links.contract import Link
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.socket import END_S, SocketLink
from phalanx.rpc.links.unacknowledged import Unacknowledged
from phalanx.rpc.message import Kind, Message
from phalanx.wire.session import Session
from tests.support.waiting import soon

KEY = b"k" * 32
PATIENCE_S = 60.0


class Side:
    """One process's side: it answers requests with what they brought, and notes on which thread each answer came."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Message, threading.Thread]] = {}
        self.served: list[int] = []
        self.notices: list[int] = []
        self.quick = False  # it answers on the thread that has read the request, as quick services do
        self.gates: dict[str, threading.Event] = {}
        self.came = threading.Condition()
        self.over = threading.Event()
        self.numbers = itertools.count(1)

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        if message.kind is Kind.ANSWER:
            with self.came:
                assert message.call not in self.answers
                self.answers[message.call] = message, threading.current_thread()
                self.came.notify_all()
        elif message.kind is Kind.NOTICE:
            self.notices.append(message.call)
        elif may_block or self.quick:
            self._run(link, message)
        else:
            threading.Thread(target=self._run, args=(link, message)).start()

    def _run(self, link: Link, message: Message) -> None:
        self.served.append(message.call)
        if message.service in self.gates:
            self.gates[message.service].wait(PATIENCE_S)
        link.send(Message(Kind.ANSWER, message.call, "", message.head, message.buffers), PATIENCE_S)

    def ended(self, link: Link, why: str) -> None:
        self.over.set()

    def call(self, link: Link, head: bytes, *buffers: bytes, service: str = "echo") -> threading.Thread:
        """Send, and wait for the answer; the thread that brought it."""
        number = next(self.numbers)
        link.send(Message(Kind.REQUEST, number, service, head, [memoryview(part) for part in buffers]), PATIENCE_S)
        link.wait(lambda: number in self.answers, number, PATIENCE_S)
        with self.came:
            assert self.came.wait_for(lambda: number in self.answers, PATIENCE_S)
        answer, thread = self.answers.pop(number)
        assert (answer.head, [bytes(part) for part in answer.buffers]) == (head, list(buffers))
        return thread


def connected(buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection, whose kernel keeps about so much of what nobody takes; by default as it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    if buffer_bytes:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


@contextmanager
def linked(
    mend: Callable[[SocketLink, str], None] | None = None,
) -> Iterator[tuple[tuple[Side, SocketLink], tuple[Side, SocketLink]]]:
    """Two sides of one link, in one process."""
    near, far = connected()
    ends, readers = [], []
    for sock, is_listener in ((near, False), (far, True)):
        side = Side()
        readers.append(Readers())
        link = SocketLink(sock, Session(KEY, is_listener=is_listener), side, b"", readers[-1], mend)
        link.begin()
        ends.append((side, link))
    try:
        yield ends[0], ends[1]
    finally:
        for _, link in ends:
            link.close()
        for each in readers:
            each.close()


def called_and_awaited(side: Side, link: SocketLink, other: Side) -> threading.Thread:
    """Call the other side, which answers when the caller waits: else an answer may be quicker; who brought it."""
    gate = other.gates["slow"] = threading.Event()
    assert soon(lambda: not link._reading.locked())  # by a thread of the link, for what came before

    def open_gate() -> None:
        assert soon(link._reading.locked)  # by the caller: there is nothing yet for others to read
        gate.set()

    opener = threading.Thread(target=open_gate)
    opener.start()
    thread = side.call(link, b"head", service="slow")
    opener.join()
    return thread


def test_the_thread_that_waits_for_an_answer_reads_it() -> None:
    with linked() as ((side, link), (other, _)):
        threads = [called_and_awaited(side, link, other) for _ in range(20)]
    assert threads.count(threading.current_thread()) > 10


def test_while_nobody_waits_the_threads_of_the_link_read() -> None:
    with linked() as ((side, link), (other, far)):
        for number in range(100):
            link.send(Message(Kind.REQUEST, number, "echo", b"", []), PATIENCE_S)
        with side.came:
            assert side.came.wait_for(lambda: len(side.answers) == 100, PATIENCE_S)
        assert other.call(far, b"back") is not None


def test_a_caller_that_reads_serves_what_the_other_side_asks_meanwhile() -> None:
    with linked() as ((side, link), (other, far)):
        other.gates["slow"] = threading.Event()
        outcome: list[threading.Thread] = []
        waiting = threading.Thread(target=lambda: outcome.append(side.call(link, b"x", service="slow")))
        waiting.start()
        while not other.served:
            time.sleep(0.001)
        for number in range(20):  # the only reader there is the one that waits for a slow answer
            other.call(far, b"%d" % number, b"z" * (number % 3) * 50_000)
        other.gates["slow"].set()
        waiting.join(PATIENCE_S)
        assert len(outcome) == 1


def test_sides_that_ask_each_other_in_turn_read_their_own_answers() -> None:
    with linked() as (near, far):
        threads = [
            called_and_awaited(side, link, other)
            for _ in range(30)
            for (side, link), (other, _) in ((near, far), (far, near))
        ]
        assert threads.count(threading.current_thread()) > 30


def test_a_request_that_takes_long_holds_up_no_other() -> None:
    with linked() as ((side, link), (other, _)):
        other.gates["slow"] = threading.Event()
        slow = [threading.Thread(target=side.call, args=(link, b"x"), kwargs={"service": "slow"}) for _ in range(20)]
        for thread in slow:
            thread.start()
        side.call(link, b"quick")
        while len(other.served) < 21:
            time.sleep(0.001)
        other.gates["slow"].set()
        for thread in slow:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_waiting_ends_when_the_call_has_ended_otherwise() -> None:
    with linked() as ((_, link), _):
        given_up = threading.Event()
        timer = threading.Timer(0.2, given_up.set)
        timer.start()
        began = time.monotonic()
        link.wait(given_up.is_set, 1, PATIENCE_S)
        link.wait(lambda: False, 1, 0.2)
        timer.join()
        assert time.monotonic() - began < PATIENCE_S / 2


def test_waiting_ends_when_the_link_ends() -> None:
    with linked() as ((side, link), (_, far)):
        timer = threading.Timer(0.2, far.close)
        timer.start()
        link.wait(side.over.is_set, 1, PATIENCE_S)
        timer.join()
        assert side.over.is_set()


def test_a_caller_that_is_interrupted_while_it_delivers_leaves_the_rest_to_others() -> None:
    with linked() as ((side, link), (_, far)):
        deliver, reached = side.deliver, threading.Event()

        def interrupted(link: Link, message: Message, *, may_block: bool) -> None:
            if message.call == 1:
                raise KeyboardInterrupt
            deliver(link, message, may_block=may_block)
            reached.set()

        side.deliver = interrupted  # type: ignore[method-assign]
        with link._reading:  # so that both come at once
            for number in (1, 2):
                far.send(Message(Kind.NOTICE, number, "note", b"", []), PATIENCE_S)
            time.sleep(0.2)
        with pytest.raises(KeyboardInterrupt):
            link.wait(lambda: False, 1, PATIENCE_S)
        assert reached.wait(PATIENCE_S)
        assert side.notices == [2]


def test_a_caller_that_has_to_send_much_while_it_delivers_lets_others_read() -> None:
    with linked() as ((side, link), (other, far)):
        side.quick = True
        other.gates["slow"] = threading.Event()
        waiting = threading.Thread(target=side.call, args=(link, b"x"), kwargs={"service": "slow"})
        waiting.start()
        for _ in range(5):  # each answer is more than may be under way without a word of the other side
            other.call(far, b"", bytes(6 << 20))
        other.gates["slow"].set()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()


def test_a_caller_that_reads_sends_what_the_kernel_had_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that is woken when there is room again finds that the caller reads, and is woken once only.

    What is kept back may be what lets the other side send the rest of the answer that the caller waits for.
    """
    with linked() as ((side, link), (other, _)):
        gate = other.gates["slow"] = threading.Event()
        caller = threading.Thread(target=side.call, args=(link, b"head"), kwargs={"service": "slow"})
        caller.start()
        assert soon(link._reading.locked)
        with monkeypatch.context() as patch:
            patch.setattr(link, "_try_to_send", lambda parts: 0)
            assert link._writing.acquire(timeout=PATIENCE_S)
            link._acknowledges = True
            link._stop_writing()
            assert link._unsent
            time.sleep(0.2)  # for the thread to be woken
        began = time.monotonic()
        assert soon(lambda: not link._unsent)
        took_s = time.monotonic() - began
        gate.set()
        caller.join()
        assert took_s < PATIENCE_S / 2  # and not when the caller gives up


def test_what_is_sent_again_is_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection breaks while a message is sent, and another one takes its place as the sender returns.

    The sender may then change its memory, while the message is still being sent again.
    """
    kept, sending_again = threading.Event(), threading.Event()
    own = Unacknowledged.own

    def own_late(frames: Unacknowledged) -> None:
        if threading.current_thread() is sender:
            kept.set()
            sending_again.wait(PATIENCE_S)
        own(frames)

    monkeypatch.setattr(Unacknowledged, "own", own_late)
    with linked(mend=lambda link, why: None) as ((side, link), (_, other)):
        assert link.suspend()
        assert other.suspend()
        memory = bytearray(b"a" * 2_000_000)
        message = Message(Kind.REQUEST, 1, "echo", b"head", [memoryview(memory)])
        sender = threading.Thread(target=link.send, args=(message, PATIENCE_S))
        sender.start()
        assert kept.wait(PATIENCE_S)
        near, far = connected(buffer_bytes=10_000)
        resumer = threading.Thread(target=link.resume, args=(near, Session(KEY, is_listener=False), b"", 0))
        resumer.start()
        assert select.select([far], [], [], PATIENCE_S)[0]
        sending_again.set()
        sender.join()
        assert resumer.is_alive()
        memory[:] = b"b" * len(memory)
        other.resume(far, Session(KEY, is_listener=True), b"", 0)
        resumer.join()
        assert soon(lambda: 1 in side.answers)
        assert [bytes(part) for part in side.answers[1][0].buffers] == [b"a" * len(memory)]


@pytest.mark.parametrize("seed", range(3))
def test_no_message_is_lost_or_doubled_when_many_threads_call_in_both_directions(seed: int) -> None:
    def work(side: Side, link: SocketLink, seed: int, failed: list[BaseException]) -> None:
        random_ = random.Random(seed)
        try:
            for number in range(60):
                size = random_.choice([0, 1, 100, 10_000, 65_000, 70_000, 400_000])
                side.call(link, b"%d" % number, random_.randbytes(size))
        except BaseException as error:
            failed.append(error)

    with linked() as ends:
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=work, args=(side, link, 100 * seed + 10 * number + way, failed))
            for way, (side, link) in enumerate(ends)
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for number in range(200):
            ends[0][1].send(Message(Kind.NOTICE, number, "note", b"", []), PATIENCE_S)
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert failed == []
        ends[0][0].call(ends[0][1], b"the last")
        assert ends[1][0].notices == list(range(200))
        for side, _ in ends:
            assert side.answers == {}


def test_links_to_peers_that_take_nothing_are_closed_in_the_time_of_one() -> None:
    readers, links, peers = Readers(), [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(8):
            links.append(
                SocketLink(
                    socket.create_connection(listener.getsockname()),
                    Session(KEY, is_listener=False),
                    Side(),
                    b"",
                    readers,
                )
            )
            peers.append(listener.accept()[0])
    for link in links:
        link.begin()
        with pytest.raises(TimeoutError):
            while True:
                link.send(Message(Kind.NOTICE, 0, "note", bytes(60_000), []), 0.05)
    began = time.monotonic()
    for link in links:
        link.close(began + END_S)
    assert time.monotonic() - began < 4 * END_S
    readers.close()
    for peer in peers:
        peer.close()
