"""``--log-dir``, ``--tee``, ``--only``: what they mean together, and which combinations make no sense."""

from __future__ import annotations

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.output_options import decide_output


@pytest.mark.parametrize(
    ("log_dir", "tee", "only", "shown"),
    [
        (None, False, None, [0, 1, 2, 3, 4]),
        (None, False, "0,2-3", [0, 2, 3]),
        (None, False, " 4 , 1 - 1 ", [1, 4]),
        ("logs", False, None, []),
        ("logs", True, None, [0, 1, 2, 3, 4]),
        ("logs", False, "1", [1]),
    ],
)
def test_which_ranks_are_shown(log_dir: str | None, tee: bool, only: str | None, shown: list[int]) -> None:
    options = decide_output(log_dir, tee=tee, only=only)
    options.check(5)
    assert [rank for rank in range(5) if options.shows(rank)] == shown
    assert options.log_of(3) == ("logs/rank-3.log" if log_dir else "")
    assert bool(options.note(5)) == (log_dir is not None and not shown)


@pytest.mark.parametrize(
    ("log_dir", "tee", "only", "said"),
    [
        (None, True, None, "--log-dir DIR"),
        ("logs", True, "0", "--only 0"),
        ("", False, None, "empty"),
        (None, False, "3-2", "'3-2'"),
        (None, False, "0,,1", "0,2-3"),
        (None, False, "all", "'all'"),
    ],
)
def test_what_makes_no_sense_is_refused(log_dir: str | None, tee: bool, only: str | None, said: str) -> None:
    with pytest.raises(LaunchError) as error:
        decide_output(log_dir, tee=tee, only=only)
    assert said in str(error.value)


def test_a_rank_that_the_job_does_not_have() -> None:
    with pytest.raises(LaunchError, match=r"no rank 5; the job has 5 ranks"):
        decide_output(None, tee=False, only="0-5").check(5)
