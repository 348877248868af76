"""Messages that the other side could not take: they are refused in words before anything of them is sent."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import EncodingError
from phalanx.rpc import session
from phalanx.rpc.agent import Agent
from phalanx.rpc.codecs import Codec
from tests.rpc import workers
from tests.rpc.workers import next_of
from tests.support.ranks import Member, on_ranks


def empty_memory(nbytes: int) -> memoryview:
    """So many zeros, which take no memory until somebody reads them."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000))  # MAP_NORESERVE


def with_head(nbytes: int) -> tuple[Any, list[memoryview]]:
    return empty_memory(nbytes), []


# Its values are numbers, and travel as messages with a head of so many bytes.
LONG = Codec(with_head, lambda head, buffers: len(head), unpickles=True)


@pytest.mark.parametrize(("tcp", "nbytes"), [(False, 5 << 30), (True, 600 << 20)])
def test_a_head_that_is_too_long_is_refused_as_an_argument_and_as_an_answer(tcp: bool, nbytes: int) -> None:
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
            return rpc.call(next_of(member), len, [torch.ones(1)] * 3 + [torch.ones(1) for _ in range(count)])
        finally:
            rpc.shutdown()

    assert on_ranks(body, 2) == [count + 3] * 2
