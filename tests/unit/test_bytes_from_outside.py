"""Whatever bytes come from outside: each parser refuses them with its own error, and each listener serves on.

The claim and the verdict of a join are in ``test_proof.py``, the requests of torch's client in ``test_torch_store.py``.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stores import KEY, Job, claim
from tests.support.waiting import soon

from phalanx.errors import InitializationError
from phalanx.launch.relay import channel
from phalanx.launch.relay.channel import MESSAGE, Channel, Lost
from phalanx.place.place import Place
from phalanx.rendezvous import search
from phalanx.rendezvous.meeting_point import MeetingPoint
from phalanx.store import requests as wire
from phalanx.store.claim import ROLE, Verdict
from phalanx.store.client import JobStore, connect
from phalanx.store.company import Company
from phalanx.store.table import Table
from phalanx.wire.framing import LONGEST_UNPROVEN, PREFIX_BYTES, Malformed, end_of_frame, frame
from phalanx.wire.key import Key
from phalanx.wire.proof import GREETING, GREETING_BYTES, Challenge, NoProof, Proven, Response, WrongKey
from phalanx.wire.session import TAG_BYTES, Session

quick = settings(deadline=None, max_examples=60)
many = settings(deadline=None, max_examples=300)

lengths = st.integers(0, 40) | st.sampled_from([LONGEST_UNPROVEN, LONGEST_UNPROVEN + 1, wire.LONGEST, (1 << 32) - 1])
numbers = st.integers(-5, 5) | st.sampled_from([-(1 << 63), (1 << 63) - 1])
# Lengths that fit what follows them, and lengths that do not.
fields = st.binary(max_size=8).map(lambda text: struct.pack("!I", len(text)) + text)
loose = st.builds(lambda nbytes, text: struct.pack("!I", nbytes) + text, lengths, st.binary(max_size=12))
messages = st.builds(
    lambda code, number, count, parts: struct.pack("!BqI", code, number, count) + b"".join(parts),
    st.integers(0, 255),
    numbers,
    st.integers(0, 4) | lengths,
    st.lists(fields | loose, max_size=4),
)
anything = st.binary(max_size=80) | messages | messages.map(frame) | loose
keys = st.lists(st.sampled_from([b"a", b"b", b"", b"\xff"]) | st.binary(max_size=3), max_size=4)
asked = st.tuples(st.integers(0, 14) | st.integers(0, 255), numbers, keys)


# -- the parsers -------------------------------------------------------------------------------------------------------


@many
@given(anything, st.integers(0, 90), st.integers(0, 20))
def test_a_length_is_within_its_limits_or_malformed(data: bytes, start: int, shortest: int) -> None:
    with contextlib.suppress(Malformed):
        end = end_of_frame(data, start, shortest=shortest, longest=LONGEST_UNPROVEN)
        assert (end is None) == (len(data) < start + PREFIX_BYTES)
        assert end is None or shortest <= end - start - PREFIX_BYTES <= LONGEST_UNPROVEN


@many
@given(anything)
def test_bytes_are_one_request_exactly_or_malformed(data: bytes) -> None:
    with contextlib.suppress(Malformed):
        length = wire.length_of(data)
        if length is not None and length <= len(data):
            assert wire.pack(*wire.unpack(data, length)) == data[:length]


@many
@given(st.lists(asked, max_size=12), st.booleans())
def test_every_request_is_answered_once(program: list[tuple[int, int, list[bytes]]], lost: bool) -> None:
    table = Table()
    answers: list[list[tuple[int, int, Sequence[bytes]]]] = []
    for now, (code, number, given_) in enumerate(program):
        answers.append([])
        parked = table.handle(code, number, given_, lambda *answer, to=answers[-1]: to.append(answer), float(now))
        assert (parked is not None) == (not answers[-1])
        table.expire(now + 0.5)
    if lost:
        table.lose([b"rank 1 has gone"])
    table.expire(1e30)
    table.end("over")
    assert [len(each) for each in answers] == [1] * len(program)
    for (answer,) in answers:
        wire.pack(*answer)
    assert not table._parked


@many
@given(anything, st.integers(0, 3))
def test_a_message_without_its_digest_is_malformed(data: bytes, before: int) -> None:
    sender, receiver = (Session(b"k" * 32, is_listener=listens) for listens in (False, True))
    for number in range(before):
        sealed = bytearray(sender.seal(b"%d" % number))
        receiver.check(sealed, 1)
    with pytest.raises(Malformed):
        receiver.check(bytearray(data + b"t" * TAG_BYTES), len(data))
    receiver.check(bytearray(sender.seal(data)), len(data))


@many
@given(st.binary(max_size=60), st.integers(0, GREETING_BYTES))
def test_bytes_are_a_greeting_or_no_proof(data: bytes, kept: int) -> None:
    challenge = Challenge(KEY, ROLE)
    with contextlib.suppress(NoProof):
        response = Response(KEY, ROLE, challenge.greeting[:kept] + data, ("127.0.0.1", 1), b"")
        assert kept + len(data) == GREETING_BYTES
        with contextlib.suppress(NoProof):
            if not response.missing(data):
                with pytest.raises(WrongKey):
                    response.check(data)


# -- rank 0's store ----------------------------------------------------------------------------------------------------


@quick
@given(st.lists(asked.map(lambda request: wire.pack(*request)) | messages.map(frame) | anything, max_size=6), st.data())
def test_what_one_rank_sends_ends_its_own_connection_at_most(program: list[bytes], data: st.DataObject) -> None:
    """It has proven the key; without one, every process can."""
    with Job(3) as job:
        stores = job.everybody()
        if data.draw(st.booleans(), "all are meeting"):
            for store in stores:
                store.meeting(begins=True)
        line = stores[1]._peer._idle[0]  # type: ignore[union-attr]
        sealed = data.draw(st.integers(0, len(program)), "of which have a digest")
        with contextlib.suppress(ConnectionError):
            for number, message in enumerate(program):
                line.sock.sendall(line.session.seal(message) if number < sealed else message)
        with contextlib.suppress(OSError):
            line.sock.shutdown(socket.SHUT_WR)
        for store in (stores[0], stores[2]):
            with contextlib.suppress(InitializationError):
                store.set("still", "here")
        assert stores[0].get("still") == b"here"
        assert job.server._thread.is_alive()


class Liar:
    """In the place of the store: gives every request the same answer."""

    def __init__(self, *answer: Any) -> None:
        self.answer = answer
        self.company = Company()

    def call(self, *_: Any) -> Any:
        return self.answer


@many
@given(st.integers(0, 5), numbers, keys)
def test_an_answer_that_makes_no_sense_is_said_to_be_none(code: int, number: int, said: list[bytes]) -> None:
    store = JobStore(Liar(code, number, said), timedelta(seconds=1))  # type: ignore[arg-type]
    for ask in (
        lambda: store.get("a"),
        lambda: store.multi_get(["a", "b"]),
        lambda: store.wait(["a"]),
        lambda: store.set("a", "b"),
        lambda: store.add("a", 1),
        lambda: store.compare_set("a", "b", "c"),
        lambda: store.check(["a"]),
        lambda: store.list_keys(),
        lambda: store.wait_for_all(1.0),
    ):
        with contextlib.suppress(dist.DistStoreError, InitializationError):
            ask()


# -- who searches for rank 0, and what it finds ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def one_answer(listener: socket.socket, said: bytes, *, knows_the_key: bool) -> threading.Thread:
    """Something that listens where rank 0 should. If it knows the key, it says ``said`` instead of a verdict."""

    def serve() -> None:
        with listener.accept()[0] as sock, contextlib.suppress(OSError):
            if not knows_the_key:
                sock.sendall(said)
                return
            challenge = Challenge(Key(), ROLE)
            sock.sendall(challenge.greeting)
            data = b""
            while (proven := challenge.check(data, [listener.getsockname()])) is None:
                data += sock.recv(4096)
            assert isinstance(proven, Proven)
            sock.sendall(proven.answer(said))
            sock.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


verdicts = (
    st.binary(max_size=60)
    | st.sampled_from(
        [Verdict("welcome"), Verdict("refused", "\N{SNOWMAN}"), Verdict("other"), Verdict("earlier", "x")]
    ).map(Verdict.encode)
    | st.sampled_from([b"[]", b"{}", b"null", b'{"kind": []}', b'{"kind": "welcome", "reason": 1}', b"[" * 4000])
)
greetings = anything | st.builds(
    lambda said, more: GREETING + b"x" * 32 + said + more, st.binary(max_size=40), st.sampled_from([b"", b"y" * 200])
)


@quick
@given(st.tuples(greetings, st.just(False)) | st.tuples(verdicts, st.just(True)), st.booleans())
def test_what_answers_is_rank_0_or_is_not(listener: socket.socket, answer: tuple[bytes, bool], fixed: bool) -> None:
    host, port = listener.getsockname()
    place = Place("env", 1, 2, None, None, None, None)
    point = MeetingPoint(host, (port,), "" if fixed else "a job", fixed, "a test")
    thread = one_answer(listener, answer[0], knows_the_key=answer[1])
    with contextlib.suppress(OSError, search._NotHere, InitializationError):
        line, where, _ = search._try(place, point, (host, port), Key(), claim(1, 2), 20.0)
        line.close()
        assert (where, answer[1]) == ((host, port), True)
    thread.join(20)
    assert not thread.is_alive()


# -- phalanx run --mpi -------------------------------------------------------------------------------------------------


@many
@given(st.lists(st.binary(min_size=1, max_size=20), max_size=4), anything, st.integers(1, 50))
def test_a_channel_gives_whole_frames_and_then_is_lost(whole: list[bytes], junk: bytes, step: int) -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = (Session(b"k" * 32, is_listener=listens) for listens in (False, True))
    data = b"".join(sender.seal(frame(content)) for content in whole) + junk
    heard: list[bytes] = []
    with ours, theirs:
        link = Channel(ours, receiver)
        with contextlib.suppress(Lost, OSError):
            for at in range(0, len(data), step):
                theirs.sendall(data[at : at + step])
                heard += [kind + content for kind, content in link.receive()]
        theirs.close()
        with pytest.raises(Lost):
            while True:
                heard += [kind + content for kind, content in link.receive()]
    assert heard == whole


class Relay:
    """The relay's door, served by a thread, and what came by it."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.selector = selectors.DefaultSelector()
        self.door, self.invitation = channel.open_door(["127.0.0.1"], self.selector, self.channels.append)
        host, port, _ = self.invitation.rsplit(":", 2)
        self.where = host, int(port)
        self.over = False
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.over:
            for key, _ in self.selector.select(0.01):
                key.data()
            self.door.tend(time.monotonic())


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    made = Relay()
    yield made
    made.over = True
    made.thread.join(20)
    made.door.close()
    made.selector.close()


@quick
@given(st.lists(anything | anything.map(lambda data: GREETING + b"x" * 64 + data), min_size=1, max_size=3))
def test_strangers_at_the_relays_door_keep_no_keeper_out(relay: Relay, said: list[bytes]) -> None:
    with contextlib.ExitStack() as stack:
        for words in said:
            sock = stack.enter_context(socket.create_connection(relay.where, timeout=20))
            with contextlib.suppress(ConnectionError):
                sock.sendall(words)
        keeper = channel.join(relay.invitation)
        keeper.say(event="here")
        assert soon(lambda: bool(relay.channels))
        (admitted,) = relay.channels
        relay.channels.clear()
        frames: list[tuple[bytes, bytes]] = []

        def came() -> bool:
            frames.extend(admitted.receive())
            return bool(frames)

        assert soon(came)
        assert frames == [(MESSAGE, b'{"event": "here"}')]
        keeper.close()
        admitted.close()


def test_a_keeper_is_not_taken_in_by_what_listens_there(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    for words in (b"", b"SSH-2.0\r\n", GREETING, GREETING + b"x" * 300):
        thread = one_answer(listener, words, knows_the_key=False)
        with pytest.raises(OSError, match=r"phalanx run has ended|does not know the job's key"):
            channel.join(f"{host}:{port}:secret")
        thread.join(20)


def test_the_store_is_joined_after_all_that(listener: socket.socket) -> None:
    """The stand-in above speaks the protocol as rank 0 does, so what it was used for could have been let in."""
    thread = one_answer(listener, Verdict("welcome").encode(), knows_the_key=True)
    line, verdict = connect(listener.getsockname(), Key(), claim(1, 2), 20.0)
    assert verdict.kind == "welcome"
    line.close()
    thread.join(20)
