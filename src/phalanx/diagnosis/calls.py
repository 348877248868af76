"""Calls as text, for errors that say what each rank did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist

from phalanx.diagnosis.shapes import lengths_that_count, shape_text
from phalanx.words import first_kinds, format_named

__all__ = ["call_text", "dtype_name", "exchange_text", "listed", "shape_word"]


def call_text(
    name: str, dtype: torch.dtype | None, shape: Sequence[int] = (), op: int | None = None, **root: int
) -> str:
    """A call as its user wrote it: ``all_reduce(float32[4, 2], sum)``, ``gather(int64[3], dst=0)``.

    Args:
        name: the name of the collective.
        dtype, shape: those of its tensor; None for a call that has no tensor.
        op: the number of the ``ReduceOp``; None if the call is not a reduction.
        root: the root rank, by the name of its argument.
    """
    parts = [] if dtype is None else [f"{dtype_name(dtype)}{shape_text(tuple(shape))}"]
    if op is not None:
        parts.append(dist.ReduceOp.RedOpType(op).name.lower())
    parts += [f"{key}={value}" for key, value in root.items()]
    return f"{name}({', '.join(parts)})"


def exchange_text(dtype: torch.dtype, sent: Sequence[int], expected: Sequence[int]) -> str:
    """An all_to_all, given how many elements it sends to and expects from each rank."""
    return f"all_to_all({dtype_name(dtype)}, sends {list(sent)}, expects {list(expected)} elements)"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without torch's name: ``float32``."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=4096)
def shape_word(shape: tuple[int, ...]) -> int:
    """A number by which ranks compare the shapes of a call; 0 for a shape that goes with any other of that size."""
    compared = lengths_that_count(shape)
    return hash(compared) if compared else 0


def listed(calls: dict[int, str], ranks: Iterable[int]) -> str:
    """One line for each different call, with those of the ranks that made it."""
    ranks_of: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_of.setdefault(calls.get(rank, "not known; in other code, or ended"), []).append(rank)
    lines = [f"  {format_named('rank', sorted(members))}: {call}" for call, members in ranks_of.items()]
    return "\n".join(first_kinds(lines))
