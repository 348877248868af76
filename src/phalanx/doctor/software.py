"""Whether the software of this process fits together: Python, torch, Phalanx and its C core."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from phalanx import settings
from phalanx.c10d import torch_versions
from phalanx.doctor.finding import Finding, Level
from phalanx.errors import BackendError
from phalanx.native import core

__all__ = ["software"]


def software() -> Iterator[Finding]:
    """Findings about what is installed. torch is not imported, because that takes seconds."""
    yield Finding(Level.OK, "python", f"{platform.python_version()}, {sys.executable}")
    yield _torch()
    yield from _phalanx()


def _torch() -> Finding:
    oldest = ".".join(map(str, torch_versions.OLDEST))
    needs = f"phalanx.init() and the backend phalanx need torch >= {oldest}; phalanx run starts scripts on others"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding(
            Level.WARNING,
            "torch",
            f"this Python ({sys.executable}) has no torch: {needs}",
            "activate the environment that has it, or install it there: pip install torch",
        )
    numbers = tuple(int(number) for number in version.split("+")[0].split(".")[:2] if number.isdecimal())
    if numbers < torch_versions.OLDEST:
        return Finding(Level.WARNING, "torch", f"{version}: {needs}", f"pip install 'torch>={oldest}'")
    return Finding(Level.OK, "torch", version)


def _phalanx() -> Iterator[Finding]:
    try:
        core.library()
    except (BackendError, OSError) as error:
        yield Finding(
            Level.FAILURE,
            "phalanx",
            f"{settings.VERSION}, whose C core cannot be loaded: {error}",
            "install Phalanx again",
        )
        return
    entry = core.quick_entry()
    if isinstance(entry, str):
        said = f"{settings.VERSION}; every call goes by ctypes, which costs small ones some microseconds: {entry}"
        yield Finding(Level.WARNING, "phalanx", said, "install Phalanx again, with a C compiler")
    else:
        yield Finding(Level.OK, "phalanx", settings.VERSION)
