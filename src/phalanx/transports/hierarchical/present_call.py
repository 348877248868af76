"""The collective in which a rank of a group over several hosts is: its words, and that its errors break the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from phalanx.diagnosis.call_site import CallSite, call_site, capture, exchange_text
from phalanx.errors import CollectiveMismatch, PeerLost, PhalanxError
from phalanx.membership.protocol import Late
from phalanx.transports.contract import Communicator
from phalanx.transports.fingerprints import fingerprint
from phalanx.transports.hierarchical.calls import Crossed, Differs, LeftOut
from phalanx.transports.hierarchical.gloo_engine import TransferFailed
from phalanx.transports.hierarchical.reason import Reason
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.explanation import text_of_call

__all__ = ["PresentCall"]


@cache
def _fingerprint_of_exchange(dtype: torch.dtype) -> int:
    return fingerprint("all_to_all", torch.empty(0, dtype=dtype), -1, -1)


def _exchange_text(dtype: torch.dtype, *nbytes: Sequence[int]) -> str:
    return exchange_text(dtype, *([each // dtype.itemsize for each in parts] for parts in nbytes))


def _in_words(call: _Words | None) -> str:
    if call is None:
        return ""
    make, arguments, place = call
    site = call_site(place)
    return f"{make(*arguments)} at {site}" if site else make(*arguments)


_Words = tuple[Callable[..., str], tuple[Any, ...], CallSite | None]  # what writes the text of a call, and its line


class PresentCall:
    """The collective that this rank is in, for errors. Used in a ``with``: what is raised there breaks the group.

    It is written by the thread that makes the call, of which there is one at a time. The call before is kept as well:
    inside a host, a rank that need not wait for another one learns in the next call that their calls differ.

    Attributes:
        is_compared: whether the last call has returned only after the calls of all ranks had been compared: each host's
            leader had compared those beside it before it sent its frame. Set by the collective, at its end.
    """

    def __init__(self, reason: Reason, timeout: timedelta, local: Communicator) -> None:
        self._reason = reason
        self._local = local if isinstance(local, SharedMemoryCommunicator) else None
        self.timeout_s = timeout.total_seconds()
        self._present: _Words | None = None
        self._before: _Words | None = None
        self._number = 0  # of the present call, equal for equal calls
        self._count = 0  # of the calls so far
        self.is_compared = False
        self._error: BaseException | None = None
        self._has_told = False  # whether a message has reported the break; any thread sets it, and close() reads it

    def named(
        self, name: str, tensor: torch.Tensor | None, op: int | None = None, root: int | None = None
    ) -> PresentCall:
        """The call of a collective."""
        dtype, shape = (None, ()) if tensor is None else (tensor.dtype, tensor.shape)
        self._number = fingerprint(name, tensor, -1 if op is None else op, -1 if root is None else root)
        return self._next(text_of_call, (name, dtype, shape, op, root))

    def exchanging(self, dtype: torch.dtype, given: Sequence[int], expected: Sequence[int]) -> PresentCall:
        """The call of an all_to_all, by the bytes of its parts."""
        self._number = _fingerprint_of_exchange(dtype)
        return self._next(_exchange_text, (dtype, given, expected))

    def _next(self, make: Callable[..., str], arguments: tuple[Any, ...]) -> PresentCall:
        self._before, self._present = self._present, (make, arguments, capture(3))
        return self

    def text(self) -> str:
        """The call, with its line, and which lines this rank's host has found crossed."""
        return self._with(self._local.crossed if self._local is not None else "")

    def _with(self, crossed: str) -> str:
        text = _in_words(self._present)
        return f"{text} ({crossed})" if crossed else text

    def last_but(self, calls: int) -> str:
        """The last call, or the last but one, with its line; empty if there was none."""
        return _in_words(self._before if calls else self._present)

    def is_late(self) -> bool:
        """Whether the calls that are found to differ are those before this one."""
        return self._local is not None and self._local.differs_late and self._before is not None

    def error_of_message(self, error: BaseException, message: str) -> PhalanxError:
        """What a message raises, given what was found, and the message with its line; it breaks the group.

        Any thread may call it.
        """
        self._has_told = True
        found = self._reason.error(error, message, self.timeout_s, of_message=True)
        return found if isinstance(found, PhalanxError) else PeerLost(str(found))

    def compare_last(self, patience_s: float) -> None:
        """Compare the last calls of the ranks, which no later call will, before this one leaves the group.

        The leaders of the hosts compare every call before it is done, so only what the ranks beside them called can be
        unknown then. A host's ranks compare that through the memory that they share.
        """
        if self._error is not None or self._has_told or not self._count:
            return
        found = self._difference(patience_s)
        if found is not None:
            self._error = self._reason.error(found, self.text(), self.timeout_s)
            raise self._error from None

    def _difference(self, patience_s: float) -> Exception | None:
        """What is wrong with the last calls, and new to this rank; none of its own has failed here."""
        known = self._reason.told()
        if known is not None:
            is_of_last = not isinstance(known, Late) and known.at == self._count
            return TransferFailed(-1, "another rank has found what is wrong with the last call") if is_of_last else None
        if self._local is not None and not self.is_compared:
            try:
                self._local.compare_rest(patience_s)
            except CollectiveMismatch as error:
                return error
            except PeerLost as error:
                return LeftOut(error.group_rank)
        return None

    def __enter__(self) -> int:
        """Begin it; return its number."""
        if self._error is not None:
            raise self._error
        if self._local is not None:
            self._local.begin_parts(self._number)
        self._count += 1
        self.is_compared = False
        self._reason.begin()
        return self._number

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or error is self._error:
            self._reason.end()
            return
        text = self._with(str(error)) if isinstance(error, Crossed) else self.text()
        self._error = self._reason.error(error, text, self.timeout_s)
        self._reason.end()
        if self._error is not error:
            # What Phalanx found itself is in the words of the error. An error among the ranks of this host would name
            # their part of the call, such as the reduce in an all_reduce.
            inner = isinstance(error, (Crossed, Differs, TransferFailed, PhalanxError))
            raise self._error from (None if inner else error)
