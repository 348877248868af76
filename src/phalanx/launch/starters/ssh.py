"""How a host's agent is started: by ssh, by a starter of the user's, or here.

A starter is called as ``PROGRAM ARGS HOST COMMAND...``, must hand its standard input on to the command, and must not
end before the command does: ``docker exec -i``, ``lxc exec``. Where a word of it is ``{host}``, that is the host, and
the command comes last: ``kubectl exec -i {host} --``, for which ``kubectl`` alone is short. ssh is called with the
user's configuration (keys, ports, jump hosts, shared connections), except that it may not ask anything: nobody could
answer for several hosts, and the job would wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence

from phalanx.errors import LaunchError
from phalanx.launch.job.hosts import is_here
from phalanx.launch.output.failure import signal_name
from phalanx.launch.starters.invitation import OTHER_VERSION, UNREACHABLE, Invitation
from phalanx.launch.starters.program import Program

__all__ = ["AgentProgram", "command_for", "parse_starter", "split_starter"]

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start_agent.py")
# ConnectTimeout covers the connection and its banner; a host that is switched off is reported after that.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")
# The word of a starter in whose place the host comes, and the starters that have a name. kubectl takes what follows the
# pod for its own options, unless -- ends these.
_HOST = "{host}"
_NAMED = {"kubectl": ("kubectl", "exec", "-i", _HOST, "--")}
# The exit codes of a shell, and of programs like it, for a command that cannot be executed or is not there.
_NO_PROGRAM = (126, 127)
_SSH_FAILED = 255
_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20


# Isolated and without site packages: this run of the program only reads its input and replaces itself.
_AGENT = (sys.executable, "-I", "-S", PROGRAM)


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
    """Split ``--starter`` into words; none if it was not given.

    Raises:
        LaunchError: its quotes do not match, it is empty, or this host does not have the program that it names.
    """
    if command is None:
        return []
    words = split_starter(command)
    if not words or shutil.which(words[0]) is None:
        named = f"this host has no program {words[0]}" if words else "it names no program"
        raise LaunchError(f"--starter {command!r}: {named}")
    return words


def split_starter(command: str) -> list[str]:
    """Split ``--starter`` into words, those of a starter that has a name in its place; look for nothing here.

    Raises:
        LaunchError: its quotes do not match.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--starter {command!r}: {error}") from None
    return [*_NAMED.get(" ".join(words), words)]


class AgentProgram(Program):
    """The program that starts a host's agent, while it runs.

    Args:
        name: the host, as the user wrote it.
        starter: the user's starter; empty for ssh.
        invitation: what the agent reads first.

    Raises:
        OSError: the program cannot be executed.
    """

    def __init__(self, name: str, starter: Sequence[str], invitation: Invitation) -> None:
        self.name = name
        self._command = command_for(name, starter)
        read_end, self._input = os.pipe()
        try:
            # The whole invitation fits into the pipe, so writing it never waits for the other host.
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._input, _F_SETPIPE_SZ, _PIPE_BYTES)
            os.set_blocking(self._input, False)
            super().__init__(self._command, stdin=read_end)
            self._invite(invitation.line())
        except BaseException:
            os.close(self._input)
            raise
        finally:
            os.close(read_end)

    def _invite(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended at once, which is noticed by its handle
            if os.write(self._input, line) < len(line):
                self.send(signal.SIGKILL)
                raise OSError(errno.E2BIG, "the environment is too large to be handed on")

    def close_input(self) -> None:
        """Close its input: the program reads nothing more."""
        if self._input >= 0:
            os.close(self._input)
        self._input = -1

    def why_it_ended(self) -> str:
        """Say in one line why the program has ended before the agent came; call it after :meth:`reap`."""
        said = self.take_held()
        last = said[-1].strip() if said else "it printed nothing"
        if self.code in (UNREACHABLE, OTHER_VERSION):
            return f"{self.name}: {last}"
        if self.code == _SSH_FAILED and self._command[0] == _SSH[0]:
            return (
                f"{self.name}: ssh could not log in there: {last}; it must work without a question: "
                f"ssh -o BatchMode=yes {self.name} true"
            )
        if self.code in _NO_PROGRAM:
            return (
                f"{self.name}: {sys.executable} cannot be run there: {last}; the same Python, with Phalanx, must be at "
                f"the same place on all hosts"
            )
        how = f"exit code {self.code}" if (self.code or 0) >= 0 else signal_name(-(self.code or 0))
        return f"{self.name}: {os.path.basename(self._command[0])} ended with {how} before the host had joined: {last}"
