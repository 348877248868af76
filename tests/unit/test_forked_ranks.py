"""What the tests of several ranks stand on: a forked rank does not pay for what its parent has left behind."""

from __future__ import annotations

import gc
import threading

from tests.support.ranks import Member, on_ranks
from torch._C._distributed_c10d import TCPStore

THREADS = 8  # the more of its own, the surer one lies where a thread of the parent's was


def test_a_rank_never_collects_what_its_parent_left_in_a_circle() -> None:
    """A store of torch's joins a thread when it is destroyed, which only the process that started it can do."""

    def child(_: Member) -> bool:
        over = threading.Event()
        threads = [threading.Thread(target=over.wait) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        gc.collect()
        over.set()
        for thread in threads:
            thread.join()
        return True

    def parent(_: Member) -> list[bool]:
        gc.disable()
        circle: list[object] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        circle.append(circle)
        del circle
        return on_ranks(child, 1)

    assert on_ranks(parent, 1) == [[True]]
