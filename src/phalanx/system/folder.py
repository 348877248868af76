"""The working directory of this process, which somebody may have removed while the process runs."""

from __future__ import annotations

import os

__all__ = ["beside", "own_folder"]


def own_folder() -> str:
    """The working directory; empty if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def beside(file: str) -> str:
    """A file, or a place in one, as people write it: below the working directory without that."""
    folder = own_folder()
    if not folder or not os.path.isabs(file):
        return file
    name = os.path.relpath(file, folder)
    return file if name.startswith(os.pardir) else name
