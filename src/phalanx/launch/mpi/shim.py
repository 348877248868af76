"""The program that an MPI launcher starts in place of the script, once for each rank.

MPI launchers have their own ideas of how a rank's output is labelled, what a bad end looks like, and whom to kill;
some hang when a grandchild holds a pipe. So what they start is this shim, and all they ever see of the rank is that
it ends, well. Three processes, from the outside in:

- the **shim** is the MPI launcher's child. It waits, passes on what it is told by signals, and dies with its parent;
- the **keeper** (``keeper.py``) has a session of its own, so that what kills the shim does not reach it. It holds the
  connection to ``phalanx run``, is the rank's parent, and ends everything below it before it ends;
- the **rank** is a fork of it that unwinds up to here and becomes the script, as under the built-in launcher. It
  inherits what MPI needs: the environment, and the descriptor of its process manager.

It is run by its path, since Phalanx need not be installed where the ranks' Python looks, and ``-m`` would make
modules of the working directory come before the standard library's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

__all__ = ["main"]


def main() -> None:
    """Start the keeper and stand for it; in the rank, become the script."""
    # The entry that Python made of this file's folder stays first: the script's own takes its place.
    home = os.path.abspath(__file__)
    for _ in range(4):
        home = os.path.dirname(home)
    if home not in sys.path:
        sys.path.append(home)
    from phalanx import settings
    from phalanx.launch.mpi.keeper import ASKED, PASSED_ON, keep
    from phalanx.launch.rank.start import become

    if settings.MPI_JOIN not in os.environ:
        sys.exit("phalanx: this program is for `phalanx run --mpi` to start; start your script with that")
    watched = {*ASKED, *PASSED_ON, signal.SIGCHLD}
    handlers: dict[int, Any] = {signum: signal.getsignal(signum) or signal.SIG_DFL for signum in watched}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    heard, tell = os.pipe()
    keeper = os.fork()
    if keeper:
        _stand_for(keeper, tell, watched)
    os.close(tell)
    become(keep(sys.argv[1], heard, handlers))


def _stand_for(keeper: int, tell: int, watched: set[signal.Signals]) -> NoReturn:
    """End as the keeper does, and tell it of signals; this process's own end is the end of the pipe."""
    from phalanx.system import processes

    processes.set_name("phalanx-shim")
    with contextlib.suppress(OSError):
        processes.die_with_parent(os.getppid())
    # The input is the rank's: its writer should notice when the rank ends.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    while True:
        signum = signal.sigwait(watched)
        if signum == signal.SIGCHLD:
            pid, status = os.waitpid(keeper, os.WNOHANG)
            if pid:
                os._exit(abs(os.waitstatus_to_exitcode(status)))
        else:
            with contextlib.suppress(OSError):
                os.write(tell, bytes([signum]))


if __name__ == "__main__":
    main()
