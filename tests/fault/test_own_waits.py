"""Without ``phalanx run`` a rank that waits says for whom, and where that one is, long before the group's timeout."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon, stop

from phalanx.membership import liveness

PATIENCE_S = 240.0


def stay_away(member: Member) -> None:
    while not (member.folder / "go").exists():
        time.sleep(0.01)


def hold_the_interpreter(member: Member) -> None:
    ctypes.PyDLL(None).system(f"until test -e {member.folder}/go; do sleep 0.05; done".encode())


class Watcher:
    """Looks at the ranks while they wait; it is a process beside them."""

    def __init__(self, member: Member) -> None:
        self._member, self.folder = member, member.folder

    def said(self, rank: int) -> str:
        path = self.folder / f"err-{rank}"
        return path.read_text() if path.exists() else ""

    def await_said(self, rank: int, line: str) -> None:
        """Wait until this rank has said that others wait in the call. On a busy machine it says others before."""
        waits = rf"^phalanx: {line} for it in all_reduce #2 at {re.escape(__file__)}:\d+, for [\d.]+ s now$"
        found = soon(lambda: re.search(waits, self.said(rank), re.MULTILINE) is not None, PATIENCE_S)
        assert found, f"{waits}\n{[self.said(other) for other in range(self._member.size)]}"

    def pid(self, rank: int) -> int:
        path = self.folder / f"pid-{rank}"
        assert soon(path.exists, PATIENCE_S)
        return int(path.read_text())


def watched(
    hosts: str,
    absent: str,
    watch: Callable[[Watcher], None],
    away: Callable[[Member], None] = stay_away,
    warn_after: str = "0.4",
) -> None:
    """Run ranks on such hosts ("001" are three on two), of which some are absent until ``watch`` has returned."""
    size = len(hosts)

    def body(member: Member) -> None:
        if member.rank == size:
            try:
                watch(Watcher(member))
            finally:
                member.say("go")
            return
        member = replace(member, size=size)
        err = open(member.folder / f"err-{member.rank}", "w", buffering=1)  # noqa: SIM115 - as long as the process
        os.dup2(err.fileno(), 2)
        sys.stderr = err
        os.environ["PHALANX_WARN_AFTER"] = warn_after
        if len(set(hosts)) > 1:
            pretend_host(int(hosts[member.rank]))
        member.join(timeout_s=600)
        dist.barrier()
        (member.folder / f"part-{member.rank}").write_text(str(os.getpid()))
        (member.folder / f"part-{member.rank}").rename(member.folder / f"pid-{member.rank}")
        if str(member.rank) in absent:
            away(member)
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()

    on_ranks(body, size + 1)


AWAY = rf"is at stay_away \({re.escape(__file__)}:\d+\), in no operation"


@pytest.mark.parametrize(("hosts", "others"), [("000", "ranks 0, 2 wait"), ("0011", "rank 0 waits")])
def test_first_rank_that_waits_says_for_whom_and_that_it_is_stopped(hosts: str, others: str) -> None:
    def watch(seen: Watcher) -> None:
        seen.await_said(0, f"rank 1 {AWAY}; {others}")
        stop(seen.pid(1))
        seen.await_said(0, rf"rank 1 is stopped \(state T\), after barrier #1 at \S+; {others}")
        os.kill(seen.pid(1), signal.SIGCONT)
        for rank in range(len(hosts)):
            for line in seen.said(rank).splitlines():
                # On a busy machine another one is the first, as long as rank 0 has not come.
                waiting = re.search(r"ranks? (\d)[\d, -]*( wait|, which wait)s? for ", line)
                assert waiting is not None, line
                assert int(waiting[1]) == rank, line

    watched(hosts, "1", watch)


def test_a_rank_of_another_host_is_named_and_the_next_rank_there_answers() -> None:
    """Ranks 2 and 3 are on the other host, and both stay away; then the first of them is stopped."""

    def watch(seen: Watcher) -> None:
        assert soon(lambda: "ranks 2-3 on h1 are at stay_away" in seen.said(0), PATIENCE_S), seen.said(0)
        stop(seen.pid(2))
        assert soon(lambda: "rank 2 on h1 is stopped (state T)" in seen.said(0), PATIENCE_S), seen.said(0)
        assert "rank 3 on h1 is at stay_away" in seen.said(0)
        os.kill(seen.pid(2), signal.SIGCONT)
        assert " for it in all_reduce" not in seen.said(1)

    watched("0011", "23", watch)


def test_a_host_of_which_nobody_answers_is_named_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only rank holds the interpreter's lock in C code. The time in which it could answer counts as waited."""
    monkeypatch.setattr(liveness, "_ANSWER_S", 0.5)
    silent = "rank 1 on h1 is out of sight: the host does not answer; rank 0 waits"

    def watch(seen: Watcher) -> None:
        def times() -> list[float]:
            return [float(found) for found in re.findall(r" for it in all_reduce #2 .* for (\S+) s now", seen.said(0))]

        seen.await_said(0, silent)
        assert soon(lambda: len(times()) > 1, PATIENCE_S)
        assert times()[1] >= 3 * times()[0], seen.said(0)

    watched("01", "1", watch, hold_the_interpreter)


def test_nothing_is_said_if_the_user_wants_that() -> None:
    def watch(seen: Watcher) -> None:
        assert not soon(lambda: "".join(map(seen.said, range(2))) != "", 1.0)

    watched("01", "1", watch, warn_after="0")
