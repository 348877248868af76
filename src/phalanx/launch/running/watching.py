"""Watch a job: ask its launcher for look after look at the ranks of all hosts."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.diagnosis.snapshot import ranks_in
from phalanx.errors import LaunchError
from phalanx.launch.running.jobs import RunningJob
from phalanx.launch.running.rank_look import RankLook
from phalanx.launch.running.server import ANSWER_S, address_of, peer_uid
from phalanx.system import processes
from phalanx.system.foreign_values import read_json

_LAUNCHER_S = 3.0  # how long the launcher may take to answer


@dataclass(frozen=True)
class Look:
    """A look at all ranks of a job.

    Attributes:
        job: as its launcher describes it now.
        at: the time, in seconds since 1970.
        interval_s: the time since the look before; 0 at the first.
        ranks: those that can be seen, by rank.
        hidden: the ranks that cannot be seen, each with its host and the reason.
        launcher: the state of its process, as the kernel names it.
        pause_s: how long the job's hosts are to be left alone before the next look.
    """

    job: RunningJob
    at: float
    interval_s: float
    ranks: Sequence[RankLook]
    hidden: Mapping[int, tuple[str, str]]
    launcher: str
    pause_s: float


class Watcher:
    """Looks at a job of this host again and again."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self._before_s = 0.0

    def look(self) -> Look | None:
        """Look at the job; None if it has ended.

        Raises:
            LaunchError: another version of Phalanx runs it.
        """
        until = time.monotonic() + _LAUNCHER_S
        while (job := self.job.again()) is not None:
            answer: dict[str, Any] = {}
            why = ""
            try:
                answer = _answer_of(job, until)
            except OSError as error:
                why = f"the launcher cannot be asked: {error.strerror or f'no answer in {_LAUNCHER_S:g} s'}"
                if time.monotonic() < until:
                    time.sleep(0.1)  # it may be about to start another attempt
                    continue
            try:
                return self._made(job, answer, why)
            except (ValueError, TypeError, AttributeError) as error:
                version = "another version of Phalanx; look with that one"
                raise LaunchError(f"job {job.id} runs with {version}") from error
        return None

    def _made(self, job: RunningJob, answer: dict[str, Any], why: str) -> Look:
        looks = msgspec.convert(answer.get("looks", []), list[RankLook])
        _find_lags(looks)
        seen = {look.rank for look in looks}
        silent = dict.fromkeys(answer.get("silent", ()), f"its host has not answered for {ANSWER_S:.0f} s")
        hidden = {
            process.rank: (process.host, why or silent.get(process.rank, "it has ended"))
            for process in job.processes
            if process.rank not in seen
        }
        now_s = time.monotonic()
        interval_s = now_s - self._before_s if self._before_s else 0.0
        self._before_s = now_s
        looks.sort(key=lambda look: look.rank)
        launcher, pause_s = processes.state_of(job.pid), answer.get("pause_s", 0.0)
        return Look(job, time.time(), interval_s, looks, hidden, launcher, pause_s)


def _find_lags(looks: Sequence[RankLook]) -> None:
    """Find how far each rank is behind the first one of a group that it is in."""
    counts = [
        {(name, ranks_in(ranks)): count for name, ranks, count in look.pace.collectives} if look.pace else {}
        for look in looks
    ]
    furthest: dict[tuple[str, tuple[int, ...]], int] = {}
    for own in counts:
        for group, count in own.items():
            furthest[group] = max(furthest.get(group, 0), count)
    for look, own in zip(looks, counts, strict=True):
        # A recorder that does not go back to the first operation may have written over a group that is seldom used.
        whole = look.pace is None or look.pace.complete
        known = [group for group in furthest if group in own or (whole and look.rank in group[1])]
        look.lag = max((furthest[group] - own.get(group, 0) for group in known), default=None)


def _answer_of(job: RunningJob, until: float) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(address_of(job.run_id))
        if peer_uid(asked) != os.geteuid():
            raise PermissionError(errno.EPERM, "its socket's name is taken by another user")
        answer = bytearray()
        while not answer.endswith(b"\n"):
            asked.settimeout(max(0.01, until - time.monotonic()))
            more = asked.recv(1 << 20)
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "it has hung up")
            answer += more
    values: dict[str, Any] = read_json(answer)
    return values
