"""The threads of a group's asynchronous operations: they run what is queued, are asked seldom, end with the group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.support.ranks import Member, on_ranks

from phalanx.c10d.progress import Operation, Progress

PATIENCE_S = 20.0


def in_a_rank(body: Callable[[Progress], Any]) -> Any:
    """What ``body`` returns for a new group in a process of its own; no thread may be left when the group is closed."""

    def run(_: Member) -> Any:
        group = Progress("alone")
        result = body(group)
        group.close()
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        assert not left, left
        return result

    return on_ranks(run, 1)[0]


def wait_for(event: threading.Event) -> None:
    event.wait()


def others_run(operation: Operation) -> bool:
    return operation.wait_done(PATIENCE_S)


def test_what_is_queued_runs_while_nobody_waits_for_it() -> None:
    """Also after a wait that an exception ended, and while a thread waits for a later operation without helping."""

    def body(group: Progress) -> bool:
        class Stopped(BaseException):
            pass

        def stop() -> None:
            raise Stopped

        first = group.submit(stop, [], urgent=False)
        last = group.submit(lambda: None, [], urgent=False)
        with group.running, pytest.raises(Stopped):
            group.help(last)
        assert first.done
        return others_run(last)

    assert in_a_rank(body)


@pytest.mark.parametrize("helped", [False, True], ids=["thread", "waiter"])
def test_callbacks_wait_for_operations_before_and_after_their_own(helped: bool) -> None:
    """A callback waits where it cannot help: for one that is queued already, and for one that it queues itself."""

    def body(group: Progress) -> list[str]:
        seen: list[str] = []
        all_queued = threading.Event()
        first = group.submit(partial(wait_for, all_queued), [], urgent=False)
        queued = [group.submit(lambda: None, [], urgent=False) for _ in range(3)]

        def callback(_: object) -> None:
            seen.append("queued" if others_run(queued[-1]) else "stuck")
            own = group.submit(lambda: None, [], urgent=False)
            own.future().then(
                lambda _: seen.append("own" if others_run(group.submit(lambda: None, [], False)) else "stuck")
            )
            group.hurry()
            seen.append("next" if others_run(own) else "stuck")

        ended = first.future().then(callback)
        all_queued.set()
        group.hurry()
        if helped:
            group.help(first)
        ended.wait()
        while len(seen) < 3:
            time.sleep(0.01)
        return sorted(seen)

    assert in_a_rank(body) == ["next", "own", "queued"]
