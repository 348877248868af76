"""Messages whose wait must end though nothing comes: their time is over, or another rank has broken the group.

A thread that waits in an engine cannot be woken by a clock, so one thread looks after all that wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from phalanx.errors import BackendError
from phalanx.system.threads import AwakeClock, start

__all__ = ["Overdue"]

LOOK_S = 0.25
ASK_S = 1.0  # how often to ask whether the group is broken, which is a question to rank 0's host
IDLE_S = 5.0  # after which the thread sleeps until somebody waits


class Overdue:
    """The messages of one group that somebody waits for.

    ``_since`` is written by the threads that wait and read by this one's; each access is one step of Python's. So it is
    with ``_asleep``, which this one's thread writes, and ``_closed``, which :meth:`close` writes before it sets
    ``_wake``.

    Args:
        timeout_s: how long a message may take.
        late: called with a message whose time is over, and with the timeout.
        broken: whether the group is broken. It may take a while, and is asked seldom.
        break_off: called when it is.
        look: called as often as that is asked.
        unwatched: called with a message that no thread looks after, and why there is none.
    """

    def __init__(
        self,
        timeout_s: float,
        late: Callable[[Any, float], None],
        broken: Callable[[], bool],
        break_off: Callable[[], None],
        look: Callable[[], None],
        unwatched: Callable[[Any, BackendError], None],
    ) -> None:
        self.timeout_s = timeout_s
        self._late, self._broken, self._break_off, self._look_on = late, broken, break_off, look
        self._unwatched = unwatched
        self._since: dict[Any, float | None] = {}
        self._clock = AwakeClock()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._asleep = False
        self._wake = threading.Event()
        self._closed = False

    def begin(self, message: Any) -> None:
        """Somebody waits for a message, from now on if nobody did before."""
        if message not in self._since:
            self._since[message] = None  # the thread notes the time
        if self._thread is None:
            try:
                self._start()
            except BackendError as error:
                self._unwatched(message, error)
        elif self._asleep:
            self._wake.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="phalanx-hosts-overdue", daemon=True)
                try:
                    start(self._thread)
                except BackendError:
                    self._thread = None
                    raise

    def end(self, message: Any) -> None:
        """Nobody waits any more."""
        self._since.pop(message, None)

    def waiting(self) -> list[Any]:
        """The messages."""
        return list(self._since)

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def threads(self) -> list[threading.Thread]:
        return [] if self._thread is None else [self._thread]

    def _run(self) -> None:
        used = asked = self._clock.now()
        while not self._closed:
            idle = not self._since
            now = self._clock.now()
            used = used if idle else now
            if now - used > IDLE_S:
                self._asleep = True
                if not self._since:  # looked at after the flag is set, as others do in the other order
                    self._wake.wait()
                self._asleep = False
                self._wake.clear()
                used = asked = self._clock.now()
                continue
            self._wake.wait(LOOK_S)
            self._wake.clear()  # by one who saw the flag above, and came here later; `close` is seen without it
            if self._since:
                asked = self._look(asked)

    def _look(self, asked: float) -> float:
        now = self._clock.now()
        for message, since in list(self._since.items()):
            if message.outcome is not None:
                self._since.pop(message, None)
            elif since is None:
                if message in self._since:
                    self._since[message] = now
            elif now - since > self.timeout_s:
                self._since.pop(message, None)
                self._late(message, self.timeout_s)
        if self._since and now - asked > ASK_S:
            asked = now
            if self._broken():
                self._break_off()
            else:
                self._look_on()
        return asked
