"""``phalanx`` and ``python -m phalanx``: loads the command line, and ends without a word if Ctrl-C comes meanwhile."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> int | None:
    """Load the command line and run it; the entry point of ``phalanx``. Returns its exit code."""
    # While modules are imported nothing has been started, and Python would answer Ctrl-C with a traceback of imports.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from phalanx.commands.main import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":
    sys.exit(main())
