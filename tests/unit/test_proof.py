"""Which processes the store lets in: both sides prove the key before a byte counts as a request.

The handshake itself, for every role, is tested in ``test_wire.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stores import KEY, Job, claim

from phalanx.store import requests as wire
from phalanx.store import server as store_server
from phalanx.store.claim import ROLE, Claim, Verdict
from phalanx.store.client import connect
from phalanx.store.seats import Seats
from phalanx.wire import door, framing, proof
from phalanx.wire.key import Key
from phalanx.words import tell

OTHER = Key(b"another key than it", "another test")


def closed(sock: socket.socket) -> bool:
    """Whether the other side closes the connection, having said nothing after its greeting."""
    with sock:
        heard = b""
        try:
            while data := sock.recv(4096):
                heard += data
        except ConnectionResetError:
            pass
    return len(heard) <= proof.GREETING_BYTES


@pytest.mark.parametrize("size", [2, 3, 5])
def test_who_knows_the_key_comes_in_and_uses_the_store(size: int) -> None:
    with Job(size) as job:
        stores = job.everybody()
        for rank, store in enumerate(stores):
            store.set(f"rank {rank}", str(rank))
        assert [store.multi_get([f"rank {rank}" for rank in range(size)]) for store in stores] == [
            [str(rank).encode() for rank in range(size)]
        ] * size
        assert job.said == []


def test_without_a_key_the_same_is_spoken() -> None:
    with Job(2, Key()) as job:
        job.join(1).set("a", "b")
        assert job.ranks[0].get("a") == b"b"
        with pytest.raises(proof.WrongKey):
            job.knock(claim(1, 2), KEY)


def test_a_wrong_key_is_told_on_both_sides() -> None:
    with Job(2) as job:
        with pytest.raises(proof.WrongKey):
            job.knock(claim(1, 2), OTHER)
        assert job.heard("refused a connection from 127.0.0.1, which proves another key than rank 0's (a test)")
        # Its seat is still free for the one who knows it.
        job.join(1)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 200,
        b"\x80\x04\x95" + b"x" * 500,  # a pickle's beginning
        proof.GREETING + b"x" * 64 + struct.pack("!I", 60000) + b"x" * 60000,
        wire.pack(wire.SET, 0, [b"key", b"value"]),
    ],
)
def test_garbage_is_refused_unread(said: bytes) -> None:
    with Job(2) as job:
        sock = job.stranger()
        sock.sendall(said)
        assert closed(sock)
        assert job.heard("sent no proof that it belongs to the job")
        assert job.ranks[0].num_keys() == 0
        job.join(1).set("a", "b")


def test_a_silent_stranger_is_sent_away_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PATIENCE_S", 10.0)
    with Job(2) as job:
        strangers = [job.stranger() for _ in range(5)]
        strangers[1].sendall(proof.GREETING)
        started = time.monotonic()
        job.join(1).set("a", "b")
        assert time.monotonic() - started < 10.0
        for stranger in strangers:
            assert closed(stranger)
        assert job.heard("was silent for 10 s")


def test_a_port_scan_is_told_of_a_few_times_only() -> None:
    with Job(2) as job:
        for _ in range(40):
            with job.stranger() as sock:
                sock.sendall(b"hello?" * 20)
                sock.recv(4096)
                closed(sock)
        job.join(1)
        assert len(job.said) == store_server.MOST_COMPLAINTS
        assert job.said[-1].endswith("further ones are not reported")


class Recorder:
    """A relay before a store, which keeps what each side says."""

    def __init__(self, job: Job) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.where = self.listener.getsockname()
        self.said: dict[str, bytes] = {}
        self.thread = threading.Thread(target=self.relay, args=(job,))
        self.thread.start()

    def relay(self, job: Job) -> None:
        with self.listener, self.listener.accept()[0] as rank, job.stranger() as store:
            for name, source, sink in (("greeting", store, rank), ("proof", rank, store), ("verdict", store, rank)):
                with contextlib.suppress(ConnectionResetError):
                    self.said[name] = source.recv(8192)
                    sink.sendall(self.said[name])


def test_a_join_that_another_process_passes_on_is_refused_and_its_proof_is_worth_nothing() -> None:
    with Job(3) as job:
        recorder = Recorder(job)
        with pytest.raises(OSError, match=r"closed|reset"):
            connect(recorder.where, KEY, claim(1, 3), 20.0)
        recorder.thread.join(20)
        dialled = f"127.0.0.1 port {recorder.where[1]}, not for 127.0.0.1 port {job.where[1]}"
        assert job.heard(f"which was meant for {dialled}: another process has passed it on")
        with job.stranger() as again:
            assert again.recv(4096) != recorder.said["greeting"]
            again.sendall(recorder.said["proof"])
            answer = again.recv(4096)
        assert job.heard("proves another key")
        # What it hears proves nothing to it either, and lets it in nowhere.
        with pytest.raises(proof.WrongKey):
            proof.Response(OTHER, ROLE, recorder.said["greeting"], recorder.where, b"").check(answer)
        job.join(1).set("a", "b")


def test_rank_0_must_prove_the_key_too() -> None:
    """Somebody listens where rank 0 should, and repeats what a real rank 0 has once said, or what it is told."""
    for liar in (lambda proven: proven[proof.GREETING_BYTES :], lambda _: b"x" * 34):
        listener = socket.create_server(("127.0.0.1", 0))

        def pretend(listener: socket.socket = listener, liar: object = liar) -> None:
            with listener, listener.accept()[0] as sock:
                sock.sendall(proof.Challenge(OTHER, ROLE).greeting)
                said = sock.recv(8192)
                digest = liar(said)[:32]  # type: ignore[operator]
                sock.sendall(digest + framing.frame(Verdict("welcome").encode()))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(proof.WrongKey):
            connect(listener.getsockname(), KEY, claim(1, 2), 20.0)
        thread.join(20)


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\0" * 100])
def test_something_else_that_listens_there_is_no_rank_0(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(greeting)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(proof.NoProof):
            connect(listener.getsockname(), KEY, claim(1, 2), 20.0)
        thread.join(20)


@pytest.mark.parametrize(
    ("who", "word", "said"),
    [
        (claim(1, 3), "refused", "rank 1 (pid 1001 on h1) was started for a world of 3, rank 0 (pid 1000 on h0) for 2"),
        (claim(0, 2, pid=7), "refused", "there are two of rank 0: pid 7 on h0 and pid 1000 on h0"),
        (claim(2, 2), "refused", "there is no rank 2 in a world of 2 (pid 1002 on h2)"),
        (claim(-1, 2), "refused", "there is no rank -1"),
        (claim(1, 2, attempt=0, opening=1), "refused", "is of attempt 0, which is over; rank 0 (pid 1000 on h0) is of"),
        (claim(1, 2, attempt=1, opening=0), "refused", "opens its world number 0, and rank 0 (pid 1000 on h0) its"),
        (claim(1, 2, attempt=2, opening=0), "earlier", "is still in attempt 1"),
        (claim(1, 2, attempt=1, opening=2), "earlier", "is still in attempt 1, world 1"),
        (claim(1, 2, job="another"), "other", ""),
        (claim(1, 2, attempt=1, opening=1, token="guessed"), "welcome", ""),
    ],
)
def test_who_belongs_elsewhere_is_told_in_words(who: Claim, word: str, said: str) -> None:
    if who.attempt == 0 and who.opening == 0 and not who.job:
        who = Claim(**{**asdict(who), "attempt": 1, "opening": 1})
    with Job(2, attempt=1, opening=1) as job:
        verdict = job.knock(who)
        assert verdict.kind == word
        assert said in verdict.reason
        assert (word == "refused") == job.heard(
            f"refused a process: {verdict.reason}", 20.0 if word == "refused" else 0
        )


def test_a_second_process_of_a_rank_is_refused_at_once_naming_both() -> None:
    with Job(3) as job:
        job.join(1)
        started = time.monotonic()
        verdict = job.knock(claim(1, 3, pid=77, host="elsewhere"))
        assert time.monotonic() - started < 15  # not the store's timeout
        assert verdict.reason == "there are two of rank 1: pid 77 on elsewhere and pid 1001 on h1"
        assert job.heard(verdict.reason)
        assert job.knock(claim(1, 3, pid=77, token="guessed")).kind == "refused"


def test_a_rank_that_leaves_before_all_have_come_may_come_again() -> None:
    with Job(3) as job:
        job.join(1)
        job.ranks.pop(1).end()
        assert job.heard("rank 1 (pid 1001 on h1) has left again before all ranks had come")
        job.everybody()
        assert job.server.wait_for_all(0)
        job.ranks.pop(2).end()
        assert job.knock(claim(2, 3, pid=5)).kind == "refused"


def test_a_host_that_is_printed_cannot_move_the_cursor() -> None:
    with Job(2) as job:
        verdict = job.knock(claim(0, 2, host="h\x1b[2J\n1"))
        assert verdict.reason.startswith("there are two of rank 0: pid 1000 on h[2J1 and")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "one"},
        {"rank": True},
        {"rank": 10**30},
        {"node_rank": []},
        {"host": ["h"]},
        {"token": "\ud800"},
        {"job": "\udfff"},
        {"more": 1},
        {"text": "[" * 1500},
    ],
    ids=str,
)
def test_a_claim_of_the_wrong_form_ends_its_connection_alone(wrong: dict[str, Any]) -> None:
    """With an open join anybody can prove the key, so rank 0 must survive whatever a stranger claims."""

    class Wrong(Claim):
        def encode(self) -> bytes:
            return wrong["text"].encode() if "text" in wrong else json.dumps({**asdict(self), **wrong}).encode()

    with Job(2, Key()) as job:
        with pytest.raises((proof.NoProof, ConnectionError)):
            job.knock(Wrong(**asdict(claim(1, 2))))
        assert job.heard("sent no proof that it belongs to the job")
        job.join(1).set("a", "b")


def test_a_reason_that_would_be_too_long_to_send_is_cut() -> None:
    verdict = Verdict("refused", "\N{SNOWMAN}" * 5000)
    assert len(verdict.encode()) <= framing.LONGEST_UNPROVEN
    assert Verdict.decode(verdict.encode()).reason.startswith("\N{SNOWMAN}" * 100)


# -- whatever a stranger sends -------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200)
@given(
    changes=st.dictionaries(st.sampled_from([*asdict(claim(1, 3)), "more"]), anything, max_size=4),
    gone=st.sets(st.sampled_from(list(asdict(claim(1, 3)))), max_size=1),
)
def test_any_claim_is_refused_or_judged_and_its_reason_can_be_sent(changes: dict[str, Any], gone: set[str]) -> None:
    said = {name: value for name, value in {**asdict(claim(1, 3)), **changes}.items() if name not in gone}
    seats = Seats(claim(0, 3))
    try:
        decoded = Claim.decode(json.dumps(said).encode())
    except proof.NoProof:
        return
    for _ in range(2):
        verdict = seats.judge(decoded)
        assert Verdict.decode(verdict.encode()).kind == verdict.kind
        verdict.encode().decode()
        seats.describe_missing().encode()


@settings(max_examples=200)
@given(data=st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_claim_or_verdict_are_said_to_be_none(data: bytes) -> None:
    for decode in (Claim.decode, Verdict.decode):
        with contextlib.suppress(proof.NoProof):
            decode(data)


def test_deeply_nested_bytes_are_no_claim_or_verdict() -> None:
    for decode in (Claim.decode, Verdict.decode):
        with pytest.raises(proof.NoProof):
            decode(b"[" * 4000)


@pytest.mark.parametrize("more", [{"node_rank": []}, {"rank": True}, {"host": "\ud800"}, {"host": 7}, {"token": None}])
def test_one_message_of_a_stranger_does_not_end_an_open_join(more: dict[str, Any]) -> None:
    with Job(2, Key()) as job:
        said = json.dumps({**asdict(claim(1, 2)), **more}).encode()
        with job.stranger() as sock:
            greeting = sock.recv(proof.GREETING_BYTES, socket.MSG_WAITALL)
            sock.sendall(proof.Response(Key(), ROLE, greeting, job.where, said).message)
            assert closed(sock)
        job.join(1).set("a", "b")
        assert job.ranks[0].get("a") == b"b"


def test_a_console_that_nobody_reads_does_not_end_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w") as console:
        monkeypatch.setattr(sys, "stderr", console)
        with Job(2, say=tell) as job:
            for _ in range(3):
                with job.stranger() as sock:
                    sock.sendall(b"hello?" * 20)
                    closed(sock)
            job.join(1).set("a", "b")


def test_600_silent_strangers_shut_nobody_out() -> None:
    with Job(2) as job, contextlib.ExitStack() as stack:
        store = job.join(1)
        for _ in range(600):
            stack.enter_context(job.stranger())
        with ThreadPoolExecutor(8) as threads:  # each call has a connection of its own
            got = [threads.submit(store.get, f"key {number}") for number in range(8)]
            for number in range(8):
                job.ranks[0].set(f"key {number}", str(number))
            assert [each.result(60) for each in got] == [str(number).encode() for number in range(8)]


def test_a_connection_that_is_closed_before_the_proof_is_tried_again_and_not_called_the_end_of_rank_0() -> None:
    with Job(2) as job, socket.create_server(("127.0.0.1", 0)) as front:
        store = job.join(1)
        line = store._peer._idle.pop()  # type: ignore[union-attr]
        store._peer._where = front.getsockname()  # type: ignore[union-attr]

        def turn_away_twice() -> None:
            for _ in range(2):
                front.accept()[0].close()
            store._peer._where = job.where  # type: ignore[union-attr]

        thread = threading.Thread(target=turn_away_twice)
        thread.start()
        store.set("a", "b")
        thread.join(20)
        line.close()
        assert job.ranks[0].get("a") == b"b"
