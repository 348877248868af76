"""Workers that encrypt what goes between them over TCP, and what somebody on the way sees and can do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from phalanx import rpc, settings
from phalanx.errors import InitializationError, WorkerLost
from phalanx.rpc import session
from phalanx.wire import dial
from tests.rpc import workers
from tests.rpc.workers import next_of
from tests.support.ranks import Member, on_ranks

SECRET = bytes(range(1, 33))


class Faked(socket.socket):
    """A connection through a relay that looks as if it were none, because the proof covers the address."""

    real: tuple[str, int]

    def getpeername(self) -> Any:
        return self.real


class Relay:
    """Passes connections on, as somebody on the way could: it keeps a copy, may change it (``change``), and may reset.

    ``longest`` is after how many bytes a connection is reset at most; 0 for never.
    """

    def __init__(
        self, change: Callable[[bytes, bool], bytes] = lambda data, from_caller: data, longest: int = 0
    ) -> None:
        self.copy = bytearray()
        self.change = change
        self.resets, self.longest = 0, longest
        self._numbers, self._lock = random.Random(0), threading.Lock()

    def connect(self, where: tuple[str, int], timeout_s: float, keep_alive: Any, source: str = "") -> socket.socket:
        far = socket.create_connection(where, timeout_s)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = Faked()
            near.settimeout(timeout_s)
            near.connect(listener.getsockname())
            inner, _ = listener.accept()
        near.real = where
        keep_alive.apply(near)
        far.settimeout(None)
        ends = (inner, far)
        for here, there in (ends, ends[::-1]):
            threading.Thread(target=self._pass, args=(here, there, ends), daemon=True).start()
        return near

    def _pass(self, here: socket.socket, there: socket.socket, ends: tuple[socket.socket, socket.socket]) -> None:
        left = self._numbers.randrange(1, self.longest) if self.longest else 1 << 62
        with contextlib.suppress(OSError):
            while data := here.recv(min(left, 1 << 16)):
                with self._lock:
                    self.copy += data
                    passed = self.change(data, here is ends[0])
                there.sendall(passed)
                left -= len(data)
                if left <= 0:
                    self.resets += 1
                    for sock in ends:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
        for sock in ends:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD if left <= 0 else socket.SHUT_RDWR)  # it wakes the other thread
            sock.close()


def through_relays(
    body: Callable[[Member, Relay], Any],
    size: int = 2,
    encrypt: Callable[[Member], bool | None] = lambda _: True,
    relay: Callable[[], Relay] = Relay,
) -> list[Any]:
    """What ``body`` returns on workers of hosts of their own, all of whose connections go through their relays."""

    def run(member: Member) -> Any:
        os.environ[settings.KEY] = "the key of the tests"
        way = relay()
        vars(dial)["connect"] = way.connect
        workers.begin(member, tcp=True, encrypt=encrypt(member))
        try:
            return body(member, way)
        finally:
            way.longest = 0
            rpc.shutdown()

    return on_ranks(run, size)


def repeated(text: str, tensor: torch.Tensor, blob: bytes) -> tuple[str, torch.Tensor, bytes]:
    return text, tensor, blob


def fail_with(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("encrypt", [False, True])
def test_nothing_of_an_encrypted_call_can_be_read_on_the_way(encrypt: bool) -> None:
    text, numbers, blob = "a text that is secret", [11.25, -3.5, 1024.125] * 8, SECRET * 5000
    own = [text.encode(), torch.tensor(numbers).numpy().tobytes(), SECRET, b"repeated", b"a secret error", b"Account"]

    def body(member: Member, way: Relay) -> Any:
        to = next_of(member)
        for count, bytes_ in ((1, SECRET), (1, blob), (20_000, blob)):  # in small messages, and in large ones
            tensor = torch.tensor(numbers * count)
            got = rpc.call(to, repeated, text, tensor, bytes_)
            assert (got[0], got[2]) == (text, bytes_)
            assert torch.equal(got[1], tensor)
        with pytest.raises(ValueError, match="a secret error"):
            rpc.call(to, fail_with, "a secret error")
        assert rpc.make(to, workers.Account, 5).pay(2) == 7
        return [secret in way.copy for secret in own], len(way.copy) > 0

    def asked(member: Member) -> bool | None:
        os.environ[settings.RPC_ENCRYPT] = "1" if encrypt else ""
        return encrypt if member.rank else None  # by the variable

    seen = through_relays(body, 3, asked)
    # A pair of workers has one connection, which only the relay of one of them sees.
    assert [any(of_rank[at] for of_rank, _ in seen) for at in range(len(own))] == [not encrypt] * len(own)
    assert any(came for _, came in seen)


_counts: dict[str, int] = {}


def count(key: str, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """How often it was called with this key, and what it was called with, doubled."""
    _counts[key] = _counts.get(key, 0) + 1
    return _counts[key], tensor * 2


@pytest.mark.parametrize("encrypt", [False, True])
def test_calls_run_at_most_once_when_connections_are_reset(encrypt: bool) -> None:
    sizes = [0, 1, 100, 10_000, 20_000, 100_000]

    def work(to: str, name: str) -> bool:
        numbers = random.Random(name)
        for number in range(20):
            tensor = torch.full((numbers.choice(sizes),), float(number))
            try:
                times, doubled = rpc.call(to, count, f"{name}/{number}", tensor)
            except WorkerLost:
                return True
            assert times == 1
            assert torch.equal(doubled, tensor * 2)
        return False

    def body(member: Member, way: Relay) -> tuple[int, bool, set[int]]:
        to = next_of(member)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            works = [pool.submit(work, to, f"{member.rank}.{each}") for each in range(3)]
            lost = [each.result() for each in works]
        return way.resets, any(lost), set(_counts.values())

    resets, lost, ran = zip(*through_relays(body, 2, lambda _: encrypt, partial(Relay, longest=500_000)), strict=True)
    assert sum(resets) > 0
    assert all(lost)
    assert set().union(*ran) <= {1}


@pytest.mark.parametrize("from_caller", [True, False])
def test_relay_that_puts_its_own_public_key_in_is_refused(from_caller: bool) -> None:
    def change(data: bytes, of_caller: bool) -> bytes:
        at = data.find(b'"exchange":"') if of_caller == from_caller else -1
        return data if at < 0 else data[: at + 12] + b"ab" * 32 + data[at + 12 + 64 :]

    def body(member: Member, way: Relay) -> bool:
        if member.rank:
            member.await_said("called")  # shutting down it would connect, so that the other relay is on the way
        else:
            with pytest.raises(WorkerLost, match=r"has changed what this worker said|proves another key"):
                rpc.call(1, workers.add, 1, 2)
            member.say("called")
        return b'"exchange":"' in way.copy

    assert through_relays(body, relay=partial(Relay, change))[0]


def test_relay_that_changes_a_byte_of_a_call_does_not_change_what_arrives() -> None:
    """Whatever byte it is, the worker is lost, and no other value arrives."""

    def body(member: Member, way: Relay) -> bool:
        if member.rank:
            member.await_said("called")
            return True
        assert rpc.call(1, workers.add, 1, 2) == 3
        changed: list[bool] = []

        def change(data: bytes, from_caller: bool) -> bytes:
            if from_caller and len(data) > 100 and not changed:
                changed.append(True)
                at = random.randrange(40, len(data))
                return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            return data

        way.change = change
        with pytest.raises(WorkerLost):
            rpc.call(1, workers.add, torch.ones(1000), 2)
        member.say("called")
        return bool(changed)

    assert through_relays(body) == [True, True]


def test_workers_of_which_one_encrypts_say_so_and_send_nothing() -> None:
    size, which = 3, 1

    def body(member: Member, way: Relay) -> bool:
        encrypts = member.rank == which
        for to in range(size):
            if to != member.rank and (to == which) != encrypts:
                own, other = ("encrypts", "does not") if encrypts else ("does not", "encrypts")
                with pytest.raises(rpc.EncryptionMismatch, match=f"this worker {own} .*, and worker{to} .* {other}"):
                    rpc.call(to, repeated, "", torch.ones(1), SECRET)
            elif to != member.rank:
                assert rpc.call(to, workers.add, 1, 2) == 3
        return SECRET in way.copy

    assert through_relays(body, size, lambda member: member.rank == which) == [False] * size


def test_worker_that_cannot_encrypt_says_so() -> None:
    def body(member: Member) -> None:
        def refused(encrypt: str, said: str) -> None:
            os.environ[settings.RPC_ENCRYPT] = encrypt
            with pytest.raises(InitializationError, match=said):
                rpc.init()
            assert session.current() is None

        os.environ.pop(settings.KEY, None)
        refused("1", "needs the job's key")
        os.environ[settings.KEY] = "the key of the tests"
        refused("yes", "PHALANX_RPC_ENCRYPT=yes: it must be 1")
        for name in [name for name in sys.modules if name.startswith(("cryptography", "phalanx.wire.encryption"))]:
            del sys.modules[name]
        sys.modules["cryptography"] = None  # type: ignore[assignment]
        refused("1", r'pip install "\.\[encryption\]"')

    on_ranks(body, 1)
