"""Opening the memory of a group in another process, where the number may be any file of any process of this user."""

from __future__ import annotations

import os

from phalanx.transports.shm.segment import _reach


def test_a_pipe_is_not_opened() -> None:
    """Its reader would see no end of it as long as it is held, and to open one with no writer would wait for ever."""
    reads, writes = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    for end in (reads, writes):
        assert _reach(os.getpid(), end) == (-1, f"another file is there (/proc/{os.getpid()}/fd)")
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(writes)
    assert os.read(reads, 1) == b""
    os.close(reads)


def test_memory_is_opened_and_what_is_not_there_is_not() -> None:
    memory = os.memfd_create("some memory")
    descriptor, reason = _reach(os.getpid(), memory)
    assert not reason
    assert os.fstat(descriptor).st_ino == os.fstat(memory).st_ino
    os.write(descriptor, b"x")
    assert os.pread(memory, 1, 0) == b"x"
    os.close(descriptor)
    os.close(memory)
    assert _reach(os.getpid(), memory) == (-1, f"No such file or directory (/proc/{os.getpid()}/fd)")
