"""The ranks of a job on other hosts: a helper on each of them looks, started as the job's agents were."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch.running.jobs import RankProcess
from phalanx.launch.running.rank_look import RankLook
from phalanx.launch.starters.helpers import Helper, Unanswered

__all__ = ["Elsewhere", "RanksElsewhere"]

_HELPER = "phalanx.launch.running.helper"
_KEPT_S = 5.0  # how long a look stands for the next one of a host that is slow to answer


@dataclass
class Elsewhere:
    """What helpers have found.

    Attributes:
        looks: at the ranks that they see.
        why: of each rank that is not seen, why.
        pause_s: how long those hosts are to be left alone before the next look.
    """

    looks: list[RankLook] = field(default_factory=list)
    why: dict[int, str] = field(default_factory=dict)
    pause_s: float = 0.0


class RanksElsewhere:
    """Looks at ranks of a job on other hosts, again and again. Call :meth:`close` in the end.

    Args:
        run_id: the job.
        starter: the job's starter and its arguments; empty for ssh.
        most: how many hosts there may be.
    """

    def __init__(self, run_id: str, starter: Sequence[str], most: int) -> None:
        self._run_id = run_id
        self._starter = starter
        self._hosts: dict[str, _Host] = {}
        self._threads = ThreadPoolExecutor(max(1, most))

    def look(self, ranks: Sequence[RankProcess], patience_s: float) -> Elsewhere:
        """Look at ranks on all of their hosts at once.

        A helper that has not answered in time is left to it: its answer counts at the next look.

        Args:
            ranks: the ranks, each with the name by which its host is reached.
            patience_s: how long to wait for the answers.
        """
        asked: dict[str, list[RankProcess]] = {}
        for rank in ranks:
            asked.setdefault(rank.reach, []).append(rank)
        for name, own in asked.items():
            if name not in self._hosts:
                self._hosts[name] = _Host(self._run_id, name, self._starter)
            self._hosts[name].ask(own, self._threads)
        wait([future for future in (self._hosts[name].answer for name in asked) if future is not None], patience_s)
        found = Elsewhere()
        for name, own in asked.items():
            self._hosts[name].answered(own, found)
        return found

    def close(self) -> None:
        """End the helpers."""
        for host in self._hosts.values():
            host.stop()
        self._threads.shutdown()
        for host in self._hosts.values():
            host.close()


class _Host:
    def __init__(self, run_id: str, name: str, starter: Sequence[str]) -> None:
        self.answer: Future[dict[str, Any]] | None = None
        self._run_id = run_id
        self._failed = ""
        self._helper: Helper | None = None
        self._is_ready = False
        self._seen: dict[int, RankLook] = {}
        self._seen_at = float("-inf")
        self._asked_at = 0.0
        try:
            self._helper = Helper(name, starter, _HELPER)
        except Unanswered as error:
            self._fail(error)

    def ask(self, ranks: Sequence[RankProcess], threads: ThreadPoolExecutor) -> None:
        if self.answer is None and not self._failed:
            self._asked_at = time.monotonic()
            self.answer = threads.submit(self._ask, [(rank.rank, rank.pid, rank.part) for rank in ranks])

    def _ask(self, ranks: list[tuple[int, int, int]]) -> dict[str, Any]:
        assert self._helper is not None
        if not self._is_ready:
            self._helper.wait_ready()
            self._is_ready = True
        said = self._helper.ask("look", run_id=self._run_id, ranks=ranks)
        # Its way here is not known, so what it found seems to be as old as it was when it was sent.
        return {**said, "later_ns": time.monotonic_ns() - int(said["at_ns"])}

    def answered(self, ranks: Sequence[RankProcess], found: Elsewhere) -> None:
        """Add what the helper has answered, or why it has not."""
        why = self._failed or f"its host has not answered for {time.monotonic() - self._asked_at:.0f} s"
        seen: dict[int, RankLook] = {}
        if self.answer is not None and not self.answer.done() and time.monotonic() - self._seen_at < _KEPT_S:
            seen = self._seen
        if self.answer is not None and self.answer.done():
            try:
                said = self.answer.result()
                looks = [RankLook.from_json(look, said["later_ns"]) for look in said["looks"]]
                seen = self._seen = {look.rank: look for look in looks}
                self._seen_at = time.monotonic()
                found.pause_s = max(found.pause_s, float(said["pause_s"]))
                why = "it has ended, or is in another container"
            except Unanswered as error:
                why = self._fail(error)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                why = self._failed = "another version of Phalanx answers there; install this one"
            self.answer = None
        for rank in ranks:
            look = seen.get(rank.rank)
            # An answer may be of the ranks before a restart.
            if look is not None and look.pid == rank.pid:
                found.looks.append(look)
            else:
                found.why[rank.rank] = why

    def _fail(self, error: Unanswered) -> str:
        self._failed = f"{error}; {error.remedy}"
        return self._failed

    def stop(self) -> None:
        if self._helper is not None and self.answer is not None and not self.answer.done():
            self._helper.stop()

    def close(self) -> None:
        if self._helper is not None:
            with contextlib.suppress(OSError):
                self._helper.close()
