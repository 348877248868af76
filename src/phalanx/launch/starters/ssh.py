"""The command that starts a program on a host: by ssh, by a starter of the user's, or here.

A starter is called as ``PROGRAM ARGS HOST COMMAND...``, must hand its standard input on to the command, and must not
end before the command does: ``docker exec -i``, ``lxc exec``. Where a word of it is ``{host}``, that is the host, and
the command comes last: ``kubectl exec -i {host} --``, for which ``kubectl`` alone is short. ssh is called with the
user's configuration (keys, ports, jump hosts, shared connections), except that it may not ask anything: nobody could
answer for several hosts, and the job would wait.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from phalanx.errors import LaunchError
from phalanx.launch.job.hosts import is_here
from phalanx.launch.starters import start_agent

__all__ = ["command_for", "parse_starter"]

# ConnectTimeout covers the connection and its banner; a host that is switched off is reported after that.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")
# The word of a starter in whose place the host comes, and the starters that have a name. kubectl takes what follows the
# pod for its own options, unless -- ends these.
_HOST = "{host}"
_NAMED = {"kubectl": ("kubectl", "exec", "-i", _HOST, "--")}
# Isolated and without site packages: this run of the program only reads its input and replaces itself.
_AGENT = (sys.executable, "-I", "-S", start_agent.__file__)


def command_for(name: str, starter: Sequence[str], program: Sequence[str] = _AGENT) -> list[str]:
    """Make the command that starts a program on a host.

    Args:
        name: the host, as the user wrote it.
        starter: the user's starter and its arguments; empty for ssh.
        program: the program and its arguments; the agent of a job by default.

    Raises:
        LaunchError: the name resolves to loopback, and is not this host's.
    """
    if is_here(name, starter=bool(starter)):
        return [*program]
    if starter:
        words = starter if _HOST in starter else (*starter, _HOST)
        return [*(name if word == _HOST else word for word in words), *program]
    # The other side is a shell, which takes one line.
    return [*_SSH, "--", name, f"exec {shlex.join(program)}"]


def parse_starter(command: str | None) -> list[str]:
    """Split ``--starter`` into words, those of a starter that has a name in its place.

    Raises:
        LaunchError: its quotes do not match.
    """
    try:
        words = shlex.split(command or "")
    except ValueError as error:
        raise LaunchError(f"--starter {command!r}: {error}") from None
    return [*_NAMED.get(" ".join(words), words)]
