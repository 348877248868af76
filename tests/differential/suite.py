"""All programs, and the verdict on one whose outcomes over Gloo and over Phalanx are known."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from tests.differential import programs
from tests.differential.program import PROGRAMS, SERVED_HERE, Program, Raised
from tests.differential.values import difference
from tests.differential.worlds import Broke

__all__ = ["all_programs", "verdict"]


def all_programs() -> list[Program]:
    for module in pkgutil.iter_modules(programs.__path__):
        importlib.import_module(f"tests.differential.programs.{module.name}")
    return list(PROGRAMS.values())


def verdict(program: Program, expected: list[Any] | Broke, value: list[Any] | Broke) -> str:
    """What is wrong, in words; empty if the outcomes are equal, or differ as declared."""
    if isinstance(expected, Broke) and not program.differs:
        return f"over Gloo the program fails itself: {expected}"
    if isinstance(value, Broke):
        return f"over Gloo it returns {expected}, here {value}"
    if program.differs == SERVED_HERE and any(isinstance(of_rank, Raised) for of_rank in value):
        return f"it is to be served here, and is refused: {value}"
    if program.differs:
        if isinstance(expected, Broke) or difference(expected, value, program.tolerance):
            return ""
        return f"the values are equal by now: take the entry {program.differs!r} away"
    return difference(expected, value, program.tolerance, "by rank, the value")
