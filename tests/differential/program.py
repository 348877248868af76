"""A program of the differential suite: written for torch.distributed, run on Gloo and on Phalanx, and compared.

A program is a function of a ``Member`` (its rank, the world's size, a folder for files) that runs on every rank of a
world that has joined. It calls torch.distributed only, and returns what a user can see: tensors, numbers, strings, the
class of an error, or lists, tuples and dicts of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.ranks import Member

__all__ = ["PROGRAMS", "SERVED_HERE", "SIZES", "Program", "Raised", "program", "raised"]

SIZES = (2, 3, 5)
# The heading of an entry in docs/conformance.md whose programs must succeed here.
SERVED_HERE = "Operations and dtypes that Gloo refuses"

PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True)
class Program:
    """One program.

    Args:
        name: its module and function, with the case in brackets if the function has cases.
        run: the function.
        sizes: the worlds in which it runs.
        short: the one of these in which every run of the suite has it; make conformance has the others.
        tolerance: how far a number may differ, relative to it and absolutely; 0 where both must be exact.
        alone: whether it ends or breaks its world, so that it needs one of its own.
        differs: the heading in docs/conformance.md of the entry that says why the values differ; empty if they must be
            equal.
    """

    name: str
    run: Callable[[Member], Any]
    sizes: tuple[int, ...]
    short: int
    tolerance: float
    alone: bool
    differs: str


@dataclass(frozen=True)
class Raised:
    """An error that a program has caught: the names of its class and of all classes that catch it, and its text."""

    classes: tuple[str, ...]
    text: str = field(compare=False)


def program(
    *,
    cases: Mapping[str, Any] | Sequence[str] = (),
    sizes: Sequence[int] = SIZES,
    short: int | None = None,
    tolerance: float = 0.0,
    alone: bool = False,
    differs: str | Mapping[str, str] = "",
    equal_from: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a program, or as one program for each case, which is then its second argument.

    Args:
        cases: the cases by their labels; a sequence of labels if the label is all that the function needs.
        short: see :class:`Program`; a world of three if it runs in one, and 0 for none.
        differs: see :class:`Program`; by label if only some of the cases differ.
        equal_from: the release of torch from which on they do not differ any more.
    """
    labelled = dict(cases) if isinstance(cases, Mapping) else {label: label for label in cases}

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        stem = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

        def add(name: str, label: str, run: Callable[[Member], Any]) -> None:
            heading = differs if isinstance(differs, str) else differs.get(label, "")
            if equal_from and torch.__version__ >= equal_from:
                heading = ""
            if name in PROGRAMS:
                raise ValueError(f"two programs are called {name}")
            usual = (3 if 3 in sizes else sizes[0]) if short is None else short
            PROGRAMS[name] = Program(name, run, tuple(sizes), usual, tolerance, alone, heading)

        for label, case in labelled.items():
            add(f"{stem}[{label}]", label, lambda member, case=case: function(member, case))  # type: ignore[misc]
        if not labelled:
            add(stem, "", function)
        return function

    return register


def raised(call: Callable[[], Any], *, gives: Any = None) -> Any:
    """The error that ``call`` raises; or ``gives``, which it has filled, or else what it returns."""
    try:
        returned = call()
    except Exception as error:
        return Raised(tuple(base.__name__ for base in type(error).__mro__), str(error))
    return returned if gives is None else gives
