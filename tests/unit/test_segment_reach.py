"""Opening the memory of a group in another process, where the number may be any file of any process of this user."""

from __future__ import annotations

import os

from phalanx.transports.shm.segment import _reach


def test_memory_is_opened_and_nothing_else_is() -> None:
    """A pipe's reader would see no end of it as long as it is held, and one with no writer would be waited for."""
    own = os.getpid()
    memory = os.memfd_create("some memory")
    descriptor, reason = _reach(own, memory)
    assert not reason
    assert os.fstat(descriptor).st_ino == os.fstat(memory).st_ino
    os.close(descriptor)
    os.close(memory)
    assert _reach(own, memory) == (-1, f"No such file or directory (/proc/{own}/fd)")
    reads, writes = os.pipe()
    for end in (reads, writes):
        assert _reach(own, end) == (-1, f"another file is there (/proc/{own}/fd)")
    os.close(writes)
    assert os.read(reads, 1) == b""
    os.close(reads)
