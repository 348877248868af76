"""``python -m phalanx`` is the command ``phalanx``."""

from phalanx.launch.cli import main

if __name__ == "__main__":
    main()
