"""Listeners x attacks: who does not know the key, or says nonsense, gets nothing and keeps nobody out.

Jobs whose every port is attacked from outside are in ``tests/fault/test_strangers.py``; the handshake alone is in
``test_wire.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.mutations import changed
from tests.support.ranks import Member
from tests.support.stores import KEY, Job, claim
from tests.support.waiting import soon

from phalanx import rpc
from phalanx.launch import link
from phalanx.membership.store_protocol import ROLE as STORE
from phalanx.membership.store_protocol import Code, pack
from phalanx.rpc import session
from phalanx.rpc.connections import ROLE as RPC
from phalanx.wire import door
from phalanx.wire.framing import LONGEST_UNPROVEN
from phalanx.wire.key import Key
from phalanx.wire.proof import GREETING, GREETING_BYTES, Response

# A listener greets, and tells a caller that proves another key so, with a digest and an empty verdict.
MOST_ANSWERED = GREETING_BYTES + 32 + 4
OTHER_KEYS = (Key(), Key(b"another key, which is long enough"))


@dataclass
class Listener:
    """Something that listens.

    Attributes:
        claim: the claim of another right caller.
        serve: fails unless somebody who knows the key is served.
    """

    where: tuple[str, int]
    role: str
    key: Key
    claim: Callable[[], bytes]
    serve: Callable[[], None]

    def connect(self) -> socket.socket:
        return socket.create_connection(self.where, timeout=60)

    def proof(self, key: Key | None = None, **more: Any) -> tuple[socket.socket, Response]:
        """A connection, and what proves the key on it; with other values, what does not."""
        sock = self.connect()
        values = {"role": self.role, "where": self.where, **more}
        greeting = read(sock, GREETING_BYTES)
        claimed = values["claim"] if "claim" in values else self.claim()
        return sock, Response(key or self.key, values["role"], greeting, values["where"], claimed)


def read(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (more := sock.recv(nbytes - len(data))):
        data += more
    return data


def answer_to(sock: socket.socket, response: Response) -> bytes:
    """The verdict on a proof that is right; empty if the connection was closed."""
    sock.sendall(response.message)
    answer = read(sock, response.missing(b""))
    if answer:
        answer += read(sock, response.missing(answer))
    return response.check(answer) if answer else b""


def heard(sock: socket.socket, said: bytes = b"", *, ends: bool = False) -> int:
    """Say this: how many bytes are answered until the other side closes the connection."""
    nbytes = 0
    with sock, contextlib.suppress(ConnectionResetError):
        with contextlib.suppress(OSError):  # it may be closed before all has been said
            sock.sendall(said)
            if ends:
                sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            nbytes += len(data)
    return nbytes


class Bomb:
    """What must not be unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def words_without_a_proof(listener: Listener) -> None:
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 200,
        b"phalanx 1\n" + b"x" * 200,
        pickle.dumps(Bomb()) + b"x" * 500,
        GREETING + b"x" * 64 + struct.pack("!I", LONGEST_UNPROVEN + 1),
        GREETING + b"x" * 64 + b"\xff" * 4 + b"x" * (1 << 20),
        pack(Code.SET, 0, [b"stranger", b"value"]) + b"x" * 100,
    ):
        assert heard(listener.connect(), said) <= GREETING_BYTES, said[:40]


def wrong_proofs(listener: Listener) -> None:
    """Of another key, for another role or place; and one that was recorded, is reflected, or cut off."""
    others: list[dict[str, Any]] = [{"key": key} for key in OTHER_KEYS]
    others += [{"role": role} for role in {STORE, RPC, link.ROLE} - {listener.role}]
    for other in (*others, {"where": ("127.0.0.1", 9)}):
        sock, response = listener.proof(**other)
        assert heard(sock, response.message) <= MOST_ANSWERED - GREETING_BYTES, other
    sock, response = listener.proof()
    with sock:
        sock.sendall(response.message)
        answer = read(sock, response.missing(b""))
        answer += read(sock, response.missing(answer))
        response.check(answer)
    assert heard(listener.connect(), response.message) <= MOST_ANSWERED
    again = listener.connect()
    assert heard(again, read(again, GREETING_BYTES) + answer + bytes(LONGEST_UNPROVEN)) <= MOST_ANSWERED
    for kept in (0, 1, len(GREETING), GREETING_BYTES, GREETING_BYTES + 32, -1):
        sock, response = listener.proof()
        assert heard(sock, response.message[:kept], ends=True) == 0


def proofs_that_were_changed(listener: Listener) -> None:
    chance = random.Random(1)
    for _ in range(40):
        sock, response = listener.proof(claim=pickle.dumps(Bomb()))
        said = changed(chance, response.message)
        if said.startswith(response.message):
            sock.close()
        else:
            assert heard(sock, said, ends=True) <= MOST_ANSWERED - GREETING_BYTES


def many_that_are_silent(listener: Listener) -> None:
    """Or say half of something; more than a listener keeps."""
    with contextlib.ExitStack() as stack:
        for number in range(600):
            sock = stack.enter_context(listener.connect())
            if number % 3 == 1:
                sock.sendall(GREETING[: number % len(GREETING)])
            elif number % 3 == 2:
                sock.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        listener.serve()
        assert time.monotonic() - began < door.PATIENCE_S


ATTACKS = (words_without_a_proof, wrong_proofs, proofs_that_were_changed, many_that_are_silent)


def test_stranger_gets_nothing_of_the_store_and_keeps_nobody_out() -> None:
    size = 64
    with Job(size) as job:
        ranks = itertools.count(1)  # each caller is another rank, since a rank that has left may not come again at once

        def serve() -> None:
            store = job.join(next(ranks))
            store.set("a", "b")
            assert job.ranks[0].get("a") == b"b"
            assert not job.ranks[0].check(["stranger"])

        listener = Listener(job.where, STORE, KEY, lambda: claim(next(ranks), size).encode(), serve)
        for attack in ATTACKS:
            attack(listener)
            listener.serve()
        assert any("refused a connection from 127.0.0.1" in line for line in job.said)


@pytest.mark.parametrize("tcp", [False, pytest.param(True, marks=pytest.mark.long)])
def test_worker_of_rpc_is_not_disturbed_by_strangers(tcp: bool) -> None:
    def body(member: Member) -> None:
        me = session.worker().me
        listener = worker_listening(member)
        with undisturbed(member):
            for attack in ATTACKS:
                attack(listener)
                listener.serve()
            # Of those who do prove the key:
            for said in claims_that_are_nonsense(me):
                sock, response = listener.proof(claim=said)
                with sock:
                    answer = answer_to(sock, response)
                    assert not answer or "refused" in json.loads(answer), said
                    assert heard(sock) == 0, said
            for number, offer in enumerate(offers_of_no_memory()):
                stranger = {**asdict(me), "incarnation": (1 << 40) + 1000 * member.rank + number, "name": "stranger"}
                said = json.dumps({"me": stranger, "to": me.incarnation, "offer": offer}).encode()
                sock, response = listener.proof(claim=said)
                with sock:
                    assert json.loads(answer_to(sock, response)) == {}, offer  # then it goes by TCP
        assert session.worker().directory.all() == rpc.call(next_of(member), _members)
        assert len(session.worker().directory.all()) == member.size

    with_workers(body, 3, before=lambda _: workers.use_tcp() if tcp else None)


def _members() -> list[rpc.Member]:
    return session.worker().directory.all()


def worker_listening(member: Member) -> Listener:
    me = session.worker().me
    key: Key = session.worker()._connections._key

    def serve() -> None:
        assert rpc.call(next_of(member), workers.add, 2, 2) == 4

    other = {"me": {**asdict(me), "incarnation": 1 << 40, "name": "stranger"}, "to": 1 << 41}  # which is refused
    return Listener((me.address, me.port), RPC, key, json.dumps(other).encode, serve)


@contextlib.contextmanager
def undisturbed(member: Member) -> Iterator[None]:
    """Calls between all workers go on meanwhile, and none of them takes long."""
    assert rpc.call(next_of(member), workers.add, 1, 1) == 2
    dist.barrier()
    before = len(os.listdir("/proc/self/fd"))
    over = threading.Event()
    times, wrong = [0.0], []

    def go_on() -> None:
        try:
            while not over.is_set():
                began = time.monotonic()
                assert rpc.call(next_of(member), workers.add, torch.ones(3), 1).tolist() == [2.0] * 3
                times.append(time.monotonic() - began)
                time.sleep(0.002)
        except Exception as error:
            wrong.append(repr(error))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert wrong == []
    assert max(times) < door.PATIENCE_S / 2  # no call waits until a stranger's time to prove himself is over
    assert soon(lambda: len(os.listdir("/proc/self/fd")) <= before)


def claims_that_are_nonsense(me: rpc.Member) -> list[bytes]:
    """Of a form that nobody has; test_fuzzed_bytes.py has very many that were changed."""
    right = {"me": {**asdict(me), "incarnation": 1 << 40, "name": "stranger"}, "to": me.incarnation}
    claims: list[Any] = [None, True, "text", ["list"], {}, {"me": right["me"]}, {**right, "to": 1 << 90}]
    claims.append({**right, "me": asdict(me)})  # it says that it is the one whom it asks
    claims += [{**right, "me": {**asdict(me), name: [1.5]}} for name in asdict(me)]
    for wrong in ({"pid": -1}, {"pid": "1"}, {"channel": 1 << 90}, {"cookie": ""}, {"cookie": "zz"}, {"place": None}):
        claims.append({**right, "offer": {**OFFER, **wrong}})
    raw = [b"", b"\xff\xfe", b"{", b"[" * 4000, b'{"me": 1e999}', pickle.dumps(Bomb())]
    return [*(json.dumps(each).encode() for each in claims), *raw]


OFFER = {"pid": os.getpid(), "channel": 0, "cookie": "A" * 22 + "==", "place": 1, "place_cookie": "A" * 22 + "=="}


def offers_of_no_memory() -> list[dict[str, object]]:
    return [{**OFFER, **wrong} for wrong in ({"pid": 1}, {"pid": os.getppid()}, {"channel": 3}, {"place": 1 << 30})]


def test_rank_that_sends_nonsense_ends_its_own_connection_at_most() -> None:
    """It has proven the key; without one, every process can."""
    chance = random.Random(1)
    valid = [pack(code, 5, fields) for code in range(1, 15) for fields in ([], [b"a"], [b"a", b"b", b"c"])]
    for sealed in range(6):
        with Job(3) as job:
            stores = job.everybody()
            line = stores[1].connections._idle[0]
            with contextlib.suppress(ConnectionError):
                for number in range(6):
                    message = changed(chance, chance.choice(valid))
                    line.sock.sendall(line.session.seal(message) if number < sealed else message)
            with contextlib.suppress(OSError):
                line.sock.shutdown(socket.SHUT_WR)
            for store in (stores[0], stores[2]):
                store.set("still", "here")
            assert stores[0].get("still") == b"here"
