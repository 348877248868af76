"""Processes that do not know the key, or say nonsense: no worker ends, waits or is confused, and nothing is left."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx import rpc
from phalanx.rpc import session
from phalanx.rpc.network import ROLE
from phalanx.wire import door
from phalanx.wire.key import Key
from phalanx.wire.proof import GREETING, GREETING_BYTES, LONGEST_PROOF, Response
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member

SCALE = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))
SOON_S = door.PATIENCE_S / 2  # no call waits until a stranger's time to prove itself is over
PATIENCE_S = 60.0


def of_process() -> tuple[int, int]:
    """How many threads and descriptors this process has, without the threads that wait a while for more calls."""
    pools = ("phalanx-rpc-handler", "phalanx-rpc-shared", "phalanx-rpc-tcp")
    threads = [thread for thread in threading.enumerate() if thread.name not in pools]
    return len(threads), len(os.listdir("/proc/self/fd"))


@contextmanager
def undisturbed(member: Member) -> Iterator[None]:
    """Calls between all workers go on meanwhile, none of them takes long, and everything is as before afterwards."""
    assert rpc.call(next_of(member), workers.add, 1, 1) == 2
    dist.barrier()
    before = of_process()
    over = threading.Event()
    slowest: list[float] = [0.0]
    wrong: list[Any] = []

    def go_on() -> None:
        while not over.is_set():
            began = time.monotonic()
            try:
                if rpc.call(next_of(member), workers.add, torch.ones(3), 1).tolist() != [2.0] * 3:
                    wrong.append("a wrong answer")
            except Exception as error:
                wrong.append(error)
                return
            slowest[0] = max(slowest[0], time.monotonic() - began)
            time.sleep(0.002)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert wrong == []
    assert slowest[0] < SOON_S, slowest
    until = time.monotonic() + PATIENCE_S
    while not _at_most(of_process(), before) and time.monotonic() < until:
        time.sleep(0.05)
    assert _at_most(of_process(), before), (of_process(), before)


def _at_most(now: tuple[int, int], before: tuple[int, int]) -> bool:
    return now[0] <= before[0] and now[1] <= before[1]


def key_of() -> Key:
    key: Key = session.agent()._connections._network._key
    return key


def reached() -> socket.socket:
    me = session.agent().me
    return socket.create_connection((me.address, me.port), timeout=PATIENCE_S)


def read(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (more := sock.recv(nbytes - len(data))):
        data += more
    return data


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side closes it without a further word, or after its refusal."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def proven(key: Key, claim: bytes) -> tuple[socket.socket, Response]:
    sock = reached()
    response = Response(key, ROLE, read(sock, GREETING_BYTES), sock.getpeername()[:2], claim)
    sock.sendall(response.message)
    return sock, response


def with_strangers(body: Callable[[Member], Any], size: int, *, tcp: bool = False) -> list[Any]:
    def run(member: Member) -> Any:
        with undisturbed(member):
            outcome = body(member)
        assert len(session.agent().members()) == size
        return outcome

    return with_workers(run, size, PATIENCE_S, before=lambda _: workers.use_tcp() if tcp else None)


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_who_does_not_know_the_key_is_sent_away(size: int, tcp: bool) -> None:
    def body(member: Member) -> Any:
        claim = json.dumps({"me": asdict(session.agent().me), "to": 1, "offer": ""}).encode()
        for key in (Key(), Key(b"another key, which is long enough")):
            sock, _ = proven(key, claim)
            with sock:
                assert is_closed(sock)
        return True

    assert with_strangers(body, size, tcp=tcp) == [True] * size


@pytest.mark.parametrize("size", [1, 2])
def test_a_handshake_that_was_recorded_reflected_or_passed_on_is_worth_nothing(size: int) -> None:
    def body(member: Member) -> Any:
        sock, response = proven(key_of(), b'{"ping": 1}')
        with sock:
            answer = read(sock, response.missing(b""))
            answer += read(sock, response.missing(answer))
        assert response.check(answer)
        with reached() as replayed:
            replayed.sendall(response.message)
            assert is_closed(replayed)
        with reached() as reflecting:
            greeting = read(reflecting, GREETING_BYTES)
            reflecting.sendall(greeting + answer)
            assert is_closed(reflecting)
        with reached() as passing:  # the caller has dialled a listener at another port, which hands everything on
            relayed = Response(key_of(), ROLE, read(passing, GREETING_BYTES), ("127.0.0.1", 9), b'{"ping": 1}')
            passing.sendall(relayed.message)
            assert is_closed(passing)
        return True

    assert with_strangers(body, size) == [True] * size


@pytest.mark.parametrize("size", [1, 2])
def test_those_who_connect_and_say_nothing_or_half_of_it_disturb_nobody(size: int) -> None:
    def body(member: Member) -> Any:
        silent = [reached() for _ in range(300)]
        for number, sock in enumerate(silent):
            if number % 3 == 1:
                sock.sendall(GREETING[: number % len(GREETING)])
            elif number % 3 == 2:
                sock.shutdown(socket.SHUT_WR)  # half open
        time.sleep(0.3)
        assert rpc.call(next_of(member), workers.add, 2, 2) == 4
        for sock in silent:
            sock.close()
        return True

    assert with_strangers(body, size) == [True] * size


def nonsense(me: rpc.Member) -> list[Any]:
    good: dict[str, Any] = {
        "me": {**asdict(me), "incarnation": 1 << 40, "name": "stranger"},
        "to": me.incarnation,
        "offer": "",
    }
    claims: list[Any] = [None, 0, -1, 1e308, True, "", "ping", [], ["ping"], [[]], {}, {"ping": 2}, {"me": good["me"]}]
    for name in asdict(me):
        for value in (None, [], {}, "", -(1 << 70), 1 << 70, 1.5, True, ["a"], {"a": 1}, "x" * 500):
            if type(value) is not type(asdict(me)[name]) or (value != "" and type(value) is int) or name == "name":
                claims.append(  # noqa: PERF401 - easier to read
                    {**good, "me": {**good["me"], name: value}}
                )
        claims.append({**good, "me": {other: value for other, value in good["me"].items() if other != name}})
    claims += [
        {**good, "me": {**good["me"], "more": 1}},
        {**good, "to": "1"},
        {**good, "to": [1]},
        {**good, "to": 1 << 90},
    ]
    claims = [claim for claim in claims if claim != good]
    claims.append({**good, "me": asdict(me)})  # it says that it is the one whom it asks
    return claims


def offers() -> list[Any]:
    own = {"pid": os.getpid(), "channel": 0, "cookie": "00" * 16, "place": 1, "place_cookie": "00" * 16}
    made: list[Any] = ["garbage", "[]", "1", "{}", "[" * 1500, '{"pid": 1e999}']
    wrong: dict[str, list[Any]] = {
        "pid": [0, 1, -1, os.getppid(), 1 << 31, 1 << 90, "1", None, 1.5, True],
        "channel": [-1, 3, 1 << 31, 1 << 70, "x"],
        "cookie": ["", "00", "zz", "00" * 500, None, 1],
        "place": [-1, 1 << 40],
        "place_cookie": ["", "00" * 15, []],
    }
    for name, values in wrong.items():
        made += [json.dumps({**own, name: value}) for value in values]
    return made


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_claim_that_is_nonsense_is_sent_away_though_it_proves_the_key(size: int) -> None:
    def body(member: Member) -> Any:
        me = session.agent().me
        claims = [json.dumps(claim).encode() for claim in nonsense(me)]
        claims += [b"", b"\xff\xfe", b"{", b"[" * 4000, b"1" * 4000, b'{"me": 1e999}', b'{"a":' * 700]
        for claim in claims:
            sock, response = proven(key_of(), claim)
            with sock:
                answer = read(sock, response.missing(b""))
                if answer:
                    answer += read(sock, response.missing(answer))
                    assert "refused" in json.loads(response.check(answer)), claim
                assert is_closed(sock), claim
        return session.agent().members() == rpc.call(next_of(member), _members)

    assert with_strangers(body, size) == [True] * size


def _members() -> list[rpc.Member]:
    return session.agent().members()


@pytest.mark.parametrize("size", [1, 2])
def test_an_offer_of_memory_that_is_not_there_is_not_taken(size: int) -> None:
    def body(member: Member) -> Any:
        me = session.agent().me
        for number, offer in enumerate(offers()):
            stranger = {**asdict(me), "incarnation": (1 << 40) + 1000 * member.rank + number, "name": "stranger"}
            claim = json.dumps({"me": stranger, "to": me.incarnation, "offer": offer}).encode()
            sock, response = proven(key_of(), claim)
            with sock:
                answer = read(sock, response.missing(b""))
                answer += read(sock, response.missing(answer))
                assert json.loads(response.check(answer)) == {}, offer  # then it goes by TCP
        return True

    assert with_strangers(body, size) == [True] * size


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_unpickled_before_the_proof(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "loaded"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (path,)

    bomb = pickle.dumps(Bomb())

    def body(member: Member) -> Any:
        random_ = random.Random(seed * 100 + member.rank)
        for _ in range(60 * SCALE):
            with reached() as sock:
                greeting = read(sock, GREETING_BYTES)
                right = Response(key_of(), ROLE, greeting, sock.getpeername()[:2], bomb).message
                data = bytearray(random_.choice([bomb, GREETING + random_.randbytes(64) + bomb, right]))
                at = random_.randrange(len(data))
                data[at : at + 1] = random_.choice([b"", random_.randbytes(3), bomb, struct.pack("!I", 1 << 31)])
                sock.sendall(data[:LONGEST_PROOF])
                sock.shutdown(socket.SHUT_WR)
                assert is_closed(sock)
        return True

    assert with_strangers(body, 2) == [True] * 2
    assert not path.exists()
