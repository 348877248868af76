"""Folders by which files are named: the working directory, which somebody may remove meanwhile, and the job's."""

from __future__ import annotations

import os

from phalanx import settings

__all__ = ["beside", "jobs_folder", "own_folder"]


def own_folder() -> str:
    """The working directory; empty if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def jobs_folder() -> str:
    """The folder in which ``phalanx run`` was called that started this process; empty without one.

    All ranks of a job have been started there, and a script that changes its working directory does not change it.
    """
    return os.environ.get(settings.DIRECTORY, "")


def beside(place: str, folder: str) -> str:
    """A file, or a place in one, as people write it: below the folder without that, anywhere else unchanged.

    Args:
        place: ``/home/user/train.py:42``, or without the line.
        folder: an absolute path; empty if there is none.
    """
    start = folder.rstrip(os.sep) + os.sep
    # Without "//", after which the rest would name another file, and "..", which behind a link leads elsewhere.
    is_below = bool(folder) and place.startswith(start) and os.path.normpath(place) == place
    return place[len(start) :] if is_below else place
