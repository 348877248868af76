"""A job that is watched although its launcher is on another host: a helper there looks, and this one shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.running.watching import Look
from phalanx.launch.starters.helpers import Helper, Unanswered

__all__ = ["WatcherElsewhere"]

_HELPER = "phalanx.launch.running.helper"
_ANSWER_S = 20.0  # beside what the helper itself may wait for
_SAID_AFTER_S = 3.0  # for how long a silence is nothing to speak of


class WatcherElsewhere:
    """As :class:`~phalanx.launch.running.watching.Watcher`, for a job of another host. Use as a context manager.

    Args:
        host: where ``phalanx run`` runs, as ssh or the starter knows it.
        starter: the program that starts a command there, and its arguments; empty for ssh.
        name: which job, as :func:`~phalanx.launch.running.jobs.find_job` takes it.
        here: look at the ranks of that host only.
        say: shows a line as long as the host does not answer, again each second.

    Attributes:
        id: the name by which users call the job.
        say: as given; it may be replaced.
        pause_s: how long the job's hosts are to be left alone before the next look.

    Raises:
        LaunchError: the host cannot be reached, or has no such job.
    """

    def __init__(
        self, host: str, starter: Sequence[str], name: str | None, *, here: bool, say: Callable[[str], None]
    ) -> None:
        self._host, self._only_there, self.say = host, here, say
        self.pause_s = 0.0
        try:
            self._helper = Helper(host, starter, _HELPER, self._on_silence)
        except Unanswered as error:
            raise self._cannot(error) from error
        try:
            self._helper.wait_ready()
            found = self._helper.ask("find", _ANSWER_S, name=name)
            if "refused" in found:
                raise LaunchError(f"{host}: {found['refused']}")
            self._pid, self.id = int(found["pid"]), str(found["id"])
        except Unanswered as error:
            self._helper.close()
            raise self._cannot(error) from error
        except BaseException:
            self._helper.close()
            raise

    def __enter__(self) -> WatcherElsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the helper."""
        self._helper.close()

    def look(self, patience_s: float = 0.0) -> Look | None:
        """Look at the job; None if it has ended.

        Args:
            patience_s: how long to wait for what is to be seen on hosts other than that of the launcher.

        Raises:
            LaunchError: the host does not answer any more.
        """
        try:
            said: dict[str, Any] = self._helper.ask(
                "watch", patience_s + _ANSWER_S, pid=self._pid, here=self._only_there, patience_s=patience_s
            )
            self.pause_s = float(said["pause_s"])
            # Its way here is not known, so what it found seems to be as old as it was when it was sent.
            later_ns = time.monotonic_ns() - int(said["at_ns"])
            return None if said["look"] is None else Look.from_json(said["look"], later_ns)
        except Unanswered as error:
            raise self._cannot(error) from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise LaunchError(f"{self._host}: another version of Phalanx answers there; install this one") from error

    def _on_silence(self, waited_s: float) -> None:
        if waited_s >= _SAID_AFTER_S:
            self.say(f"{self._host} has not answered for {waited_s:.0f} s")

    def _cannot(self, error: Unanswered) -> LaunchError:
        return LaunchError(f"{self._host}: {error}; {error.remedy}")
