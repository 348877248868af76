"""Watch a job: ask its launcher for look after look at the ranks of all hosts.

For ``phalanx top -H`` this module runs as a helper on the launcher's host, and asks there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.diagnosis.snapshot import ranks_in
from phalanx.errors import LaunchError
from phalanx.launch.running.jobs import RunningJob, find_job
from phalanx.launch.running.rank_look import RankLook
from phalanx.launch.running.server import ANSWER_S, address_of, peer_uid
from phalanx.launch.starters.helpers import Helper, Unanswered
from phalanx.launch.starters.helping import serve
from phalanx.system import processes
from phalanx.system.foreign_values import read_json

__all__ = ["Look", "Watcher", "watcher_elsewhere", "watcher_here"]

_LAUNCHER_S = 3.0  # how long the launcher may take to answer
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
        ask: gives what :func:`_ask_launcher` does.
    """

    def __init__(self, id: str, ask: Callable[[], dict[str, Any] | None]) -> None:
        self.id, self._ask = id, ask
        self._before_s = 0.0

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
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LaunchError(f"job {self.id} runs with another version of Phalanx; install this one there") from error

    def _made(self, found: dict[str, Any]) -> Look:
        job, answer = msgspec.convert(found["job"], RunningJob), found["answer"]
        looks = msgspec.convert(answer.get("looks", []), list[RankLook])
        _find_lags(looks)
        seen = {look.rank for look in looks}
        silent = dict.fromkeys(answer.get("silent", ()), f"its host has not answered for {ANSWER_S:.0f} s")
        hidden = {
            process.rank: (process.host, found["why"] or silent.get(process.rank, "it has ended"))
            for process in job.processes
            if process.rank not in seen
        }
        now_s = time.monotonic()
        interval_s = now_s - self._before_s if self._before_s else 0.0
        self._before_s = now_s
        looks.sort(key=lambda look: look.rank)
        return Look(job, time.time(), interval_s, looks, hidden, found["launcher"], answer.get("pause_s", 0.0))


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


def watcher_here(name: str | None) -> Watcher:
    """Watch a job of this host, named as :func:`~phalanx.launch.running.jobs.find_job` takes it."""
    job = find_job(name)
    return Watcher(job.id, functools.partial(_ask_launcher, job))


def _ask_launcher(job: RunningJob) -> dict[str, Any] | None:
    """Ask the launcher of a job on this host for all there is to know; None if the job has ended.

    Returns:
        Plain values: the job's description (``job``), the state of its launcher (``launcher``), and the launcher's
        answer (``answer``, see ``server.py``), which is empty if there is none, for a reason (``why``).
    """
    until = time.monotonic() + _LAUNCHER_S
    while (now := job.again()) is not None:
        answer: dict[str, Any] = {}
        why = ""
        try:
            answer = _answer_of(job, until)
        except OSError as error:
            why = f"the launcher cannot be asked: {error.strerror or f'no answer in {_LAUNCHER_S:g} s'}"
            if time.monotonic() < until:
                time.sleep(0.1)  # it may be about to start another attempt
                continue
        return {
            "job": msgspec.to_builtins(now),
            "launcher": processes.state_of(job.pid),
            "answer": answer,
            "why": why,
        }
    return None


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
        with Helper(host, starter, __name__, on_silence) as helper:
            helper.wait_ready()
            job = helper.ask("find", _HELPER_S, name=name)
            if "refused" in job:
                raise LaunchError(f"{host}: {job['refused']}")
            yield Watcher(str(job["id"]), lambda: helper.ask("look", _LAUNCHER_S + _HELPER_S)["found"])
    except Unanswered as error:
        raise LaunchError(f"{host}: {error}; {error.remedy}") from error


def _help() -> None:
    """Find the one job that is asked for, and ask its launcher, as :func:`watcher_elsewhere` wants."""
    jobs: list[RunningJob] = []

    def find(name: str | None) -> dict[str, Any]:
        try:
            jobs.append(find_job(name))
        except LaunchError as error:
            return {"refused": str(error)}
        return {"id": jobs[0].id}

    serve({"find": find, "look": lambda: {"found": _ask_launcher(jobs[0])}})


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(10)  # where cores are scarce they are the ranks'
    _help()
