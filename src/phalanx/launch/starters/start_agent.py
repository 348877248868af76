"""The program that a starter runs on each host: it becomes the host's agent, as if the user had started it there.

It is run twice, by its path, with the Python of ``phalanx run``. The first time it reads the invitation from standard
input, enters the directory, takes over the environment, and replaces itself: variables such as LD_LIBRARY_PATH and
PYTHONHASHSEED only count when a process starts. The second time it is the agent. It imports nothing of Phalanx before
that, because Phalanx may be found by PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

__all__ = ["main"]

PACKAGE = "phalanx"


def main() -> None:
    """Read the invitation, or be the agent; in a rank, become the script."""
    if len(sys.argv) < 2:
        _begin_anew()
    # The folder that holds the package; see ``shim.py``.
    home = os.path.abspath(__file__).rpartition(f"{os.sep}{PACKAGE}{os.sep}")[0]
    if home not in sys.path:
        sys.path.append(home)
    from phalanx.launch.rank.start import become
    from phalanx.launch.starters.host_agent import be_agent

    become(be_agent(int(sys.argv[1])))


def _begin_anew() -> None:
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
    # The rank that reads gets its input over the link; nobody may take it for this one, which the starter holds open.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    environment = {**os.environ, **invitation["environment"]}
    os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), str(descriptor)], environment)


if __name__ == "__main__":
    main()
