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
import selectors
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
from tests.support.attackers import MOST_ANSWERED
from tests.support.mutations import changed
from tests.support.ranks import Member
from tests.support.stores import KEY, Job, claim
from tests.support.waiting import soon

from phalanx import rpc
from phalanx.errors import InitializationError
from phalanx.launch.relay import channel
from phalanx.rpc import session
from phalanx.rpc.network import ROLE as RPC
from phalanx.store import requests
from phalanx.store.claim import ROLE as STORE
from phalanx.wire import door
from phalanx.wire.framing import LONGEST_UNPROVEN, frame
from phalanx.wire.key import Key
from phalanx.wire.proof import GREETING, GREETING_BYTES, Response

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
        requests.pack(requests.SET, 0, [b"stranger", b"value"]) + b"x" * 100,
    ):
        assert heard(listener.connect(), said) <= GREETING_BYTES, said[:40]


def proofs_of_another_key(listener: Listener) -> None:
    for key in OTHER_KEYS:
        sock, response = listener.proof(key)
        assert heard(sock, response.message) <= MOST_ANSWERED - GREETING_BYTES
    guessed = GREETING + b"x" * 64 + frame(requests.pack(requests.SET, 0, [b"stranger", b"value"]))
    assert heard(listener.connect(), guessed) <= MOST_ANSWERED


def proofs_for_another_role(listener: Listener) -> None:
    for role in {STORE, RPC, channel.ROLE} - {listener.role}:
        sock, response = listener.proof(role=role)
        assert heard(sock, response.message) <= MOST_ANSWERED - GREETING_BYTES


def a_proof_that_is_passed_on(listener: Listener) -> None:
    sock, response = listener.proof(where=("127.0.0.1", 9))
    assert heard(sock, response.message) <= MOST_ANSWERED - GREETING_BYTES


def a_proof_that_was_recorded_or_is_reflected(listener: Listener) -> None:
    sock, response = listener.proof()
    with sock:
        sock.sendall(response.message)
        answer = read(sock, response.missing(b""))
        answer += read(sock, response.missing(answer))
        response.check(answer)
    assert heard(listener.connect(), response.message) <= MOST_ANSWERED
    again = listener.connect()
    assert heard(again, read(again, GREETING_BYTES) + answer + bytes(LONGEST_UNPROVEN)) <= MOST_ANSWERED


def proofs_that_are_cut_off(listener: Listener) -> None:
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


ATTACKS = (
    words_without_a_proof,
    proofs_of_another_key,
    proofs_for_another_role,
    a_proof_that_is_passed_on,
    a_proof_that_was_recorded_or_is_reflected,
    proofs_that_are_cut_off,
    proofs_that_were_changed,
    many_that_are_silent,
)


@contextlib.contextmanager
def rank_0s_store() -> Iterator[Listener]:
    size = 64
    with Job(size) as job:
        ranks = itertools.count(1)  # each caller is another rank, since a rank that has left may not come again at once

        def serve() -> None:
            store = job.join(next(ranks))
            store.set("a", "b")
            assert job.ranks[0].get("a") == b"b"
            assert not job.ranks[0].check(["stranger"])

        yield Listener(job.where, STORE, KEY, lambda: claim(next(ranks), size).encode(), serve)
        assert any("refused a connection from 127.0.0.1" in line for line in job.said)


@contextlib.contextmanager
def the_launchers_relay() -> Iterator[Listener]:
    admitted: list[channel.Channel] = []
    with selectors.DefaultSelector() as selector:
        entrance, invitation = channel.open_door(["127.0.0.1"], selector, admitted.append)
        host, port, secret = invitation.rsplit(":", 2)
        over = threading.Event()

        def tend() -> None:
            while not over.is_set():
                for key, _ in selector.select(0.01):
                    key.data()
                entrance.tend(time.monotonic())

        def serve() -> None:
            admitted.clear()
            keeper = channel.join(invitation)
            assert soon(lambda: bool(admitted))
            keeper.say(event="here")
            frames: list[tuple[bytes, bytes]] = []

            def came() -> bool:
                frames.extend(admitted[0].receive())
                return bool(frames)

            assert soon(came)
            assert frames == [(channel.MESSAGE, b'{"event": "here"}')]
            keeper.close()
            admitted[0].close()

        thread = threading.Thread(target=tend)
        thread.start()
        try:
            yield Listener((host, int(port)), channel.ROLE, Key(secret.encode()), lambda: b"", serve)
        finally:
            over.set()
            thread.join(20)
            for each in admitted:
                each.close()
            entrance.close()


@pytest.mark.parametrize("make", [rank_0s_store, the_launchers_relay])
def test_a_stranger_gets_nothing_and_keeps_nobody_out(make: Callable[[], Any]) -> None:
    with make() as listener:
        for attack in ATTACKS:
            attack(listener)
            listener.serve()


@pytest.mark.parametrize("tcp", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_worker_of_rpc_is_not_disturbed_by_strangers(size: int, tcp: bool) -> None:
    def body(member: Member) -> None:
        me = session.agent().me
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
        assert session.agent().members() == rpc.call(next_of(member), _members)
        assert len(session.agent().members()) == size

    with_workers(body, size, before=lambda _: workers.use_tcp() if tcp else None)


def _members() -> list[rpc.Member]:
    return session.agent().members()


def worker_listening(member: Member) -> Listener:
    me = session.agent().me
    key: Key = session.agent()._connections._network._key

    def serve() -> None:
        assert rpc.call(next_of(member), workers.add, 2, 2) == 4

    return Listener((me.address, me.port), RPC, key, lambda: b'{"ping": 1}', serve)


def of_process() -> tuple[int, int]:
    """How many threads and descriptors this process has, without the threads that wait a while for more calls."""
    pools = ("phalanx-rpc-handler", "phalanx-rpc-shared", "phalanx-rpc-tcp")
    threads = [thread for thread in threading.enumerate() if thread.name not in pools]
    return len(threads), len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def undisturbed(member: Member) -> Iterator[None]:
    """Calls between all workers go on meanwhile, none of them takes long, and everything is as before afterwards."""
    assert rpc.call(next_of(member), workers.add, 1, 1) == 2
    dist.barrier()
    before = of_process()
    over = threading.Event()
    times, wrong = [0.0], []

    def go_on() -> None:
        while not over.is_set():
            began = time.monotonic()
            try:
                if rpc.call(next_of(member), workers.add, torch.ones(3), 1).tolist() != [2.0] * 3:
                    wrong.append("a wrong answer")
            except Exception as error:
                wrong.append(repr(error))
                return
            times.append(time.monotonic() - began)
            time.sleep(0.002)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert wrong == []
    assert max(times) < door.PATIENCE_S / 2  # no call waits until a stranger's time to prove himself is over
    assert soon(lambda: all(now <= then for now, then in zip(of_process(), before, strict=True)), 60.0), before


def claims_that_are_nonsense(me: rpc.Member) -> list[bytes]:
    right = {**asdict(me), "incarnation": 1 << 40, "name": "stranger"}

    def with_me(**change: Any) -> dict[str, Any]:
        return {"me": {**right, **change}, "to": me.incarnation, "offer": ""}

    claims: list[Any] = [None, 0, True, "ping", [], ["ping"], [[]], {}, {"ping": 2}, {"me": right}, with_me(more=1)]
    claims += [{**with_me(), "to": to} for to in ("1", [1], 1 << 90)]
    claims.append({**with_me(), "me": asdict(me)})  # it says that it is the one whom it asks
    for name, value in asdict(me).items():
        others: list[Any] = [None, [], {}, 1.5, True, ["a"], {"a": 1}, "x" * 500, 1 << 70, -(1 << 70), ""]
        claims += [with_me(**{name: other}) for other in others if type(other) is not type(value) or name == "name"]
        claims.append({**with_me(), "me": {each: right[each] for each in right if each != name}})
    raw = [b"", b"\xff\xfe", b"{", b"[" * 4000, b"1" * 4000, b'{"me": 1e999}', b'{"a":' * 700, pickle.dumps(Bomb())]
    return [*(json.dumps(each).encode() for each in claims), *raw]


def offers_of_no_memory() -> list[str]:
    own = {"pid": os.getpid(), "channel": 0, "cookie": "00" * 16, "place": 1, "place_cookie": "00" * 16}
    wrong: dict[str, list[Any]] = {
        "pid": [0, 1, -1, os.getppid(), 1 << 31, 1 << 90, "1", None, 1.5, True],
        "channel": [-1, 3, 1 << 31, 1 << 70, "x"],
        "cookie": ["", "00", "zz", "00" * 500, None, 1],
        "place": [-1, 1 << 40],
        "place_cookie": ["", "00" * 15, []],
    }
    made = [json.dumps({**own, name: value}) for name, values in wrong.items() for value in values]
    return ["garbage", "[]", "1", "{}", "[" * 1500, '{"pid": 1e999}', *made]


@pytest.mark.parametrize("meeting", [False, True])
def test_a_rank_that_sends_nonsense_ends_its_own_connection_at_most(meeting: bool) -> None:
    """It has proven the key; without one, every process can."""
    chance = random.Random(meeting)
    valid = [requests.pack(code, 5, fields) for code in range(1, 15) for fields in ([], [b"a"], [b"a", b"b", b"c"])]
    for sealed in itertools.chain(range(6), range(6)):
        with Job(3) as job:
            stores = job.everybody()
            if meeting:
                for store in stores:
                    store.meeting(begins=True)
            line = stores[1]._peer._idle[0]  # type: ignore[union-attr]
            with contextlib.suppress(ConnectionError):
                for number in range(6):
                    message = changed(chance, chance.choice(valid))
                    line.sock.sendall(line.session.seal(message) if number < sealed else message)
            with contextlib.suppress(OSError):
                line.sock.shutdown(socket.SHUT_WR)
            for store in (stores[0], stores[2]):
                with contextlib.suppress(InitializationError):  # meanwhile a rank may have left before all had met
                    store.set("still", "here")
            assert stores[0].get("still") == b"here"


def test_a_keeper_is_not_taken_in_by_what_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        for said in (b"", b"SSH-2.0\r\n", GREETING, GREETING + b"x" * 300):

            def serve(said: bytes = said) -> None:
                with listener.accept()[0] as sock, contextlib.suppress(OSError):
                    sock.sendall(said)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(OSError, match=r"phalanx run has ended|does not know the job's key"):
                channel.join(f"{host}:{port}:secret")
            thread.join(20)
