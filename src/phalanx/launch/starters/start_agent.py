"""The program that a starter runs on each host, and an MPI launcher for each rank: it starts the agent.

There are three processes, from the outside in:

- The **shim** passes signals on, ends as the agent does, and kills what an agent that was killed has left. Starters
  and MPI launchers differ in what they label, report and kill. All that they see of a rank is that the shim ends.
- The **agent** (``host_agent.py``, ``mpi_agent.py``) has a session of its own, so that a signal which kills the shim
  does not reach it. It is the ranks' parent, and ends everything below it before it ends.
- A **rank** is a fork of the agent that unwinds up to here and becomes the script.

A starter runs it twice. The first time it has no arguments: it reads the invitation from standard input, enters the
directory, takes over the environment, and replaces itself, because variables such as LD_LIBRARY_PATH and PYTHONHASHSEED
only count when a process starts.

It is run by its path, because Phalanx need not be installed where the ranks' Python searches, and because with ``-m``
modules of the working directory would come before the standard library's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import NoReturn

__all__ = ["main"]

PACKAGE = "phalanx"
# A request to end is for the agent itself. The other signals are for its ranks, and reach it by a pipe.
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCHED = {*_ASKED, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}


def main() -> None:
    """Start the agent and stand for it; in a rank, become the script.

    The arguments are ``host`` and a descriptor with the invitation, or ``mpi`` and the kind of MPI launcher.
    """
    if len(sys.argv) < 2:
        _begin_anew()
    # The folder that holds the package. The entry that Python has made of this file's own folder stays the first one:
    # the script's folder will replace it.
    home = os.path.abspath(__file__).rpartition(f"{os.sep}{PACKAGE}{os.sep}")[0]
    if home not in sys.path:
        sys.path.append(home)
    from phalanx import settings
    from phalanx.system import processes

    starter, argument = sys.argv[1:]
    if starter == "mpi" and settings.MPI_JOIN not in os.environ:
        sys.exit("phalanx: this program is for `phalanx run --mpi` to start; start your script with that")
    processes.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    signals, to_agent = os.pipe()
    agent = os.fork()
    if agent:
        if starter == "mpi":  # some MPI launchers end a job by killing its processes
            with contextlib.suppress(OSError):
                processes.die_with_parent(os.getppid())
        _stand_for(agent, to_agent)
    os.close(to_agent)
    os.setsid()
    processes.adopt_orphans()
    from phalanx.launch.rank.start import become

    if starter == "mpi":
        from phalanx.launch.starters import mpi_agent

        become(mpi_agent.be_agent(argument, signals))
    else:
        from phalanx.launch.starters import host_agent

        os.close(signals)
        processes.release_input()  # the rank that reads gets its input over the link
        become(host_agent.be_agent(host_agent.read_invitation(int(argument))))


def _begin_anew() -> NoReturn:
    """Run this program again in the user's environment and directory, with the invitation in a file without a name."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit("phalanx: this program is for `phalanx run -H` to start; start your script with that")
        line += data
    invitation = json.loads(line)
    descriptor = os.memfd_create("phalanx-invitation", 0)
    os.write(descriptor, line)
    os.lseek(descriptor, 0, os.SEEK_SET)
    with contextlib.suppress(OSError):  # the supervisor is told of a directory that is missing
        os.chdir(invitation["directory"])
    environment = {**os.environ, **invitation["environment"]}
    program = [sys.executable, os.path.abspath(__file__), "host", str(descriptor)]
    os.execve(sys.executable, program, environment)


def _stand_for(agent: int, to_agent: int) -> NoReturn:
    """Pass signals on to the agent, and end as it does. If this process is killed, the agent's pipe ends."""
    from phalanx.system import processes

    processes.set_name("phalanx-shim")
    processes.release_input()  # only the rank may hold it, so that its writer notices when the rank ends
    while True:
        signum = signal.sigwaitinfo(_WATCHED).si_signo
        if signum == signal.SIGCHLD:
            pid, status = os.waitpid(agent, os.WNOHANG)
            if pid:
                processes.end_descendants()
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
        elif signum in _ASKED:
            os.kill(agent, signum)
        else:
            with contextlib.suppress(OSError):  # the agent of a host does not read them
                os.write(to_agent, bytes([signum]))


if __name__ == "__main__":
    main()
