"""Worlds of workers for the tests of RPC, and functions that they call on each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch.distributed as dist

from phalanx import rpc
from phalanx.rpc import connections
from tests.support.ranks import Member, on_ranks


def with_workers(
    body: Callable[[Member], Any],
    size: int,
    timeout_s: float = 60.0,
    *,
    before: Callable[[Member], None] = lambda _: None,
    typed_only: bool = False,
) -> list[Any]:
    """What ``body`` returns on each of ``size`` ranks that are workers; each calls ``before`` before it is one."""

    def run(member: Member) -> Any:
        member.join(timeout_s=timeout_s)
        before(member)
        rpc.init(timeout_s=timeout_s, typed_only=typed_only)
        try:
            return body(member)
        finally:
            rpc.shutdown()
            dist.destroy_process_group()

    return on_ranks(run, size)


def use_tcp() -> None:
    """Have this process talk over TCP also to those of its host; before ``rpc.init()``."""

    def none(receiver: Any) -> Any:
        raise OSError("there is no shared memory in this test")

    vars(connections)["SharedHub"] = none


def begin(member: Member, *, tcp: bool) -> None:
    """Make this rank a worker; with ``tcp`` one of a host without shared memory."""
    if tcp:
        use_tcp()
    member.join("gloo" if tcp else "phalanx")
    rpc.init()


def next_of(member: Member) -> str:
    """The name of the next rank's worker."""
    return f"worker{(member.rank + 1) % member.size}"


def add(a: Any, b: Any) -> Any:
    return a + b


def pid() -> int:
    return os.getpid()


def fail(text: str) -> None:
    raise KeyError(text)


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


_gate = threading.Event()


def wait_for_gate(*_: Any) -> str:
    """Return when :func:`open_gate` has been called in this process: later than anything that a caller does before."""
    assert _gate.wait(300.0)
    return "open"


def open_gate() -> None:
    _gate.set()


async def add_later(a: Any, b: Any) -> Any:
    return a + b


def count_to(most: int) -> Iterator[int]:
    yield from range(most)


async def count_later(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield number


def count_and_fail(most: int) -> Iterator[int]:
    yield from range(most)
    raise ValueError("after the last")


def descend(names: list[str], depth: int) -> int:
    """A chain of calls that wait for each other, as deep as asked."""
    return 0 if depth == 0 else 1 + int(rpc.call(names[depth % len(names)], descend, names, depth - 1))


calls: dict[str, int] = {}
_lock = threading.Lock()


def count(key: str) -> int:
    """How often it was called in this process with this key."""
    with _lock:
        calls[key] = calls.get(key, 0) + 1
        return calls[key]


class Account:
    """An object that remembers."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def pay(self, amount: float) -> float:
        self.amount += amount
        return self.amount

    def fail(self) -> None:
        raise KeyError("no such thing")

    def payments(self, count: int) -> Iterator[float]:
        for _ in range(count):
            yield self.pay(1)

    async def pay_later(self, amount: float) -> float:
        return self.pay(amount)


class Broken:
    def __init__(self) -> None:
        raise OSError("it cannot be made")


kept: list[Any] = []


def keep(thing: Any) -> None:
    kept.append(thing)


def give() -> Any:
    return kept[-1]


def let_go() -> None:
    kept.clear()
