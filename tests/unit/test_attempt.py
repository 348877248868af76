"""``world.attempt``: how often ranks have been started again, as each launcher says it."""

from __future__ import annotations

import pytest

from phalanx.place.environment import read_environment

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
RANK |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = RANK | {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("environment", "launcher", "attempt"),
    [
        (TORCHRUN, "torchrun", 2),
        (TORCHRUN | {"PHALANX_RUN_ID": "job", "PHALANX_ATTEMPT": "3"}, "phalanx", 3),
        # torchrun, started by a rank of phalanx run
        (TORCHRUN | {"PHALANX_RUN_ID": "another", "PHALANX_ATTEMPT": "3"}, "torchrun", 2),
        ({}, "none", 0),
    ],
)
def test_the_launcher_says_which_attempt_it_is(environment: dict[str, str], launcher: str, attempt: int) -> None:
    place = read_environment(environment, []).place()
    assert (place.launcher, place.attempt) == (launcher, attempt)
