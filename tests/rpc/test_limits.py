"""What waits for a slow callee is bounded and runs in the end; a message that is too large is refused in words."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx import rpc
from phalanx.errors import CallTimeout, EncodingError
from phalanx.rpc import agent, backlog, connections, handlers, network, session
from phalanx.rpc.agent import Agent
from phalanx.rpc.codecs import Codec
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.shared import SharedHub
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon

PATIENCE_S = 60.0

_gate = threading.Event()


def wait_for_gate(number: int) -> int:
    assert _gate.wait(PATIENCE_S)
    return number


def open_gate(incoming: Any, value: Any) -> None:
    _gate.set()


def begun(
    start: Callable[[int], rpc.Future[int]], count: int, *, until: int
) -> tuple[list[rpc.Future[int]], threading.Thread]:
    """Calls that a thread begins one after the other, a while after so many have begun; and the thread."""
    futures: list[rpc.Future[int]] = []

    def start_each() -> None:
        for number in range(count):
            futures.append(start(number))  # noqa: PERF401 - counted meanwhile

    starter = threading.Thread(target=start_each)
    starter.start()
    end = time.monotonic() + PATIENCE_S
    while len(futures) < until and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)  # so that one more would have begun if it could
    return futures, starter


def serve_gate(tcp: bool) -> None:
    if tcp:
        workers.use_tcp()
    session.on_init(lambda made: made.serve("open", open_gate, quick=True))


@pytest.mark.parametrize("tcp", [False, True])
def test_a_caller_has_a_limited_number_of_calls_at_a_slow_callee(tcp: bool) -> None:
    size, most = 2, 40

    def before(_: Member) -> None:
        agent.MOST_CALLS, handlers.MOST = most, 10
        serve_gate(tcp)

    def body(member: Member) -> Any:
        if member.rank:
            return True
        futures, starter = begun(lambda number: rpc.start(1, wait_for_gate, number), 3 * most, until=most)
        limited = len(futures) == most
        session.agent().notify(1, "open", None)
        starter.join()
        return limited and [future.wait() for future in futures] == list(range(3 * most))

    assert with_workers(body, size, PATIENCE_S, before=before) == [True] * size


def wait_with(tensor: torch.Tensor) -> int:
    assert _gate.wait(PATIENCE_S)
    return tensor.numel()


@pytest.mark.parametrize("tcp", [False, True])
def test_a_caller_has_a_limited_number_of_bytes_at_a_slow_callee(tcp: bool) -> None:
    size, nbytes, fit, more = 3, 1 << 20, 8, 20
    larger = 12 << 20  # than all that may be under way

    def before(_: Member) -> None:
        agent.MOST_BYTES = fit * nbytes
        vars(connections)["SharedHub"] = partial(SharedHub, threads=4)  # which all wait
        serve_gate(tcp)

    def body(member: Member) -> Any:
        if member.rank:
            return True
        assert rpc.call(1, torch.numel, torch.zeros(larger, dtype=torch.uint8)) == larger
        argument = torch.zeros(nbytes, dtype=torch.uint8)
        futures, starter = begun(lambda _: rpc.start(1, wait_with, argument), more, until=fit)
        limited = len(futures) == fit
        with pytest.raises(CallTimeout):
            rpc.call(1, wait_with, argument, timeout_s=0.5)
        assert rpc.call(1, workers.add, 1, 2) == 3  # small ones pass
        assert rpc.call(2, torch.numel, argument) == nbytes  # and so do those to others
        session.agent().notify(1, "open", None)
        starter.join()
        assert rpc.call(1, torch.numel, torch.zeros(larger, dtype=torch.uint8)) == larger
        return limited and [future.wait() for future in futures] == [nbytes] * more

    assert with_workers(body, size, PATIENCE_S, before=before) == [True] * size


def resident(incoming: Any, value: Any) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_calls_that_are_given_up_before_they_began_give_their_memory_back() -> None:
    nbytes, count = 16 << 20, 10

    def body(member: Member) -> Any:
        handlers.MOST = 1
        vars(network)["Readers"] = partial(Readers, threads=1)  # which runs no handler, since none would read then
        workers.use_tcp()

        def serve(made: agent.Agent) -> None:
            made.serve("open", open_gate, quick=True)
            made.serve("resident", resident, quick=True)

        session.on_init(serve)
        member.join()
        rpc.init(timeout_s=PATIENCE_S)
        try:
            if member.rank:
                return True
            own = session.agent()
            before = own.request(1, "resident", None).wait()
            futures = [rpc.start(1, wait_with, torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(count)]

            def held() -> int:
                return int(own.request(1, "resident", None).wait() - before) // nbytes

            assert soon(lambda: held() >= count - 1)
            for future in futures[1:]:
                future.cancel()
            assert soon(lambda: held() <= 2)  # that of the one that runs, and one that had just come
            own.notify(1, "open", None)
            return futures[0].wait() == nbytes
        finally:
            rpc.shutdown()
            dist.destroy_process_group()

    assert on_ranks(body, 2) == [True, True]


def note_and_give(path: str, nbytes: int) -> torch.Tensor:
    with open(path, "ab", buffering=0) as file:
        file.write(b".")
    return torch.ones(nbytes, dtype=torch.uint8)


def begun_in(path: Path) -> int:
    return len(path.read_bytes()) if path.exists() else 0


def test_untaken_answers_hold_back_only_that_callers_next_calls() -> None:
    size, nbytes, count, fit = 3, 1 << 20, 40, 8

    def before(_: Member) -> None:
        backlog.MOST_BYTES = fit * nbytes
        workers.use_tcp()

    def body(member: Member) -> Any:
        path, full = member.folder / "begun", member.folder / "full"
        if member.rank == 1:
            return True
        if member.rank == 2:
            while not full.exists():
                time.sleep(0.01)
            assert rpc.call(1, torch.ones, 3).tolist() == [1.0] * 3  # it takes its answers
            (member.folder / "taken").touch()
            return True
        assert rpc.call(1, workers.add, 1, 2) == 3
        made = session.agent()
        link: Any = made._connections.link_now(made.member(1))
        with link._reading:  # nobody reads what comes
            futures = []
            for number in range(count):
                futures.append(rpc.start(1, note_and_give, str(path), nbytes))
                until = time.monotonic() + 0.1  # until it has begun, if it does
                while begun_in(path) <= number and time.monotonic() < until:
                    time.sleep(0.001)
                if begun_in(path) <= number and not full.exists():
                    full.touch()
                    assert soon((member.folder / "taken").exists)  # the third rank calls meanwhile
            held_at = begun_in(path)
        link._arm()
        for future in futures:
            assert future.wait().sum() == nbytes
        return held_at < count // 2 and begun_in(path) == count

    assert with_workers(body, size, PATIENCE_S, before=before) == [True] * size


def empty_memory(nbytes: int) -> memoryview:
    """So many zeros, which take no memory until somebody reads them."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000))  # MAP_NORESERVE


def with_head(nbytes: int) -> tuple[Any, list[memoryview]]:
    return empty_memory(nbytes), []


# Its values are numbers, and travel as messages with a head of so many bytes.
LONG = Codec(with_head, lambda head, buffers: len(head), unpickles=True)


@pytest.mark.parametrize(("tcp", "nbytes"), [(False, 5 << 30), (True, 600 << 20)])
def test_too_long_head_is_refused_as_argument_and_as_answer(tcp: bool, nbytes: int) -> None:
    def body(member: Member) -> Any:
        def serve(made: Agent) -> None:
            made.serve("long", lambda incoming, length: nbytes, codec=Codec(with_head, lambda *_: 0, unpickles=True))

        session.on_init(serve)
        workers.begin(member, tcp=tcp)
        try:
            said = []
            for asked in (nbytes, 1):  # the argument is too long; the answer is
                with pytest.raises(EncodingError) as caught:
                    session.agent().request(next_of(member), "long", asked, codec=LONG).wait()
                said.append(str(caught.value))
            assert rpc.call(next_of(member), workers.add, 1, 2) == 3
            return said
        finally:
            rpc.shutdown()

    way, most = ("tcp", "0.5 GiB") if tcp else ("shared memory", "4.0 GiB")
    for said in on_ranks(body, 2):
        for text in said:
            assert f"a value cannot be sent by {way}: without its tensors it has {nbytes / 2**30:.1f} GiB" in text
            assert f"at most {most} are possible" in text


@pytest.mark.parametrize(("tcp", "count"), [(False, 10_000), (True, 70_000)])
def test_a_value_may_have_very_many_tensors(tcp: bool, count: int) -> None:
    def body(member: Member) -> Any:
        workers.begin(member, tcp=tcp)
        try:
            if member.rank:
                return count + 3
            return rpc.call(next_of(member), len, [torch.ones(1)] * 3 + [torch.ones(1) for _ in range(count)])
        finally:
            rpc.shutdown()

    assert on_ranks(body, 2) == [count + 3] * 2
