"""The knowledge that an agent on another host needs before it can join: it comes by the standard input of its program.

So no command line shows it. If the supervisor dies before it is whole, the program reads the end of its input and ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from phalanx import settings
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.job import Job

__all__ = ["OTHER_VERSION", "UNREACHABLE", "Invitation", "agent_name", "attempt_name"]

# The exit codes of an agent that cannot reach the supervisor (EX_UNAVAILABLE), or would not understand it (EX_CONFIG).
# Its last line says why.
UNREACHABLE, OTHER_VERSION = 69, 78


@dataclass(frozen=True)
class Invitation:
    """The first thing that an agent reads.

    Attributes:
        version: that of the supervisor's Phalanx. An agent of another one only says so: it may understand nothing else.
        environment: the user's variables, as far as they are not the other host's own.
        directory: the working directory.
        door: where the supervisor listens, with the key, as ``launch/link.py`` takes it.
        host: the number of the host among those of the job.
        name: the host as the user wrote it.
        python: whether the ranks run Python.
        path: the script, module or folder, whose content has to be the same on all hosts; or the program, which only
            has to be there.
        ranks: how many ranks the host gets.
        interface: the network interface that the user chose; empty for none.
        bind: how ranks are bound to cores.
        device: the device on which the user wants the ranks to compute; None for none in particular.
        attempt: the job and the attempt, by a name that nothing else has.
    """

    version: str
    environment: Mapping[str, str]
    directory: str
    door: str
    host: int
    name: str
    python: bool
    path: str
    ranks: int
    interface: str
    bind: Bind
    device: str | None
    attempt: str

    def line(self) -> bytes:
        """Write it as it is sent: one line."""
        environment = {**self.environment, settings.AGENT: agent_name(self.attempt, self.host)}
        return json.dumps({**asdict(self), "environment": environment}).encode() + b"\n"


def attempt_name(job: Job) -> str:
    """Name this attempt at a job."""
    return f"{job.run_id}/{job.attempt.number}"


def agent_name(attempt: str, host: int) -> str:
    """Name the agent of a host, so that all that is started there can be found (``settings.AGENT``).

    Args:
        attempt: as of :func:`attempt_name`.
        host: the number of the host among those of the job.
    """
    return f"{attempt}/{host}"
