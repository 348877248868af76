"""A collective call as one number, equal on all ranks that make the same call."""

from __future__ import annotations

from functools import cache

import torch

from phalanx.diagnosis.call_site import shape_word
from phalanx.transports.contract import COLLECTIVES
from phalanx.transports.layout import DTYPES

__all__ = ["fingerprint", "weight"]

_NUMBERS = {name: number for number, name in enumerate(COLLECTIVES, start=1)}
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(sorted(DTYPES, key=str), start=1)}


def fingerprint(name: str, tensor: torch.Tensor | None, op: int, root: int) -> int:
    """The number that the ranks compare: the same on all ranks that make the same call.

    Only numbers go into it, since Python gives a text another hash in each process.

    Args:
        name: one of ``COLLECTIVES``.
        tensor: the one whose dtype and shape must agree, if any.
        op, root: -1 where there is none.
    """
    if tensor is None:
        return hash((_NUMBERS[name], op, root))
    return hash((_NUMBERS[name], _DTYPE_NUMBERS[tensor.dtype], op, root, tensor.numel(), shape_word(tensor.shape)))


@cache
def weight(pair: int) -> int:
    """A random number that all ranks compute alike: splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    word = (pair + 1) * 0x9E3779B97F4A7C15 % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31
