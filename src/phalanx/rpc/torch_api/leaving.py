"""torch's ``shutdown`` says for whom it waits and what they do: now and then, and when its time is over.

torch's own ``_wait_all_workers`` does the waiting. When its time is over, it does not raise on all workers, and names
those for whom it has waited on none.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import Any

from phalanx.errors import InitializationError
from phalanx.rpc import session
from phalanx.rpc.members import Member
from phalanx.rpc.torch_api import current
from phalanx.rpc.torch_api.torch_names import api
from phalanx.system.threads import start

__all__ = ["say_who_is_late"]

_STORE_S = 5.0  # for the job's store and the late ones to answer, after the time is over


def say_who_is_late() -> None:
    """Have torch's ``shutdown`` do so in this process from now on."""
    own = api._wait_all_workers

    def _wait_all_workers(timeout: float = api.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
        watch = _Watch(timeout) if current.is_set() else None
        failed: RuntimeError | None = None
        try:
            own(timeout)
        except RuntimeError as error:
            failed = error
        late = watch.end(failed=failed is not None) if watch is not None else None
        if late is not None:
            raise late from failed
        if failed is not None:
            raise failed

    api._wait_all_workers = _wait_all_workers


class _Watch:
    """Watches who has called ``shutdown``, on a thread of its own.

    Args:
        timeout_s: how long may be waited, in seconds; 0 for no limit.
    """

    def __init__(self, timeout_s: float) -> None:
        self._agent: Any = current.agent().phalanx
        self._timeout_s = timeout_s or math.inf
        self._until = time.monotonic() + self._timeout_s
        self._over = False
        self._late: InitializationError | None = None
        self._others: list[Member] = []
        self._waited_for: list[Member] = []
        with contextlib.suppress(RuntimeError):  # the store may be gone with the worker that had it
            self._agent.say_done()  # before others may be told to go on
            self._others = [member for member in self._agent.members() if member.rank >= 0]
        self._thread = threading.Thread(target=self._run, name="phalanx-rpc-leaving", daemon=True)
        start(self._thread)

    def end(self, *, failed: bool) -> InitializationError | None:
        """Torch waits no more: who is late, as an error.

        Args:
            failed: it has raised an error. Otherwise all have come, or its time was over; or that of the first worker,
                which tells the others to go on and may have begun before them.
        """
        left_s = self._until - time.monotonic()
        if left_s == math.inf or (failed and left_s > 0):
            self._over = True
            left_s = 0.0
        self._thread.join(max(0.0, left_s) + _STORE_S)
        return self._late

    def _run(self) -> None:
        agent = self._agent

        def missing() -> list[int]:
            self._waited_for = [] if self._over else agent.not_done(self._others)
            return [member.rank for member in self._waited_for]

        def why() -> str:
            return str(agent.inquiries.why_not_done(self._waited_for))

        with contextlib.suppress(RuntimeError):  # the store may be gone with the worker that had it
            try:
                session.wait_for(missing, self._timeout_s, "for rpc.shutdown() of", len(self._others), why)
            except InitializationError as error:
                self._late = error
