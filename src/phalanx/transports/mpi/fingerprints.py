"""A collective call as one number, equal on all ranks that make the same call."""

from __future__ import annotations

from functools import cache

import torch

from phalanx.transports.layout import DTYPES

__all__ = ["KINDS", "ROOT_NAMES", "fingerprint", "weight"]

KINDS = (
    "",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)


ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, BARRIER = range(1, 10)


ROOT_NAMES = {REDUCE: "dst", GATHER: "dst", BROADCAST: "src", SCATTER: "src"}


_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(sorted(DTYPES, key=str), start=1)}


def fingerprint(kind: int, tensor: torch.Tensor | None, op: int, root: int) -> int:
    """What the ranks compare of a call: the same number on all that call the same."""
    if tensor is None:
        return hash((kind, op, root))
    return hash((kind, _DTYPE_NUMBERS[tensor.dtype], op, root, tensor.shape))


@cache
def weight(pair: int) -> int:
    """Random, and the same everywhere: splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    word = (pair + 1) * 0x9E3779B97F4A7C15 % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31
