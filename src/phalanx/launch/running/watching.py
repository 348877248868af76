"""Watch a job: ask its launcher for look after look at the ranks of all hosts, here or on the launcher's host."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from phalanx.diagnosis.pace import GroupKey, Pace
from phalanx.errors import LaunchError
from phalanx.launch.running.jobs import RunningJob
from phalanx.launch.running.rank_look import RankLook
from phalanx.launch.running.server import ANSWER_S, address_of, peer_uid
from phalanx.launch.starters.helpers import Helper, Unanswered
from phalanx.system import processes
from phalanx.system.foreign_values import read_json

__all__ = ["Look", "Watcher", "answer_of", "ask_launcher", "watcher_elsewhere"]

_LAUNCHER_S = 3.0  # how long the launcher may take to answer
_HELPER = "phalanx.launch.running.helper"
_HELPER_S = 20.0  # beside what the helper itself may wait for
_SAID_AFTER_S = 3.0  # for how long a silence is nothing to speak of


@dataclass(frozen=True)
class Look:
    """A look at all ranks of a job.

    Attributes:
        job: as its launcher describes it now.
        at: the time, in seconds since 1970.
        interval_s: the time since the look before; 0 at the first.
        ranks: those that can be seen, by rank.
        hidden: the ranks that cannot be seen, each with its host and the reason.
        launcher: the state of the launcher, as the kernel names it.
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
    """Looks at a job again and again.

    Args:
        id: the name by which users call the job.
        ask: as :func:`ask_launcher`.
    """

    def __init__(self, id: str, ask: Callable[[], dict[str, Any] | None]) -> None:
        self.id, self._ask = id, ask
        self._before_ns = 0

    def look(self) -> Look | None:
        """Look at the job; None if it has ended.

        Raises:
            LaunchError: its host does not answer, or another version of Phalanx does.
        """
        found = self._ask()
        if found is None:
            return None
        try:
            return self._made(found)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise LaunchError(f"job {self.id} runs with another version of Phalanx; install this one there") from error

    def _made(self, found: dict[str, Any]) -> Look:
        job, answer = msgspec.convert(found["job"], RunningJob), found["answer"] or {}
        looks = [
            RankLook.from_json(look, each["later_ns"] + found["later_ns"])
            for each in answer.get("looks", ())
            for look in each["looks"]
        ]
        seen = {look.rank for look in looks}
        silent = dict.fromkeys(answer.get("silent", ()), f"its host has not answered for {ANSWER_S:.0f} s")
        hidden = {
            process.rank: (process.host, found["why"] or silent.get(process.rank, "it has ended"))
            for process in job.processes
            if process.rank not in seen
        }
        now_ns = time.monotonic_ns()
        interval_s = (now_ns - self._before_ns) / 1e9 if self._before_ns else 0.0
        self._before_ns = now_ns
        looks = sorted(_with_lags(looks), key=lambda look: look.rank)
        return Look(job, time.time(), interval_s, looks, hidden, found["launcher"], answer.get("pause_s", 0.0))


def ask_launcher(job: RunningJob) -> dict[str, Any] | None:
    """Ask the launcher of a job on this host for all there is to know; None if the job has ended.

    Returns:
        Plain values: the job's description (``job``), the state of its launcher (``launcher``), and the launcher's
        answer (``answer``, see ``server.py``) or why there is none (``why``). ``later_ns`` is added to times in it.
    """
    until = time.monotonic() + _LAUNCHER_S
    answer: dict[str, Any] | None = None
    while (now := job.again()) is not None:
        try:
            answer, why = answer_of(job, "look", until), ""
        except OSError as error:
            why = f"the launcher cannot be asked: {error.strerror or f'no answer in {_LAUNCHER_S:g} s'}"
            if time.monotonic() < until:
                time.sleep(0.1)  # it may be about to start another attempt
                continue
        values = {"job": msgspec.to_builtins(now), "launcher": processes.state_of(job.pid)}
        return {**values, "answer": answer, "why": why, "later_ns": 0}
    return None


def answer_of(job: RunningJob, do: str, until: float) -> dict[str, Any]:
    """Ask the launcher of a job on this host for what ``server.py`` answers, until a time.

    Raises:
        OSError: it cannot be asked, or does not answer.
    """
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(address_of(job.run_id))
        if peer_uid(asked) != os.geteuid():
            raise PermissionError(errno.EPERM, "its socket's name is taken by another user")
        asked.sendall(json.dumps({"do": do}).encode() + b"\n")
        answer = bytearray()
        while not answer.endswith(b"\n"):
            asked.settimeout(max(0.01, until - time.monotonic()))
            more = asked.recv(1 << 20)
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "it has hung up")
            answer += more
    values: dict[str, Any] = read_json(answer)
    return values


@contextlib.contextmanager
def watcher_elsewhere(
    host: str, starter: Sequence[str], name: str | None, say: Callable[[str], None]
) -> Iterator[Watcher]:
    """Watch a job of another host, where a helper asks its launcher.

    Args:
        host: where ``phalanx run`` runs, as ssh or the starter knows it.
        starter: the program that starts a command there, and its arguments; empty for ssh.
        name: which job, as :func:`~phalanx.launch.running.jobs.find_job` takes it.
        say: shows a line as long as the host does not answer, again each second.

    Raises:
        LaunchError: the host cannot be reached, or has no such job, or does not answer any more.
    """

    def on_silence(waited_s: float) -> None:
        if waited_s >= _SAID_AFTER_S:
            say(f"{host} has not answered for {waited_s:.0f} s")

    try:
        with Helper(host, starter, _HELPER, on_silence) as helper:
            helper.wait_ready()
            job = helper.ask("find", _HELPER_S, name=name)
            if "refused" in job:
                raise LaunchError(f"{host}: {job['refused']}")

            def ask() -> dict[str, Any] | None:
                said = helper.ask("watch", _LAUNCHER_S + _HELPER_S, pid=job["pid"])
                found: dict[str, Any] | None = said["found"]
                # Its way here is not known, so what it found seems to be as old as it was when it was sent.
                return found and {**found, "later_ns": time.monotonic_ns() - int(said["at_ns"])}

            yield Watcher(str(job["id"]), ask)
    except Unanswered as error:
        raise LaunchError(f"{host}: {error}; {error.remedy}") from error


def _with_lags(looks: Sequence[RankLook]) -> list[RankLook]:
    """The same looks, each with how far the rank is behind the first one of a group that it is in."""
    furthest: dict[GroupKey, int] = {}
    for look in looks:
        for group, count in (look.pace.collectives if look.pace is not None else {}).items():
            furthest[group] = max(furthest.get(group, 0), count)
    groups: dict[int, list[GroupKey]] = {}
    for group in furthest:
        for rank in group[1]:
            groups.setdefault(rank, []).append(group)
    return [replace(look, lag=_lag(look.pace, groups.get(look.rank, ()), furthest)) for look in looks]


def _lag(pace: Pace | None, groups: Iterable[GroupKey], furthest: Mapping[GroupKey, int]) -> int | None:
    if pace is None:
        return max((furthest[group] for group in groups), default=None)
    # A recorder that does not go back to the first operation may have written over a group that is seldom used.
    known = [group for group in groups if group in pace.collectives or pace.complete]
    return max((furthest[group] - pace.collectives.get(group, 0) for group in known), default=None)
