"""The program that ``phalanx.launch(..., start_method="spawn")`` starts: it becomes the supervisor of a job."""

from __future__ import annotations

import os
import pickle
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Read what is to be done, and do it."""
    # Nothing has been started yet, and Python would answer Ctrl-C with a traceback of imports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(int(sys.argv[1]), "rb") as file:
        path, content = pickle.load(file)
    # Before anything of Phalanx is imported, which may be found only there.
    sys.path[:] = path
    from phalanx.launch.function.spawning import Start
    from phalanx.launch.function.supervising import supervise

    start: Start = pickle.loads(content)
    os.environ.update(start.variables)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    supervise(start.job, start.call, start.results, start.reason, start.parent)


if __name__ == "__main__":
    main()
