"""The pictures of the pages are those that ``docs/images/draw.py`` draws, and are small."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.pages.page import ROOT

IMAGES = ROOT / "docs" / "images"
SPEC = importlib.util.spec_from_file_location("draw", IMAGES / "draw.py")
assert SPEC is not None
assert SPEC.loader is not None
draw = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(draw)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_picture_is_what_its_command_draws(name: str) -> None:
    assert (IMAGES / f"{name}.svg").read_text() == draw.PICTURES[name](), f"python docs/images/draw.py {name}"


@pytest.mark.parametrize("picture", sorted(IMAGES.glob("*.svg")), ids=lambda picture: picture.name)
def test_picture_is_small(picture: Path) -> None:
    assert picture.stat().st_size <= 15 << 10
