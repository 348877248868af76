"""Which processes the store lets in, and what the others are told.

The handshake itself is tested in ``test_wire.py``, what strangers get in ``test_listeners.py``, and claims that were
changed in ``test_fuzzed_bytes.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict

import pytest
from tests.support.stores import KEY, Job, claim
from tests.support.waiting import soon

from phalanx.membership import store_server
from phalanx.membership.store_protocol import ROLE, Claim, Verdict
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


def test_each_stranger_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(2) as job:
        with pytest.raises(proof.WrongKey):
            job.knock(claim(1, 2), OTHER)
        assert job.heard("refused a connection from 127.0.0.1, which proves another key than rank 0's (a test)")
        with job.stranger() as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert closed(sock)
        no_proof = "sent no proof that it belongs to the job"
        assert job.heard(no_proof)
        with job.stranger() as sock:
            greeting = sock.recv(proof.GREETING_BYTES, socket.MSG_WAITALL)
            sock.sendall(proof.Response(KEY, ROLE, greeting, ("127.0.0.1", 9), claim(1, 2).encode()).message)
            assert closed(sock)
        dialled = f"127.0.0.1 port 9, not for 127.0.0.1 port {job.where[1]}"
        assert job.heard(f"which was meant for {dialled}: another process has passed it on")
        monkeypatch.setattr(door, "PATIENCE_S", 0.3)
        silent = [job.stranger() for _ in range(2)]
        silent[1].sendall(proof.GREETING)
        greeted = [sock.recv(1) for sock in silent]
        monkeypatch.setattr(door, "PATIENCE_S", 60.0)  # for the one who comes now, whom a busy machine may hold up
        job.join(1).set("a", "b")
        assert greeted == [proof.GREETING[:1]] * 2
        assert all(map(closed, silent))
        assert soon(lambda: sum(no_proof in line for line in job.said) == 3)


def test_port_scan_is_reported_a_few_times_only() -> None:
    with Job(2) as job:
        for _ in range(40):
            with job.stranger() as sock:
                sock.sendall(b"hello?" * 20)
                assert closed(sock)
        job.join(1)
        assert len(job.said) == store_server.MOST_COMPLAINTS
        assert job.said[-1].endswith("further ones are not reported")


@pytest.mark.parametrize(
    ("who", "word", "said"),
    [
        (claim(1, 3), "refused", "rank 1 (pid 1001 on h1) was started for a world of 3, rank 0 (pid 1000 on h0) for 2"),
        (claim(0, 2, pid=7), "refused", "there are two of rank 0: pid 7 on h0 and pid 1000 on h0"),
        (claim(2, 2), "refused", "there is no rank 2 in a world of 2 (pid 1002 on h2)"),
        (claim(-1, 2), "refused", "there is no rank -1"),
        (claim(1, 2, attempt=0, opening=1), "refused", "is of attempt 0, which is over; rank 0 (pid 1000 on h0) is of"),
        (claim(1, 2, attempt=1, opening=0), "refused", "opens its world number 0, and rank 0 (pid 1000 on h0) its"),
        (claim(1, 2, attempt=2, opening=0), "other", "is still in attempt 1"),
        (claim(1, 2, attempt=1, opening=2), "other", "is still in attempt 1, world 1"),
        (claim(1, 2, job="another"), "other", ""),
        (claim(0, 2, host="h\x1b[2J\n1"), "refused", "there are two of rank 0: pid 1000 on h[2J1 and"),
        (claim(1, 2, attempt=1, opening=1, token="guessed"), "welcome", ""),
    ],
)
def test_claim_that_belongs_elsewhere_is_answered_in_words(who: Claim, word: str, said: str) -> None:
    if who.attempt == 0 and who.opening == 0 and not who.job:
        who = Claim(**{**asdict(who), "attempt": 1, "opening": 1})
    with Job(2, attempt=1, opening=1) as job:
        verdict = job.knock(who)
        assert verdict.kind == word
        assert said in verdict.reason
        assert (word == "refused") == job.heard(
            f"refused a process: {verdict.reason}", 20.0 if word == "refused" else 0
        )


def test_second_process_of_a_rank_is_refused_at_once_naming_both() -> None:
    with Job(3) as job:
        job.join(1)
        started = time.monotonic()
        verdict = job.knock(claim(1, 3, pid=77, host="elsewhere"))
        assert time.monotonic() - started < 15  # not the store's timeout
        assert verdict.reason == "there are two of rank 1: pid 77 on elsewhere and pid 1001 on h1"
        assert job.heard(verdict.reason)
        assert job.knock(claim(1, 3, pid=77, token="guessed")).kind == "refused"


def test_rank_that_leaves_before_all_have_come_may_come_again() -> None:
    with Job(3) as job:
        job.join(1)
        job.ranks.pop(1).end()
        assert job.heard("rank 1 (pid 1001 on h1) has left again before all ranks had come")
        job.everybody()
        assert job.all_have_joined()
        job.ranks.pop(2).end()
        assert job.knock(claim(2, 3, pid=5)).kind == "refused"


def test_claim_of_the_wrong_form_ends_its_connection_alone() -> None:
    """With an open join anybody can prove the key, so rank 0 must survive whatever a stranger claims."""

    class Wrong(Claim):
        def encode(self) -> bytes:
            return said

    valid = asdict(claim(1, 2))
    with Job(2, Key()) as job:
        for wrong in ({"rank": "one"}, {"host": "\ud800"}, {"token": None}, None):
            said = json.dumps({**valid, **wrong}).encode() if wrong else b"[" * 1500
            with pytest.raises((proof.NoProof, ConnectionError)):
                job.knock(Wrong(**valid))
        assert job.heard("sent no proof that it belongs to the job")
        job.join(1).set("a", "b")
        assert job.ranks[0].get("a") == b"b"
        with pytest.raises(proof.WrongKey):
            job.knock(claim(1, 2), KEY)


def test_reason_that_is_too_long_to_send_is_cut() -> None:
    verdict = Verdict("refused", "\N{SNOWMAN}" * 5000)
    assert len(verdict.encode()) <= framing.LONGEST_UNPROVEN
    assert Verdict.decode(verdict.encode()).reason.startswith("\N{SNOWMAN}" * 100)


def test_console_that_nobody_reads_does_not_end_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w") as console:
        monkeypatch.setattr(sys, "stderr", console)
        with Job(2, say=tell) as job:
            for _ in range(3):
                with job.stranger() as sock:
                    sock.sendall(b"hello?" * 20)
                    assert closed(sock)
            job.join(1).set("a", "b")
            assert job.ranks[0].get("a") == b"b"


def test_client_retries_if_closed_during_handshake() -> None:
    with Job(2) as job, socket.create_server(("127.0.0.1", 0)) as front:
        store = job.join(1)
        line = store.connections._idle.pop()
        store.connections.where = front.getsockname()

        def turn_away_twice() -> None:
            for _ in range(2):
                front.accept()[0].close()
            store.connections.where = job.where

        thread = threading.Thread(target=turn_away_twice)
        thread.start()
        store.set("a", "b")
        thread.join(20)
        line.close()
        assert job.ranks[0].get("a") == b"b"
