"""The parsers of what workers of RPC send each other, after the proof; see ``parsers.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import torch

from phalanx.errors import ArgumentError, EncodingError
from phalanx.rpc.codecs import FACTS, NUMBER
from phalanx.rpc.failure import Failure
from phalanx.rpc.large_heads import put_together, take_apart
from phalanx.rpc.links.shared import SharedHub
from phalanx.rpc.links.wire_format import Layout
from phalanx.rpc.members import Member
from phalanx.rpc.message import Kind
from phalanx.rpc.network import answer_of
from phalanx.rpc.services import _LENGTH, _decode_call
from phalanx.rpc.typed import Signature, decode_call, encode_call
from phalanx.wire.encryption import Exchange
from phalanx.wire.framing import Malformed
from phalanx.wire.session import Session
from tests.support.parser import Parser, as_bytes

__all__ = ["from_workers"]


def _example(x: torch.Tensor, count: int, names: list[str], scale: float = 1.0) -> None: ...


def from_workers() -> Iterator[Parser]:
    layout = Layout(Kind.REQUEST, 7, "a service", 4, [1, 2, 3]).encode() + b"head"
    yield Parser("the layout of a call", [layout], lambda data: Layout.decode(memoryview(data)), (Malformed,))

    worker = Member("worker1", 1, "h1", 4242, 3, "10.0.0.1", 4000)
    fields = as_bytes(**asdict(worker))
    named = (ValueError, TypeError, KeyError, OverflowError, RecursionError)  # all of which Connections refuses
    yield Parser("the claim of a worker", [fields], lambda data: Member.from_claim(json.loads(data)), named)

    head, buffers = encode_call(_example, (torch.ones(3), 2, ["a", "b"]), {"scale": 2.0})

    def call(data: bytes) -> None:
        decode_call(_example, data, buffers)

    yield Parser("a call without pickle", [bytes(head)], call, (EncodingError,))
    failure = Failure(b"", "ValueError", "a text", "a traceback").encode()
    yield Parser("the failure of a call", [failure], Failure.decode, (EncodingError,))
    yield Parser("facts of a worker", [b'{"a": [1, 2.5, null]}'], lambda data: FACTS.decode(data, []), (EncodingError,))
    yield Parser("the number of a call", [bytes(8)], lambda data: NUMBER.decode(data, []), (EncodingError,))
    pieces = [b"begins", b"x" * 300_000, b"ends", b"y" * 300_000]
    whole, beside = put_together(pieces, [])

    def head_of(data: bytes) -> None:
        file, _ = take_apart(data, beside)
        assert len(file.read(1 << 30)) <= len(data) + 600_000

    yield Parser("the head of a large call", [whole], head_of, (EncodingError,))
    yield from _calls_of_services()
    yield from _before_links()


def _calls_of_services() -> Iterator[Parser]:
    arguments, buffers = encode_call(_example, (torch.ones(3), 2, ["a", "b"]), {"scale": 2.0})
    head = _LENGTH.pack(len("example")) + b"example" + bytes(arguments)
    signatures = {"example": Signature(_example)}
    yield Parser(
        "a call of a service",
        [head],
        lambda data: _decode_call("a service", signatures, data, buffers),
        (EncodingError, ArgumentError),
    )


def _before_links() -> Iterator[Parser]:
    """What two workers say before there is a link."""
    hub = SharedHub.__new__(SharedHub)
    hub._core, hub._handle = (
        cast(Any, SimpleNamespace(phx_rpc_accept=lambda *numbers: 0, phx_rpc_close=lambda handle: None)),
        1,
    )
    offer = as_bytes(pid=4242, channel=5, cookie="00" * 16, place=7, place_cookie="ff" * 16)
    yield Parser("the offer of shared memory", [offer], hub.accept)
    answers = [as_bytes(shared=1), as_bytes(received=9), as_bytes(refused="another worker is at its address")]
    yield Parser("the answer of a worker", answers, answer_of, (ConnectionAbortedError,))

    def exchange(data: bytes) -> None:
        session = Session(b"k" * 32, is_listener=True)
        Exchange().session(session, data.decode("utf-8", "surrogateescape"), is_listener=True)

    yield Parser("a key for encryption", [Exchange().public.encode()], exchange, (Malformed,), share=0.2)
