"""Workers that encrypt what goes between them over TCP, and what somebody on the way sees and can do."""

from __future__ import annotations

import builtins
import os
import random
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
from tests.support.proxies import Proxy
from tests.support.ranks import Member, on_ranks

PATIENCE_S = 60.0
SECRET = bytes(range(1, 33))


class Relay(Proxy):
    """Keeps a copy of what it passes on, and may change it.

    Args:
        change: what is passed on in the place of what has come.
    """

    def __init__(
        self, change: Callable[[bytes, bool], bytes] = lambda data, from_caller: data, longest: int = 0
    ) -> None:
        super().__init__(random.Random(0), longest)
        self.copy = bytearray()
        self._change = change
        self._lock = threading.Lock()

    def seen(self, data: bytes, *, from_caller: bool) -> bytes:
        with self._lock:
            self.copy += data
            return self._change(data, from_caller)


def encrypted(
    body: Callable[[Member, Relay], Any],
    encrypt: Callable[[Member], bool | None] = lambda _: True,
    relay: Callable[[], Relay] = Relay,
    key: str = "the key of the tests",
) -> Callable[[Member], Any]:
    """A rank of its own host, all of whose connections go through its relay."""

    def run(member: Member) -> Any:
        os.environ["PHALANX_HOST"] = f"host{member.rank}"  # so they do not try to share memory
        os.environ[settings.KEY] = key
        member.join("gloo")
        way = relay()
        vars(dial)["connect"] = way.connect
        rpc.init(timeout_s=PATIENCE_S, encrypt=encrypt(member))
        try:
            return body(member, way)
        finally:
            way.longest = 0
            rpc.shutdown()

    return run


def repeated(text: str, tensor: torch.Tensor, blob: bytes) -> tuple[str, torch.Tensor, bytes]:
    return text, tensor, blob


def fail_with(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 2))])
def test_nothing_of_a_call_can_be_read_on_the_way(size: int, encrypt: bool) -> None:
    text, numbers, blob = "a text that is secret", [11.25, -3.5, 1024.125] * 8, SECRET * 5000

    def body(member: Member, way: Relay) -> Any:
        to = next_of(member)
        for count in (1, 3000, 100_000):  # in a small message, and in a large one
            tensor = torch.tensor(numbers * count)
            got = rpc.call(to, repeated, text, tensor, blob)
            assert got[0] == text
            assert torch.equal(got[1], tensor)
            assert got[2] == blob
        small = rpc.call(to, repeated, text, torch.tensor(numbers), SECRET)
        assert small[2] == SECRET
        with pytest.raises(ValueError, match="a secret error"):
            rpc.call(to, fail_with, "a secret error")
        assert rpc.make(to, workers.Account, 5).pay(2) == 7
        own = [
            text.encode(),
            torch.tensor(numbers).numpy().tobytes(),
            SECRET,
            b"repeated",
            b"a secret error",
            b"Account",
        ]
        return [secret in way.copy for secret in own]

    seen = on_ranks(encrypted(body, lambda _: encrypt), size)
    # A pair of workers has one connection, which only the relay of one of them sees.
    assert [any(of_rank[at] for of_rank in seen) for at in range(6)] == [size > 1 and not encrypt] * 6


def test_the_variable_has_all_workers_encrypt() -> None:
    def body(member: Member, way: Relay) -> Any:
        assert rpc.call(next_of(member), repeated, "", torch.ones(1), SECRET)[2] == SECRET
        return SECRET in way.copy, len(way.copy) > 0

    def run(member: Member) -> Any:
        os.environ[settings.RPC_ENCRYPT] = "1"
        return encrypted(body, lambda _: None)(member)

    (one, came), (other, went) = on_ranks(run, 2)
    assert not one
    assert not other
    assert came or went


def test_calls_go_on_over_connections_that_are_made_anew() -> None:
    sizes = [0, 100, 20_000, 300_000]

    def work(to: str, numbers: random.Random, failed: list[BaseException]) -> None:
        try:
            for number in range(30):
                tensor = torch.full((numbers.choice(sizes),), float(number))
                assert torch.equal(rpc.call(to, workers.add, tensor, 1), tensor + 1)
        except BaseException as error:
            failed.append(error)

    def body(member: Member, way: Relay) -> Any:
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=work, args=(next_of(member), random.Random(each), failed)) for each in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        return way.resets

    assert sum(on_ranks(encrypted(body, relay=lambda: Relay(longest=1_000_000)), 2)) > 0


def test_a_relay_that_puts_its_own_public_key_in_the_place_of_an_ends_is_refused() -> None:
    for side in (True, False):

        def change(data: bytes, from_caller: bool, side: bool = side) -> bytes:
            at = data.find(b'"exchange": "') if from_caller == side else -1
            return data if at < 0 else data[: at + 13] + b"ab" * 32 + data[at + 13 + 64 :]

        def body(member: Member, way: Relay) -> Any:
            if member.rank:
                member.await_said("called")  # shutting down it would connect, so that the other relay is on the way
            else:
                with pytest.raises(WorkerLost, match=r"has changed what this worker said|proves another key"):
                    rpc.call(1, workers.add, 1, 2)
                member.say("called")
            return b'"exchange": "' in way.copy

        assert on_ranks(encrypted(body, relay=partial(Relay, change)), 2)[0]


def test_a_relay_that_changes_a_byte_of_a_call_does_not_change_what_arrives() -> None:
    """Whatever byte it is, the worker is lost, and no other value arrives."""

    def body(member: Member, way: Relay) -> Any:
        if member.rank:
            member.await_said("called")  # shutting down it would connect, so that the other relay is on the way
            return True
        assert rpc.call(1, workers.add, 1, 2) == 3
        changed: list[bool] = []

        def change(data: bytes, from_caller: bool) -> bytes:
            if from_caller and len(data) > 100 and not changed:
                changed.append(True)
                at = random.randrange(40, len(data))
                return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            return data

        way._change = change
        with pytest.raises(WorkerLost):
            rpc.call(1, workers.add, torch.ones(1000), 2)
        member.say("called")
        return bool(changed)

    assert on_ranks(encrypted(body), 2) == [True, True]


@pytest.mark.parametrize(
    ("size", "which"), [(3, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, 0), (2, 1), (3, 0)))]
)
def test_workers_of_which_one_encrypts_and_one_does_not_say_so_and_send_nothing(size: int, which: int) -> None:
    def body(member: Member, way: Relay) -> Any:
        encrypts = member.rank == which
        for to in range(size):
            if to != member.rank and (to == which) != encrypts:
                own, other = ("encrypts", "does not") if encrypts else ("does not", "encrypts")
                with pytest.raises(rpc.EncryptionMismatch, match=f"this worker {own} .*, and worker{to} .* {other}"):
                    rpc.call(to, repeated, "", torch.ones(1), SECRET)
            elif to != member.rank:
                assert rpc.call(to, workers.add, 1, 2) == 3
        return SECRET in way.copy

    assert on_ranks(encrypted(body, lambda member: member.rank == which), size) == [False] * size


def refused(member: Member) -> str:
    with pytest.raises(InitializationError) as caught:
        session.begin(member.store(), "worker0", 0, "127.0.0.1", 1.0)
    assert session.current() is None
    return str(caught.value)


def test_a_worker_that_cannot_encrypt_says_so() -> None:
    def without_key(member: Member) -> str:
        os.environ.pop(settings.KEY, None)
        os.environ[settings.RPC_ENCRYPT] = "1"
        return refused(member)

    def without_package(member: Member) -> str:
        os.environ[settings.KEY], os.environ[settings.RPC_ENCRYPT] = "the key of the tests", "1"
        real = builtins.__import__

        def absent(name: str, *rest: Any, **named: Any) -> Any:
            if name.startswith("cryptography"):
                raise ImportError(f"No module named {name!r}")
            return real(name, *rest, **named)

        vars(builtins)["__import__"] = absent
        import sys

        for name in [name for name in sys.modules if name.startswith(("cryptography", "phalanx.wire.encryption"))]:
            del sys.modules[name]
        return refused(member)

    def with_nonsense(member: Member) -> str:
        os.environ[settings.KEY], os.environ[settings.RPC_ENCRYPT] = "the key of the tests", "yes"
        return refused(member)

    assert "needs the job's key" in on_ranks(without_key, 1)[0]
    assert 'pip install ".[encryption]"' in on_ranks(without_package, 1)[0]
    assert "PHALANX_RPC_ENCRYPT=yes: it must be 1" in on_ranks(with_nonsense, 1)[0]
