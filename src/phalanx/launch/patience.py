"""That ranks which were told to end have not, while they are given longer than a moment for it (``--grace``).

What the launcher knows of a failure it prints once no rank is left, so that its words come after those of the ranks.
If that may take long, one line says meanwhile why the job ends, and for whom it waits how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from phalanx.words import format_named

__all__ = ["Patience"]

# As long as ranks have by default after a failure: what ends by itself in that time needs no word.
_SAID_AFTER_S = 5.0


class Patience:
    """What is still to be said of ranks that are to end.

    Args:
        say: prints a line of the launcher's own.

    Attributes:
        begun_at: when the ranks were first told to end, on the monotonic clock.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._say_at: float | None = None
        self._kill_at = float("inf")
        self.begun_at = float("inf")

    def begin(self, patience_s: float) -> None:
        """The ranks have just been told to end, and are killed in so many seconds."""
        now = time.monotonic()
        self.begun_at = min(self.begun_at, now)
        self._kill_at = min(self._kill_at, now + patience_s)  # a later order gives nobody more time
        self._say_at = now + _SAID_AFTER_S if self._kill_at - now > _SAID_AFTER_S else None

    def due_in_s(self) -> float | None:
        """When :meth:`look` has something to do; None for never."""
        say_at = self._say_at
        return None if say_at is None else max(0.0, say_at - time.monotonic())

    def look(self, unended: Callable[[], Sequence[int]], why: Callable[[], str]) -> None:
        """Say, once, for whom the launcher waits, if it has waited for long.

        Args:
            unended: gives the ranks that have not ended.
            why: gives why the job ends, as the beginning of the line.
        """
        say_at = self._say_at  # once: a signal's handler may call begin() at any time
        if say_at is None or time.monotonic() < say_at:
            return
        self._say_at = None
        if ranks := unended():
            have, are = ("has", "it is") if len(ranks) == 1 else ("have", "they are")
            who, left_s = format_named("rank", ranks), max(0.0, self._kill_at - time.monotonic())
            self._say(f"{why()}{who} {have} {left_s:.0f} s more to end before {are} killed (--grace)")
