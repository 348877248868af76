"""The same programs on Gloo and on Phalanx: equal values, or an entry in docs/conformance.md that says why not."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.differential.program import PROGRAMS, SIZES, Program, load_programs
from tests.differential.worlds import BETWEEN_HOSTS, differences

CONFORMANCE = Path(__file__).parents[2] / "docs" / "conformance.md"
MODULES = load_programs()
MESSAGES = "point_to_point"
SLOW = ("checkpoints", "compiling", "data_parallel", "sharding", "spawning")


def programs(module: str, size: int, *, long: bool) -> list[Program]:
    found = [each for each in PROGRAMS.values() if each.module == module and size in each.sizes]
    return [each for each in found if long or not each.long]


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(each, marks=pytest.mark.long if each in SLOW else [])
        for each in MODULES
        if programs(each, SIZES[0], long=False)
    ],
)
def test_programs_give_the_same_as_on_gloo(module: str) -> None:
    if module == "compiling":
        importlib.import_module("torch._dynamo.backends.debugging")  # once, and not in each rank
    wrong = differences("phalanx", SIZES[0], programs(module, SIZES[0], long=False))
    assert not wrong, "\n".join(wrong)


@pytest.mark.conformance
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("module", MODULES)
def test_all_programs_give_the_same_in_every_world(module: str, size: int) -> None:
    wrong = differences("phalanx", size, programs(module, size, long=True))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("size", [SIZES[0], *(pytest.param(size, marks=pytest.mark.conformance) for size in SIZES[1:])])
def test_messages_between_hosts_give_the_same_as_on_gloo(size: int) -> None:
    wrong = differences(BETWEEN_HOSTS, size, programs(MESSAGES, size, long=size != SIZES[0]))
    assert not wrong, "\n".join(wrong)


def test_every_declared_difference_is_explained() -> None:
    headings = re.findall(r"^#+ (.+)$", CONFORMANCE.read_text(), re.MULTILINE)
    declared = {program.differs for program in PROGRAMS.values()} - {""}
    assert declared <= set(headings), f"docs/conformance.md has no such heading: {sorted(declared - set(headings))}"
