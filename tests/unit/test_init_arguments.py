"""``phalanx.init(init_method=…, rank=…, world_size=…)``: for scripts that are their own launcher."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import InitializationError, LauncherEnvironmentError
from phalanx.place.arguments import place_with
from phalanx.place.environment import read_environment

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def place(environment: dict[str, str], *given: Any) -> Any:
    return place_with(read_environment(environment, []), *given)


def test_a_script_gives_its_place_itself() -> None:
    found = place({}, "tcp://h1:29500", 1, 4)
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("env", 1, 4, None)
    assert (found.master_addr, found.master_port) == ("h1", 29500)
    found = place({}, "tcp://[fd00::1]:29500?rank=2&world_size=3", None, None)
    assert (found.rank, found.world_size, found.master_addr) == (2, 3, "fd00::1")
    assert place({}, "env://", None, None) == place({}, None, None, None)
    assert place({}, None, 0, 1).local_rank == 0


@pytest.mark.parametrize("given", [(None, None, -1), ("env://", -1, -1), (None, -1, 1)])
def test_minus_one_is_not_given(given: tuple[Any, ...]) -> None:
    found = place({}, *given)
    assert (found.rank, found.world_size, found.local_rank) == (0, 1, 0)


def test_minus_one_leaves_it_to_the_launcher() -> None:
    assert place(HYDRA, None, -1, -1) == place(HYDRA, None, None, None)
    with pytest.raises(InitializationError, match="pass both rank and world_size"):
        place({}, None, -1, 4)


def test_under_a_launcher_it_completes_what_is_missing() -> None:
    assert place(HYDRA, "tcp://h1:29500", 1, 4).launcher == "mpich"
    assert place(HYDRA, "tcp://h1:29500", None, None).master_addr == "h1"
    by_port = {"PMI_PORT": "h:1", "PMI_ID": "1"}
    assert place(by_port, None, None, 4).world_size == 4


@pytest.mark.parametrize(
    ("environment", "given", "error", "words"),
    [
        (HYDRA, (None, 2, 4), LauncherEnvironmentError, r"rank=2 in phalanx.init\(\), but mpich says PMI_RANK=1"),
        ({}, (None, 2, None), InitializationError, "pass both rank and world_size"),
        ({}, (None, 4, 4), LauncherEnvironmentError, "4 is not a rank of a world of 4"),
        ({}, ("file:///tmp/x", 0, 2), InitializationError, "neither tcp://host:port nor env://"),
        ({}, ("tcp://h1:29500?rank=x", None, 2), LauncherEnvironmentError, "rank in init_method='x'"),
    ],
)
def test_mistakes_are_named(environment: dict[str, str], given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        place(environment, *given)
