"""Worlds of workers for the tests of RPC, and functions that they call on each other."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from phalanx import rpc
from phalanx.errors import WorkerLost
from phalanx.rpc import connections, session, streams
from phalanx.rpc.autograd.contexts import contexts
from tests.support.ranks import Member, on_ranks


def with_workers(
    body: Callable[[Member], Any],
    size: int,
    timeout_s: float = 60.0,
    *,
    before: Callable[[Member], None] = lambda _: None,
    tcp: bool = False,
    typed_only: bool = False,
) -> list[Any]:
    """What ``body`` returns on each of ``size`` ranks that are workers; each calls ``before`` before it is one."""

    def run(member: Member) -> Any:
        before(member)
        begin(member, tcp=tcp, timeout_s=timeout_s, typed_only=typed_only)
        try:
            return body(member)
        finally:
            rpc.shutdown()
            dist.destroy_process_group()

    return on_ranks(run, size)


def begin(member: Member, *, tcp: bool = False, timeout_s: float = 60.0, **options: Any) -> None:
    """Make this rank a worker; with ``tcp`` one of a host without shared memory."""
    if tcp:
        use_tcp()
    member.join("gloo" if tcp else "phalanx")
    rpc.init(timeout_s=timeout_s, **options)


def use_tcp() -> None:
    """Have this process talk over TCP also to those of its host; before ``rpc.init()``."""

    def none(receiver: Any) -> Any:
        raise OSError("there is no shared memory in this test")

    vars(connections)["SharedHub"] = none


def torch_started(member: Member, *, size: int | None = -1) -> Any:
    """torch's module, in which this rank is a worker."""
    import phalanx.rpc.torch_api as torch_rpc

    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{member.folder}/rpc")
    world_size = member.size if size == -1 else size
    torch_rpc.init_rpc(f"worker{member.rank}", rank=member.rank, world_size=world_size, rpc_backend_options=options)
    return torch_rpc


def next_of(member: Member) -> str:
    """The name of the next rank's worker."""
    return f"worker{(member.rank + 1) % member.size}"


def left(asking: int = 0) -> list[str]:
    """What this worker keeps of calls: nothing, when none is under way but those that ask."""
    kept.clear()
    gc.collect()
    own = session.worker()
    found: dict[str, Any] = {
        "objects": rpc.objects(),
        "calls": own._calls.all(),
        "calls that were given up": [call for peer in own._connections.peers() for call in peer.given_up],
        "requests under way": requests()[asking:],
        "what answers rely on": [thing for peer in own._connections.peers() for thing in peer.kept],
        "streams": streams._sources,
        "contexts": contexts.all(),
    }
    return [f"{name}: {list(things)}" for name, things in found.items() if things]


def requests() -> list[Any]:
    """The requests of all workers that are under way here."""
    return [each for peer in session.worker()._connections.peers() for each in list(peer.requests.values())]


def mappings() -> int:
    """How many pieces of memory of links this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:phalanx-rpc")


def add(a: Any, b: Any) -> Any:
    return a + b


async def add_later(a: Any, b: Any) -> Any:
    return a + b


losses = 0


def lose() -> None:
    """Raise what a call of this worker's to a third one would, and count how often."""
    global losses
    losses += 1
    raise WorkerLost("another worker is gone")


def times_lost() -> int:
    return losses


def pid() -> int:
    return os.getpid()


def fail(text: str) -> None:
    raise KeyError(text)


_gate = threading.Event()


def wait_for_gate(*_: Any) -> str:
    """Return when :func:`open_gate` has been called in this process: later than anything that a caller does before."""
    assert _gate.wait(300.0)  # where it waits
    return "open"


def open_gate(*_: Any) -> None:
    _gate.set()


def open_gate_once_given_up() -> None:
    """Open the gate when this worker knows that a caller has given one of its calls up."""
    ends_at = time.monotonic() + 300.0
    while not any(request.given_up for request in requests()):
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    open_gate()


def count_to(most: int) -> Iterator[int]:
    yield from range(most)


def descend(names: list[str], depth: int) -> int:
    """A chain of calls that wait for each other, as deep as asked."""
    return 0 if depth == 0 else 1 + int(rpc.call(names[depth % len(names)], descend, names, depth - 1))


class Account:
    """An object that remembers."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def pay(self, amount: float) -> float:
        self.amount += amount
        return self.amount


kept: list[Any] = []


def keep(thing: Any) -> None:
    kept.append(thing)


def give_all() -> list[Any]:
    return kept


def let_go() -> None:
    kept.clear()
