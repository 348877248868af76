"""Ranks that are started once and then do many jobs.

A job is a function of a module and its arguments; every rank does it and answers. After an error or a hang the ranks
are ended, and the next job gets new ones.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.support.ranks import Member, fork_rank, stacks_of

__all__ = ["Pool"]

# Generous the first time; while a hang is being made smaller, the time of each attempt adds up.
PATIENCE_S, AGAIN_S = 300.0, 60.0
# For the others to end once one rank has failed: they may wait for it in vain.
GRACE_S = 5.0


class Pool:
    """``size`` ranks, each of which calls ``start`` first: its result is the first argument of every job there."""

    def __init__(self, size: int, start: Callable[[Member], Any], patience_s: float = PATIENCE_S) -> None:
        self.size, self._start, self._patience_s = size, start, patience_s
        self._ranks: list[tuple[int, Connection[Any, Any]]] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, pipe in self._ranks:
            with contextlib.suppress(OSError):
                pipe.send(None)
        self._end(patience_s=10)

    def do(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of ``job(started, *arguments)`` by rank; fails with a traceback, or the stacks of who hangs."""
        if not self._ranks:
            self._fork()
        answers: dict[int, Any] = {}
        failures: list[str] = []
        for _, pipe in self._ranks:
            pipe.send((job, arguments))
        deadline = time.monotonic() + self._patience_s
        while len(answers) < self.size:
            waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready and not failures:
                pids, folder = [pid for pid, _ in self._ranks], Path(self._folder.name)
                failures.append(stacks_of(pids, list(waiting.values()), folder, self._patience_s))
                self._patience_s = min(self._patience_s, AGAIN_S)
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                try:
                    answers[rank], failure = self._ranks[rank][1].recv()
                except EOFError:
                    answers[rank], failure = None, self._end_of(rank)
                if failure:
                    failures.append(f"rank {rank} {failure}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self._end()
            raise AssertionError("\n".join(failures))
        return [answers[rank] for rank in range(self.size)]

    def _fork(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-test-")
        for rank in range(self.size):
            ours, theirs = Pipe()
            others = [pipe for _, pipe in self._ranks] + [ours]

            def serve(member: Member, pipe: Connection[Any, Any] = theirs, others: list[Any] = others) -> None:
                for other in others:
                    other.close()  # or a rank would not notice when the test ends
                _serve(member, pipe, self._start)

            pid = fork_rank(serve, Member(rank, self.size, Path(self._folder.name)))
            theirs.close()
            self._ranks.append((pid, ours))

    def _end_of(self, rank: int) -> str:
        ended = os.waitid(os.P_PID, self._ranks[rank][0], os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return f"was ended by {signal.Signals(ended.si_status).name}"
        return "ended"

    def _end(self, patience_s: float = 0.0) -> None:
        deadline = time.monotonic() + patience_s
        for pid, pipe in self._ranks:
            handle = os.pidfd_open(pid)
            select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            os.close(handle)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()
        if self._ranks:
            self._folder.cleanup()
        self._ranks = []


def _serve(member: Member, pipe: Connection[Any, Any], start: Callable[[Member], Any]) -> None:
    started: Any = None
    with contextlib.suppress(EOFError):
        while (message := pipe.recv()) is not None:
            job, arguments = message
            try:
                started = start(member) if started is None else started
                pipe.send((job(started, *arguments), ""))
            except Exception:
                pipe.send((None, f"raised:\n{traceback.format_exc()}"))
