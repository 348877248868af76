"""The same programs on Gloo and on Phalanx: equal values, or an entry in docs/conformance.md that says why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.differential.program import SIZES, Program
from tests.differential.suite import all_programs, verdict
from tests.differential.worlds import BETWEEN_HOSTS, Broke, run_programs

CONFORMANCE = Path(__file__).parents[2] / "docs" / "conformance.md"
CASES = [(program, size) for size in SIZES for program in all_programs() if size in program.sizes]
MESSAGES = "point_to_point"

_outcomes: dict[tuple[str, int], dict[str, list[Any] | Broke]] = {}


def case(program: Program, size: int) -> Any:
    marks = [] if size == program.short else [pytest.mark.conformance]
    return pytest.param(program, size, id=f"{program.name}-{size}", marks=marks)


def outcome(backend: str, program: Program, size: int, session: pytest.Session) -> list[Any] | Broke:
    """The program's outcome; the first time, all programs of this session run in such worlds, one after another."""
    key = (backend, size)
    if key not in _outcomes:
        cases = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
        ours = [case for case in cases if isinstance(case.get("program"), Program)]
        here = list(dict.fromkeys(case["program"] for case in ours if case["size"] == size))
        if backend == BETWEEN_HOSTS:
            here = [program for program in here if program.name.startswith(MESSAGES)]
        _outcomes[key] = run_programs(backend, size, here)
    return _outcomes[key][program.name]


def check(backend: str, program: Program, size: int, session: pytest.Session) -> None:
    text = verdict(program, outcome("gloo", program, size, session), outcome(backend, program, size, session))
    assert not text, text


@pytest.mark.parametrize(("program", "size"), [case(*one) for one in CASES])
def test_the_program_gives_the_same_on_gloo(program: Program, size: int, request: pytest.FixtureRequest) -> None:
    check("phalanx", program, size, request.session)


@pytest.mark.parametrize(("program", "size"), [case(*one) for one in CASES if one[0].name.startswith(MESSAGES)])
def test_messages_between_hosts_give_the_same(program: Program, size: int, request: pytest.FixtureRequest) -> None:
    check(BETWEEN_HOSTS, program, size, request.session)


def test_every_declared_difference_is_explained() -> None:
    headings = re.findall(r"^#+ (.+)$", CONFORMANCE.read_text(), re.MULTILINE)
    declared = {program.differs for program, _ in CASES} - {""}
    assert declared <= set(headings), f"docs/conformance.md has no such heading: {sorted(declared - set(headings))}"
