"""What is known of a parser of bytes from outside, so that changed bytes can be given to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Parser", "as_bytes"]


@dataclass(frozen=True)
class Parser:
    """A parser.

    Attributes:
        name: what it reads, for people.
        valid: bytes from which inputs are made; it takes some of them, and the others belong to another state.
        feed: gives it bytes.
        refusals: what it may raise.
        share: how many inputs it gets, of those that a quick parser gets.
    """

    name: str
    valid: Sequence[bytes]
    feed: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...] = ()
    share: float = 1.0


def as_bytes(**values: Any) -> bytes:
    """A JSON object."""
    return json.dumps(values).encode()
