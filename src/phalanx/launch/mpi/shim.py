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

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Start the keeper and stand for it; in the rank, become the script."""
    # The entry that Python made of this file's folder stays first: the script's own takes its place.
    home = os.path.abspath(__file__)
    for _ in range(4):
        home = os.path.dirname(home)
    if home not in sys.path:
        sys.path.append(home)
    from phalanx.launch.mpi.keeper import keep
    from phalanx.launch.rank import become

    become(keep(*sys.argv[1:]))


if __name__ == "__main__":
    main()
