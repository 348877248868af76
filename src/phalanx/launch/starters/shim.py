"""The program that an MPI launcher starts in place of the script, once for each rank.

MPI launchers differ in how they label a rank's output, what they report of a rank that fails, and which processes they
kill then; some hang if a grandchild holds a pipe open. So they start this shim, and all they ever see of the rank is
that the shim ends, with exit code 0. There are three processes, from the outside in:

- The **shim** is the MPI launcher's child. It waits, passes on the signals that it receives, and dies with its parent.
- The **agent** (``mpi_agent.py``) has a session of its own, so that a signal which kills the shim does not reach it. It
  holds the connection to ``phalanx run``, is the rank's parent, and ends everything below it before it ends.
- The **rank** is a fork of the agent that unwinds up to here and becomes the script, as under the built-in launcher.
  It inherits what MPI needs: the environment, and the descriptor of its process manager.

The shim is run by its path, because Phalanx need not be installed where the ranks' Python searches, and because with
``-m`` modules of the working directory would come before the standard library's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

__all__ = ["main"]

PACKAGE = "phalanx"


def main() -> None:
    """Start the agent and stand for it; in the rank, become the script."""
    # The folder that holds the package. The entry that Python has made of this file's own folder stays the first one:
    # the script's folder will replace it.
    home = os.path.abspath(__file__).rpartition(f"{os.sep}{PACKAGE}{os.sep}")[0]
    if home not in sys.path:
        sys.path.append(home)
    from phalanx import settings

    if settings.MPI_JOIN not in os.environ:
        sys.exit("phalanx: this program is for `phalanx run --mpi` to start; start your script with that")
    from phalanx.launch.rank.start import become
    from phalanx.launch.starters.mpi_agent import ASKED, PASSED_ON, be_agent

    watched = {*ASKED, *PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    signals, to_agent = os.pipe()
    agent = os.fork()
    if agent:
        _stand_for(agent, to_agent, watched)
    os.close(to_agent)
    become(be_agent(sys.argv[1], signals))


def _stand_for(agent: int, to_agent: int, watched: set[signal.Signals]) -> NoReturn:
    """Pass signals on to the agent, and end as it does. If this process is killed, the agent's pipe ends."""
    from phalanx.system import processes

    processes.set_name("phalanx-shim")
    with contextlib.suppress(OSError):
        processes.die_with_parent(os.getppid())
    # Only the rank may hold the input, so that its writer notices when the rank ends.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    while True:
        come = signal.sigwaitinfo(watched)
        signum = come.si_signo
        if signum == signal.SIGCHLD:
            pid, status = os.waitpid(agent, os.WNOHANG)
            if pid:
                os._exit(abs(os.waitstatus_to_exitcode(status)))
        else:
            with contextlib.suppress(OSError):
                os.write(to_agent, bytes([signum]))


if __name__ == "__main__":
    main()
