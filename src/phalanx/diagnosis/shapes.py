"""Which shapes go together in one collective, and the text by which a flight recorder names a shape.

torch asks the ranks for the same number of elements, not for the same shape: a vector may meet a matrix, and a scalar a
tensor of one element. Two matrices of different shapes are a mistake (one is transposed).
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["lengths_in", "lengths_that_count", "shape_text"]

_TEXT = re.compile(r"\[\d{1,18}(, \d{1,18})*\]", re.ASCII)


def lengths_that_count(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What of a shape two ranks must have alike, if both have something; empty if it goes with any of its size."""
    long = tuple(length for length in shape if length > 1)
    return long if len(long) > 1 else ()


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as it follows the dtype in words: ``[2, 3]``."""
    return str(list(shape))


@lru_cache(maxsize=4096)
def lengths_in(text: str) -> tuple[int, ...]:
    """The shape that :func:`shape_text` has named; empty for any other text."""
    return tuple(map(int, text[1:-1].split(", "))) if _TEXT.fullmatch(text) else ()
