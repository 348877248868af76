"""The releases of torch that the tests have run on, and a word to the user where another one is installed.

docs/compatibility.md has the results.
"""

from __future__ import annotations

import re
import warnings

from phalanx.errors import InitializationError

__all__ = ["OLDEST", "TRIED", "note_if_newer", "refuse_if_older"]

OLDEST = (2, 13)
TRIED = ((2, 13), (2, 14), (2, 15))

_noted = False


def refuse_if_older(version: str) -> None:
    """Refuse a torch that is older than the oldest release that the tests have run on.

    Args:
        version: ``torch.__version__``.

    Raises:
        InitializationError: it is; the message says what to install.
    """
    release = _release(version)
    if release is not None and release < OLDEST:
        oldest = _text(OLDEST)
        raise InitializationError(
            f"torch {version} is too old: Phalanx needs torch >= {oldest}, the oldest release that its tests run on. "
            f"Upgrade it: pip install 'torch>={oldest}'"
        )


def note_if_newer(version: str, rank: int) -> None:
    """Warn once, on rank 0 alone, of a torch newer than every release that was tried; 2.15.1 is not, after 2.15.

    Args:
        version: ``torch.__version__``.
        rank: this process's rank in the group that is being made.
    """
    global _noted
    release = _release(version)
    if release is None or release <= max(TRIED) or rank or _noted:
        return
    _noted = True
    warnings.warn(
        f"torch {version} is newer than every release that this Phalanx was tried on "
        f"({', '.join(map(_text, TRIED))}). If something does not work, look for a newer Phalanx",
        stacklevel=2,
    )


def _release(version: str) -> tuple[int, int] | None:
    """The major and the minor number; None for a version that is written otherwise."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
