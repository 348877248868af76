"""A question of the launcher's to the parents of all ranks, and their answers (``observer.py``).

The launcher wants to know what the ranks do: their states and operations, and where those stand that it names. All
answers go to it in one message. A parent that does not answer in time is left out, and its ranks are named instead, so
that it delays nothing. An answer that comes later belongs to no question any more and is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Survey"]


class Survey:
    """The question that is open now, if there is one.

    Args:
        ask: sends an order to a parent, which is named by a number.
        answer: sends the supervisor a message.
    """

    def __init__(self, ask: Callable[[int, dict[str, Any]], None], answer: Callable[..., None]) -> None:
        self._ask, self._answer = ask, answer
        self._number = 0
        self._due_at: float | None = None
        self._waiting: dict[int, Sequence[int]] = {}
        self._silent: list[int] = []
        self._found: dict[str, Any] = {}

    @property
    def due_at(self) -> float | None:
        """When :meth:`act` has something to do; None for never."""
        return self._due_at

    def begin(self, order: Mapping[str, Any], parents: Mapping[int, Sequence[int]]) -> None:
        """Put a question; one that is still open is over.

        Args:
            order: ``of``, the ranks that are to write their stacks; ``records``, how many operations of each are
                wanted; ``within_s``, how long to wait; ``skip``, the ranks whose parents are not asked, because they
                have not answered before.
            parents: the ranks of each parent that can be asked, by its number.
        """
        self._number += 1
        skipped = {number: ranks for number, ranks in parents.items() if set(ranks) & set(order["skip"])}
        self._silent = [rank for ranks in skipped.values() for rank in ranks]
        self._waiting = {number: ranks for number, ranks in parents.items() if number not in skipped}
        self._found = {"ranks": {}, "stacks": {}, "waited_s": 0.0, "still_s": []}
        self._due_at = time.monotonic() + order["within_s"]
        question = {"do": "examine", "number": self._number, "of": order["of"], "records": order["records"]}
        for parent in list(self._waiting):
            self._ask(parent, question)
        self._finish_if_complete()

    def hear(self, parent: int, message: Mapping[str, Any]) -> None:
        """Take an answer."""
        if message["number"] != self._number or self._waiting.pop(parent, None) is None:
            return
        later_ns = time.monotonic_ns() - message["now_ns"]
        self._found["ranks"] |= {rank: {**seen, "later_ns": later_ns} for rank, seen in message["ranks"].items()}
        self._found["stacks"] |= message["stacks"]
        self._found["waited_s"] = max(self._found["waited_s"], message["waited_s"])
        self._found["still_s"].append(message["still_s"])
        self._finish_if_complete()

    def lose(self, parent: int) -> None:
        """A parent has gone, or has no rank any more: its ranks have ended, and the supervisor learns how."""
        if self._waiting.pop(parent, None) is not None:
            self._finish_if_complete()

    def drop(self) -> None:
        """A host is lost, and the job ends for that: an open question gets no answer, which could only blame ranks."""
        self._due_at, self._waiting = None, {}

    def act(self, now: float) -> None:
        """Wait no longer, if the time is up."""
        if self._due_at is not None and now >= self._due_at:
            self._finish()

    def _finish_if_complete(self) -> None:
        if self._due_at is not None and not self._waiting:
            self._finish()

    def _finish(self) -> None:
        self._due_at = None
        silent = [*self._silent, *(rank for ranks in self._waiting.values() for rank in ranks)]
        self._waiting = {}
        still_s = min(self._found["still_s"], default=0.0)
        self._answer(event="examined", **{**self._found, "still_s": still_s, "silent": silent})
