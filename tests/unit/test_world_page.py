"""docs/world.md: every method that its table and text promise exists, and has a docstring."""

from __future__ import annotations

import re
from pathlib import Path

import phalanx

PAGE = (Path(__file__).parents[2] / "docs" / "world.md").read_text()


def test_every_name_of_the_page_exists() -> None:
    named = set(re.findall(r"\b(?:world|group)\.(\w+)", PAGE)) - {"md"}
    for row in re.findall(r"\|([^|]*)\|$", PAGE, re.MULTILINE)[2:]:
        named |= set(re.findall(r"`(\w+)", row)) - {"phalanx", "with", "world", "state_dict"}
    assert {"accumulate", "mean", "subgroup", "local_main_first", "scatter_object"} <= named
    attributes = re.search(r"Attributes:(.*?)\n\n", phalanx.World.__doc__ or "", re.DOTALL)
    assert attributes
    for name in sorted(named):
        method = getattr(phalanx.World, name, None)
        assert (method is not None and method.__doc__) or re.search(rf"\b{name}\b", attributes[1]), name
