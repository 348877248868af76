"""What callers rely on when something goes wrong around a call: callbacks that raise, callers that give up, exits."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from phalanx import rpc
from phalanx.errors import CallTimeout, ClosedError
from phalanx.rpc import session, streams
from phalanx.rpc.failure import RemoteError
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member
from tests.support.waiting import soon

PATIENCE_S = 30.0


def raises(_: Any) -> None:
    raise KeyError("a callback")


def leave() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


received: list[int] = []


def acknowledge(number: int) -> None:
    received.append(number)


def wait_for_each(most: int) -> Iterator[int]:
    for number in range(most):
        yield number
        assert soon(partial(received.__contains__, number))


def test_callers_that_give_up_fail_or_fork_disturb_no_other_call() -> None:
    def body(member: Member) -> None:
        to = next_of(member)
        call = rpc.start(to, workers.wait_for_gate)
        assert call.then(lambda value: value).cancel()  # giving up what follows gives up the call
        with pytest.raises(rpc.Cancelled):
            call.wait(PATIENCE_S)

        first = rpc.start(to, workers.wait_for_gate, timeout_s=0.1)
        first.add_done_callback(raises)
        second = rpc.start(to, workers.wait_for_gate, timeout_s=0.15)
        waited: list[bool] = []
        second.add_done_callback(lambda _: waited.append(calls_in_vain(to)))
        for future in (first, second, rpc.start(to, workers.wait_for_gate, timeout_s=0.3)):
            with pytest.raises(CallTimeout) as caught:
                future.wait(PATIENCE_S)
            assert all(words in str(caught.value) for words in (to, "wait_for_gate", "test_reliance.py:"))
        assert soon(lambda: waited == [True])

        for function in (leave, interrupt):  # what ends a program ends only the call
            with pytest.raises(RemoteError, match=r"SystemExit|KeyboardInterrupt"):
                rpc.call(to, function)

        shared = rpc.start(to, workers.wait_for_gate)  # awaited on several loops, and outlives one that was closed

        async def wrapped() -> Any:
            return await shared

        async def give_up_soon() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(wrapped()), 0.05)

        asyncio.run(give_up_soon())
        child = os.fork()
        if child == 0:  # it does not wait for its parent's calls
            try:
                shared.wait()
            except ClosedError:
                os._exit(5)
            os._exit(6)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        rpc.call(to, workers.open_gate)
        assert (asyncio.run(wrapped()), shared.wait()) == ("open", "open")

        for item in rpc.call(to, wait_for_each, 6):  # a generator may wait for what is done with its items
            rpc.call(to, acknowledge, item)
        assert rpc.call(to, workers.add, 1, 2) == 3

    with_workers(body, 2)


def calls_in_vain(to: str) -> bool:
    with pytest.raises(CallTimeout):
        rpc.call(to, workers.wait_for_gate, timeout_s=0.1)
    return True


ended: list[str] = []


def tell_me_the_end(most: int, name: str) -> Iterator[int]:
    try:
        yield from range(most)
    finally:
        ended.append(name)


async def tell_me_the_end_later(most: int, name: str) -> AsyncIterator[int]:
    try:
        for number in range(most):
            yield number
    finally:
        ended.append(name)


def opened_and_ended() -> tuple[int, list[str]]:
    return len(streams._sources), sorted(ended)


def test_generators_end_when_nobody_wants_them() -> None:
    def body(member: Member) -> None:
        to = next_of(member)
        stopped = rpc.call(to, tell_me_the_end, 1000, "closed")
        assert [next(stopped), next(stopped)] == [0, 1]
        stopped.close()
        dropped = rpc.call(to, tell_me_the_end_later, 1000, "dropped")
        assert next(dropped) == 0
        del dropped
        assert list(rpc.call(to, tell_me_the_end, 10, "whole")) == list(range(10))
        rpc.call(to, tell_me_the_end, 10, "never begun")  # so it has no finally to run
        late = rpc.start(to, slow_offer, timeout_s=0.05)
        with pytest.raises(CallTimeout):
            late.wait()
        rpc.call(to, workers.open_gate)
        for _ in range(20):
            rpc.start(to, tell_me_the_end, 10, "cancelled").cancel()
        gc.collect()
        names = ["closed", "dropped", "whole"]
        assert soon(lambda: rpc.call(to, opened_and_ended) == (0, names)), rpc.call(to, opened_and_ended)

    with_workers(body, 2)


def slow_offer() -> Iterator[int]:
    workers.wait_for_gate()
    return workers.count_to(10)


def make_here() -> Any:
    return rpc.make(session.worker().me, workers.Account, 1)


def test_calls_of_every_kind_leave_nothing() -> None:
    def body(member: Member) -> None:
        to = next_of(member)
        for _ in range(20):
            rpc.call(to, workers.add, 1, 2)
            with pytest.raises(KeyError):
                rpc.call(to, workers.fail, "x")
            rpc.start(to, workers.add_later, 1, 2).then(lambda value: value + 1).wait()
            rpc.make(to, workers.Account, 1).pay(1)
            list(rpc.call(to, workers.count_to, 3))
            next(rpc.call(to, workers.count_to, 3))
            for function, args in ((workers.add, (1, 2)), (workers.count_to, (3,)), (make_here, ())):
                rpc.start(to, function, *args).cancel()
        gc.collect()
        assert soon(lambda: rpc.call(to, workers.left, 1) == []), rpc.call(to, workers.left, 1)

    with_workers(body, 2)


PROGRAM = """
import os, signal, threading, time
import phalanx
from phalanx import rpc
from phalanx.errors import ClosedError

def endless(): time.sleep(3600)
def stop(*_): rpc.shutdown(); done.set()

phalanx.init()
rpc.init()
try:
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    rpc.call(0, endless, timeout_s=1000)
except KeyboardInterrupt:
    print("interrupted", rpc.call(0, divmod, 7, 3), flush=True)
for end in (lambda: rpc.shutdown(wait=False), lambda: rpc.start(0, stop, timeout_s=1000).wait()):
    try:
        future = rpc.start(0, endless, timeout_s=1000)
        done = threading.Event()
        end()
        future.wait()
    except ClosedError:
        print("told", flush=True)
    rpc.shutdown()
    rpc.init()
done = threading.Event()
rpc.start(0, divmod, 7, 3).then(stop)
print(done.wait(60), flush=True)
rpc.init()
future = rpc.start(0, endless, timeout_s=1000)
print("end", flush=True)
"""


def test_a_process_always_gets_to_its_end() -> None:
    """After an interrupt, closed with calls under way, from a handler or a callback, and without ``rpc.shutdown()``."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["interrupted (2, 1)", "told", "told", "True", "end"], ran.stderr
