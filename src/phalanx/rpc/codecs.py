"""How the values of a service travel: by pickle, or in a way in which nothing is unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.errors import EncodingError
from phalanx.rpc.encoding import decode, encode

__all__ = ["FACTS", "NUMBER", "PICKLED", "Codec", "pickled_parts"]

_NUMBER = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Codec:
    """How values travel. The callee's decodes requests and encodes answers; the caller's does the reverse.

    Attributes:
        encode: makes a head and buffers of a value.
        decode: makes the value of a head and buffers.
        unpickles: whether ``decode`` runs what the sender has chosen.
    """

    encode: Callable[[Any], tuple[bytes, list[memoryview]]]
    decode: Callable[[bytes | memoryview, Sequence[memoryview]], Any]
    unpickles: bool


def _encode_number(number: int) -> tuple[bytes, list[memoryview]]:
    return _NUMBER.pack(number), []


def _decode_number(head: bytes | memoryview, buffers: Sequence[memoryview]) -> int:
    if len(head) != _NUMBER.size or buffers:
        raise EncodingError.damaged(f"{len(head)} bytes where the number of a call should be")
    number: int = _NUMBER.unpack(head)[0]
    return number


def _encode_facts(value: Any) -> tuple[bytes, list[memoryview]]:
    return json.dumps(value).encode(), []


def _decode_facts(head: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    try:
        return json.loads(bytes(head))
    except (ValueError, RecursionError) as error:
        raise EncodingError.damaged(f"{len(head)} bytes where JSON should be ({error})") from error


def pickled_parts(*names: str) -> Codec:
    """:data:`PICKLED` for a tuple whose parts have names, which errors use."""
    return Codec(partial(encode, names=names), decode, unpickles=True)


PICKLED = Codec(encode, decode, unpickles=True)
NUMBER = Codec(_encode_number, _decode_number, unpickles=False)
# What workers ask each other about themselves: numbers and text, as JSON. Such a question is not asked about in turn.
FACTS = Codec(_encode_facts, _decode_facts, unpickles=False)
