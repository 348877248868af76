"""A program of the differential suite: written for torch.distributed, run on Gloo and on Phalanx, and compared.

A program is a function of a ``Member`` (its rank, the world's size, a folder for files) that runs on every rank of a
world that has joined. It calls torch.distributed only, and returns what a user can see: tensors, numbers, strings, the
class of an error, or lists, tuples and dicts of these.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.ranks import Member

__all__ = ["PROGRAMS", "SERVED_HERE", "SIZES", "Program", "Raised", "load_programs", "program", "raised", "wait_for"]

SIZES = (3, 2, 5)  # make test has the first, make conformance the others
# The heading of an entry in docs/conformance.md whose programs must succeed here.
SERVED_HERE = "Operations and dtypes that Gloo refuses"


@dataclass(frozen=True)
class Program:
    """One program; ``program`` says what its attributes mean."""

    module: str
    name: str
    run: Callable[[Member], Any]
    sizes: tuple[int, ...]
    tolerance: float
    alone: bool
    long: bool
    differs: str


PROGRAMS: dict[str, Program] = {}
# Left out before a release: torch's Gloo has no all-to-all of lists, or ends with SIGABRT where it should refuse.
MISSING = {"2.12": r"\[(pg\.alltoall\(|all_to_all(_of)?[-\]])", "2.10": r"\[reduce_scatter_tensor too large"}


def load_programs() -> list[str]:
    """Import all modules of programs, and return their names."""
    folder = importlib.import_module("tests.differential.programs")
    names = [module.name for module in pkgutil.iter_modules(folder.__path__)]
    for name in names:
        importlib.import_module(f"{folder.__name__}.{name}")
    return names


@dataclass(frozen=True)
class Raised:
    """An error that a program has caught: the names of its class and of all classes that catch it, and its text."""

    classes: tuple[str, ...]
    text: str = field(compare=False)


def program(
    *,
    cases: Mapping[str, Any] | Sequence[str] = (),
    sizes: Sequence[int] = SIZES,
    tolerance: float = 0.0,
    alone: bool = False,
    long: bool | Sequence[str] = False,
    differs: str | Mapping[str, str] = "",
    equal_from: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a program, or as one program for each case, which is then its second argument.

    Args:
        cases: the cases by their labels; a sequence of labels if the label is all that the function needs.
        sizes: the worlds in which it runs.
        tolerance: how far a number may differ, relative to it and absolutely; 0 where both must be exact.
        alone: whether it ends or breaks its world, so that it needs one of its own.
        long: whether only make conformance has it, or the labels of the cases that only it has.
        differs: the heading in docs/conformance.md of the entry that says why the values differ, empty if they must be
            equal; by label if only some of the cases differ.
        equal_from: the release of torch from which on they do not differ any more.
    """
    labelled = dict(cases) if isinstance(cases, Mapping) else {label: label for label in cases}

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        module = function.__module__.rpartition(".")[2]
        runs = {label: (lambda member, case=case: function(member, case)) for label, case in labelled.items()}
        for label, run in (runs or {"": function}).items():
            name = f"{module}.{function.__name__}" + (f"[{label}]" if label else "")
            if any(torch.__version__ < release and re.search(calls, name) for release, calls in MISSING.items()):
                continue
            heading = differs if isinstance(differs, str) else differs.get(label, "")
            if equal_from and torch.__version__ >= equal_from:
                heading = ""
            late = long if isinstance(long, bool) else label in long
            assert name not in PROGRAMS, f"two programs are called {name}"
            PROGRAMS[name] = Program(module, name, run, tuple(sizes), tolerance, alone, late, heading)
        return function

    return register


def raised(call: Callable[[], Any], *, gives: Any = None) -> Any:
    """The error that ``call`` raises; or ``gives``, which it has filled, or else what it returns."""
    try:
        returned = call()
    except Exception as error:
        return Raised(tuple(base.__name__ for base in type(error).__mro__), str(error))
    return returned if gives is None else gives


def wait_for(*works: Any) -> list[Any]:
    return [work.wait() for work in works]
