"""``python -m phalanx`` is the command ``phalanx``."""

import sys

from phalanx.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
