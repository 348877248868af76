"""Times in seconds that a user gives to ``phalanx run``, as the type of an option."""

from __future__ import annotations

import math
from typing import Any

import click

from phalanx.launch.job.job import MOST_S

__all__ = ["Seconds"]


class Seconds(click.FloatRange):
    """A number of seconds that can be waited for: neither infinite, nor nan, nor longer than 11 days.

    Args:
        least_s: the shortest time.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        super().__init__(min=least_s, max=MOST_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if math.isnan(seconds := super().convert(value, param, ctx)):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds
