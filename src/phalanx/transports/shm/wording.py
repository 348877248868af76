"""A collective in words, from what a call of the core gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.diagnosis.call_site import call_text, exchange_text
from phalanx.transports.contract import COLLECTIVES

__all__ = ["exchanged", "text_of_call"]


def text_of_call(name: str, dtype: torch.dtype | None, shape: Sequence[int], op: int | None, root: int | None) -> str:
    """A call of a collective in words; ``op`` is torch's number."""
    return call_text(name, dtype, shape, op, **({} if root is None else {COLLECTIVES[name]: root}))


def exchanged(dtype: torch.dtype, sent: bytes, expected: bytes) -> str:
    """An all_to_all, given its sizes in bytes as the core takes them."""
    return exchange_text(
        dtype, *([n // dtype.itemsize for n in memoryview(sizes).cast("Q")] for sizes in (sent, expected))
    )
