"""All programs, and the verdict on one whose outcomes over Gloo and over Phalanx are known."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from tests.differential import programs
from tests.differential.program import PROGRAMS, Program
from tests.differential.values import difference
from tests.differential.worlds import Broke

__all__ = ["all_programs", "verdict"]


def all_programs() -> list[Program]:
    for module in pkgutil.iter_modules(programs.__path__):
        importlib.import_module(f"tests.differential.programs.{module.name}")
    return list(PROGRAMS.values())


def verdict(program: Program, expected: list[Any] | Broke, value: list[Any] | Broke) -> str:
    """What is wrong, in words; empty if the outcomes are equal, or differ as declared."""
    broke = isinstance(expected, Broke) or isinstance(value, Broke)
    if program.differs:
        if broke or difference(expected, value, program.tolerance):
            return ""
        return f"the values are equal by now: take the entry {program.differs!r} away"
    if isinstance(expected, Broke):
        return f"over Gloo the program fails itself: {expected}"
    if isinstance(value, Broke):
        return f"over Gloo it returns {expected}, here {value}"
    return difference(expected, value, program.tolerance, "by rank, the value")
