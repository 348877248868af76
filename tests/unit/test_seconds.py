"""Times that ``phalanx run`` is given: numbers that a process can wait for, and nothing else."""

from __future__ import annotations

import math

import pytest
from click.testing import CliRunner

from phalanx.commands.run import run
from phalanx.errors import LaunchError
from phalanx.launch.job.job import make_job
from phalanx.launch.job.target import find_target


@pytest.mark.parametrize("given", ["nan", "-1", "3000000", "soon"])
@pytest.mark.parametrize("option", ["--grace", "--warn-after", "--report-after"])
def test_what_cannot_be_waited_for_is_refused_with_the_option(option: str, given: str) -> None:
    done = CliRunner().invoke(run, ["-n", "2", option, given, "true"])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output


@pytest.mark.parametrize("given", [math.nan, -1.0, 3e6])
def test_so_it_is_in_python(given: float) -> None:
    with pytest.raises(LaunchError, match="grace_s"):
        make_job(2, find_target("true"), grace_s=given)
