"""The thread of a group's asynchronous operations ends with the group, however the two come together."""

from __future__ import annotations

import threading
import time

from tests.support.ranks import Member, on_ranks

from phalanx.c10d.progress import Progress

BUSY_S = 0.2


class Delayed(Progress):
    """The machine is busy: the group's thread loses its core right after it has seen that more is queued."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seen = threading.Event()

    def _waits(self) -> bool:
        waits = super()._waits()
        if waits and self._in_callbacks and not self.seen.is_set():
            self.seen.set()
            time.sleep(BUSY_S)
        return waits


def test_a_group_that_closes_while_its_thread_is_between_two_operations_ends() -> None:
    """The thread may start another one for what is queued: both have to hear that they should end."""

    def body(_: Member) -> list[str]:
        group = Delayed("busy")
        all_queued = threading.Event()

        def first() -> None:
            all_queued.wait()

        group.submit(first, [], urgent=True)
        group.submit(lambda: None, [], urgent=True)
        all_queued.set()
        group.seen.wait()
        group.close()
        return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]

    assert on_ranks(body, 1) == [[]]
