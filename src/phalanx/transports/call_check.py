"""Check that the ranks of a group make the same calls in the same order.

A call is one number, which is equal on all ranks that make the same call. Two lines that ranks have called in different
orders are a mistake that equal calls hide. The core notices it (``native/csrc/collectives/line_order.h`` has the rule).
Here is decided whether the lines are arms of one branch, which ranks may take in turns, and whether it is an error.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
from dataclasses import dataclass
from functools import cache

import torch

from phalanx import settings
from phalanx.diagnosis.call_site import shape_word, shown
from phalanx.diagnosis.divergence import are_alternatives
from phalanx.diagnosis.recorder import place_of
from phalanx.errors import CollectiveMismatch, InitializationError
from phalanx.native.core import Crossing, Pairs, Status, library
from phalanx.transports.contract import COLLECTIVES
from phalanx.transports.operands import DTYPES
from phalanx.words import tell

__all__ = ["MOST_JUDGED", "CrossedLines", "LinePairs", "Wish", "crossed_lines", "fingerprint", "weight"]

# How often crossed lines may turn out to be arms of one branch, where a warning is all that could come of it.
MOST_JUDGED = 64
_NUMBERS = {name: number for number, name in enumerate(COLLECTIVES, start=1)}


def fingerprint(name: str, tensor: torch.Tensor | None, op: int, root: int) -> int:
    """The number that the ranks compare. Of numbers alone: Python gives a text another hash in each process.

    Args:
        name: one of ``COLLECTIVES``.
        tensor: the one whose dtype and shape must agree, if any.
        op, root: -1 where there is none.
    """
    if tensor is None:
        return hash((_NUMBERS[name], op, root))
    return hash((_NUMBERS[name], DTYPES[tensor.dtype], op, root, tensor.numel(), shape_word(tensor.shape)))


@cache
def weight(pair: int) -> int:
    """A random number that all ranks compute alike: splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    word = (pair + 1) * 0x9E3779B97F4A7C15 % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


class Wish:
    """Wish of the user for calls that cross: a value of ``PHALANX_CALL_SITES``."""

    IGNORE, WARN, ERROR = "ignore", "warn", "error"

    @staticmethod
    def said() -> str:
        """The variable's value in this process; empty if it is not set."""
        return os.environ.get(settings.CALL_SITES, "")

    @staticmethod
    def read(said: str | None = None) -> str:
        """The user's, given the variable's value; by default that of this process."""
        said = Wish.said() if said is None else said
        wish = said.lower() or Wish.WARN
        if wish not in (Wish.IGNORE, Wish.WARN, Wish.ERROR):
            raise InitializationError(
                f"{settings.CALL_SITES}={said} is none of {Wish.WARN}, {Wish.ERROR} and {Wish.IGNORE}"
            )
        return wish


class LinePairs:
    """The lines from which this rank and another one make equal calls, one pair for each call.

    Args:
        own, peer: the two ranks.
        wish: of the user, see :class:`Wish`.
    """

    def __init__(self, own: int, peer: int, wish: str) -> None:
        self._core, self._own, self._peer = library(), own, peer
        self._left = MOST_JUDGED if wish == Wish.WARN else sys.maxsize
        self._pairs = Pairs()

    @property
    def settled(self) -> bool:
        """Return whether a call that both make from one line need not be counted."""
        return not self._pairs.kept

    def meet(self, mine: int, theirs: int) -> CrossedLines | None:
        """Note the two lines of a call; return what that shows to have been called in different orders."""
        if not mine or not theirs or not self._left:
            return None
        if mine == theirs and self.settled:
            return None
        crossing = Crossing()
        pairs = ctypes.byref(self._pairs)
        if self._core.phx_pairs_meet(pairs, mine, theirs, ctypes.byref(crossing)) != Status.CROSSED:
            return None
        self._left -= 1
        return crossed_lines(crossing, self._own, self._peer)


@dataclass(frozen=True)
class CrossedLines:
    """Two lines that the ranks ``low`` and ``high`` have called in different orders, in the same words on both.

    ``calls`` are the lines, as ``file:line``, each with which call of either rank it was.
    """

    low: int
    high: int
    calls: tuple[tuple[str, str], ...]

    def briefly(self) -> str:
        """``train.py:12 was call #7 of rank 0 and #8 of rank 1, train.py:14 was call #8 of …``."""
        return ", ".join(sorted(f"{os.path.basename(site)} {call}" for site, call in self.calls))

    def warn(self) -> None:
        """Tell the user, once for a group."""
        listed = "\n".join(sorted(f"  {_place(site)} {call}" for site, call in self.calls))
        tell(
            f"warning: {CollectiveMismatch.in_different_orders(self.low, self.high, listed)}"
            f" {settings.CALL_SITES}=error (phalanx run --strict) makes this an error; if it is meant, "
            f"{settings.CALL_SITES}=ignore says nothing"
        )


def crossed_lines(found: Crossing, own: int, peer: int) -> CrossedLines | None:
    """Return what the core has found of these two ranks; None if the lines are two arms of one branch."""
    sites = [place_of(line) for line in found.lines]
    if all(sites) and are_alternatives(*sites):
        return None
    (low, of_low), (high, of_high) = sorted(((own, found.mine), (peer, found.theirs)))
    calls = (
        f"was call #{first} of rank {low} and #{second} of rank {high}"
        for first, second in zip(of_low, of_high, strict=True)
    )
    return CrossedLines(low, high, tuple(zip(sites, calls, strict=True)))


def _place(site: str) -> str:
    """The text of a line, and the line."""
    file, _, line = site.rpartition(":")
    text = linecache.getline(file, int(line)).strip() if line else ""
    return f"{text} at {shown(site)}" if text else shown(site)
