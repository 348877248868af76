"""Stacks as ``faulthandler`` writes them, read back into frames."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ASKED", "OWN", "SCRIPT_ENDED", "Frame", "asked_in", "frames_of", "has_ended", "is_library"]

# In front of what a rank has asked another process for (``waiting.py``), behind its stack.
ASKED = "\nAsked: "
# Where a process is whose script has ended, while Python still waits for its threads; it stands after the word "at".
SCRIPT_ENDED = "the end of its script, waiting for its other threads to end"

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<function>.*)$', re.MULTILINE)
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# Where installed packages are that are not this environment's own: a virtual environment may see those of another one,
# as ones made with --system-site-packages do, or find them by a .pth file or PYTHONPATH.
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_MADE = f"{os.sep}torchinductor_"
# This package's own files, which need not be among the installed ones.
OWN = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_librarys(self) -> bool:
        """Whether it belongs to an installed library or to Phalanx, and not to the user's program."""
        return is_library(self.file)


def is_library(file: str) -> bool:
    """Whether the code of this file is an installed library's, Python's or Phalanx's, and not the user's program.

    So is what torch's compiler has made, in the folder of its cache that it has by default.
    """
    return file.startswith(("<", *_LIBRARIES, OWN)) or any(part in file for part in (*_PACKAGES, _MADE))


def frames_of(stack: str) -> list[Frame]:
    """The frames of a stack, the innermost first, as faulthandler lists them."""
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(stack)]


def has_ended(frames: Sequence[Frame]) -> bool:
    """Whether this is the stack of a main thread whose script is over, and which waits for other threads to end."""
    return bool(frames) and frames[-1].function == "_shutdown" and os.path.basename(frames[-1].file) == "threading.py"


def asked_in(stack: str) -> str:
    """What the process had asked another one for, if that stands behind its stack; else an empty text."""
    return stack.rpartition(ASKED)[2] if ASKED in stack else ""
