"""Watch a job: ask its launcher for look after look at the ranks of all hosts, here or on the launcher's host."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from phalanx.diagnosis.pace import GroupKey, Pace
from phalanx.errors import LaunchError
from phalanx.launch.running.jobs import RunningJob
from phalanx.launch.running.rank_look import RankLook
from phalanx.launch.running.server import ANSWER_S, address_of, peer_uid
from phalanx.launch.starters.helpers import Helper, Unanswered
from phalanx.system import processes
from phalanx.system.foreign_values import read_json

__all__ = ["JobElsewhere", "JobHere", "Look", "Watcher"]

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


class _Asker(Protocol):
    id: str

    def ask(self) -> dict[str, Any] | None: ...
    def close(self) -> None: ...


class JobHere:
    """Asks the launcher of a job on this host."""

    def __init__(self, job: RunningJob) -> None:
        self.id, self._job = job.id, job
        self._socket: socket.socket | None = None

    def ask(self) -> dict[str, Any] | None:
        """What there is to know of the job, as plain values; None if it has ended.

        These are its description (``job``), the state of its launcher (``launcher``), and the launcher's answer
        (``answer``, see ``server.py``) or why there is none (``why``). ``later_ns`` is added to times of its host.
        """
        until = time.monotonic() + _LAUNCHER_S
        answer: dict[str, Any] | None = None
        while (job := self._job.again()) is not None:
            try:
                answer, why = self._ask(until), ""
            except OSError as error:
                self.close()
                why = f"the launcher cannot be asked: {error.strerror or f'no answer in {_LAUNCHER_S:g} s'}"
                if time.monotonic() < until:
                    time.sleep(0.1)  # it may be about to start another attempt
                    continue
            values = {"job": msgspec.to_builtins(job), "launcher": processes.state_of(job.pid)}
            return {**values, "answer": answer, "why": why, "later_ns": 0}
        return None

    def _ask(self, until: float) -> dict[str, Any]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address_of(self._job.run_id))
            if peer_uid(self._socket) != os.geteuid():
                raise PermissionError(0, "another user has taken its socket's name")
        self._socket.sendall(b'{"do": "look"}\n')
        answer = b""
        while not answer.endswith(b"\n"):
            self._socket.settimeout(max(0.01, until - time.monotonic()))
            more = self._socket.recv(1 << 20)
            if not more:
                raise ConnectionResetError(0, "it is about to end")
            answer += more
        values: dict[str, Any] = read_json(answer)
        return values

    def close(self) -> None:
        """Close the connection to the launcher."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class JobElsewhere:
    """Asks a helper on the host of the job's launcher, which asks as :class:`JobHere`.

    Args:
        host: where ``phalanx run`` runs, as ssh or the starter knows it.
        starter: the program that starts a command there, and its arguments; empty for ssh.
        name: which job, as :func:`~phalanx.launch.running.jobs.find_job` takes it.
        say: shows a line as long as the host does not answer, again each second.

    Raises:
        LaunchError: the host cannot be reached, or has no such job.
    """

    def __init__(self, host: str, starter: Sequence[str], name: str | None, say: Callable[[str], None]) -> None:
        self._host, self._say = host, say
        with self._said_by_host(), contextlib.ExitStack() as stack:
            self._helper = stack.enter_context(Helper(host, starter, _HELPER, self._on_silence))
            self._helper.wait_ready()
            found = self._helper.ask("find", _HELPER_S, name=name)
            if "refused" in found:
                raise LaunchError(f"{host}: {found['refused']}")
            self._pid, self.id = int(found["pid"]), str(found["id"])
            stack.pop_all()

    def ask(self) -> dict[str, Any] | None:
        """As :meth:`JobHere.ask`.

        Raises:
            LaunchError: the host does not answer any more.
        """
        with self._said_by_host():
            said = self._helper.ask("watch", _LAUNCHER_S + _HELPER_S, pid=self._pid)
        found: dict[str, Any] | None = said["found"]
        # Its way here is not known, so what it found seems to be as old as it was when it was sent.
        return found and {**found, "later_ns": time.monotonic_ns() - int(said["at_ns"])}

    def close(self) -> None:
        """End the helper."""
        self._helper.close()

    def _on_silence(self, waited_s: float) -> None:
        if waited_s >= _SAID_AFTER_S:
            self._say(f"{self._host} has not answered for {waited_s:.0f} s")

    @contextlib.contextmanager
    def _said_by_host(self) -> Iterator[None]:
        try:
            yield
        except Unanswered as error:
            raise LaunchError(f"{self._host}: {error}; {error.remedy}") from error


class Watcher:
    """Looks at a job again and again. Use as a context manager.

    Args:
        job: the job, here or on another host; it is closed in the end.
    """

    def __init__(self, job: _Asker) -> None:
        self._job = job
        self._before_ns = 0

    @property
    def id(self) -> str:
        """The name by which users call the job."""
        return self._job.id

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._job.close()

    def look(self) -> Look | None:
        """Look at the job; None if it has ended.

        Raises:
            LaunchError: its host does not answer, or another version of Phalanx does.
        """
        found = self._job.ask()
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
