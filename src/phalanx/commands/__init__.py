"""The commands of ``phalanx``: a file for each, with a function of its name. Begin in ``main.py``."""

from __future__ import annotations

import math
from typing import Any

import click

# poll() takes milliseconds as an int, so it knows no 25 days.
_MOST_S = 1_000_000.0


class Seconds(click.FloatRange):
    """A number of seconds that can be waited for: neither infinite, nor nan, nor longer than 11 days."""

    def __init__(self, least_s: float = 0.0) -> None:
        super().__init__(min=least_s, max=_MOST_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if math.isnan(seconds := super().convert(value, param, ctx)):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds
