"""Which launcher started this process, and the place it was given: one row per launcher.

A launcher is recognised by a variable that only it sets; the most specific row comes first. Every value is
checked before it is believed, because a half-set environment (a shell that still exports RANK from yesterday)
otherwise ends as a hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError

__all__ = ["LAUNCHERS", "Launcher", "Place", "find_place"]


@dataclass(frozen=True)
class Place:
    """Where a process stands in its world, as its launcher says.

    Attributes:
        launcher: the name of the row that was recognised; ``none`` for a process started plainly.
        rank, world_size: place in the default group.
        local_rank, local_world_size: place among the ranks of the same host.
        node_rank, num_nodes: the host's index in the world.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1


@dataclass(frozen=True)
class Launcher:
    """One row of the table.

    Attributes:
        name: what ``world.launcher`` says.
        recognised: whether an environment comes from this launcher.
        rank, world_size, local_rank, local_world_size, node_rank, num_nodes: the variables it sets.
    """

    name: str
    recognised: Callable[[Mapping[str, str]], bool]
    rank: str = "RANK"
    world_size: str = "WORLD_SIZE"
    local_rank: str = "LOCAL_RANK"
    local_world_size: str = "LOCAL_WORLD_SIZE"
    node_rank: str = "GROUP_RANK"
    num_nodes: str = "GROUP_WORLD_SIZE"


def _phalanx(environment: Mapping[str, str]) -> bool:
    # `phalanx run` sets both to the same id. They differ when another launcher was started from one of its
    # ranks and handed on the outer variable; then the inner launcher is the one to believe.
    run_id = environment.get("PHALANX_RUN_ID")
    return bool(run_id) and run_id == environment.get("TORCHELASTIC_RUN_ID")


LAUNCHERS = (
    Launcher("phalanx", _phalanx),
    Launcher("torchrun", lambda environment: "TORCHELASTIC_RUN_ID" in environment),
)


def find_place(environment: Mapping[str, str] | None = None) -> Place:
    """Read this process's place from the environment; a world of one when no launcher is recognised.

    Args:
        environment: the variables to read; ``os.environ`` by default.

    Raises:
        LauncherEnvironmentError: a variable is missing, no number, or out of range; the message names it and
            its value.
    """
    if environment is None:
        environment = os.environ
    for launcher in LAUNCHERS:
        if launcher.recognised(environment):
            return _read(launcher, environment)
    stray = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if stray:
        shown = ", ".join(f"{name}={environment[name]!r}" for name in stray)
        raise LauncherEnvironmentError(
            f"{shown} is set, but no launcher that Phalanx knows: torchrun and `phalanx run` also set "
            f"TORCHELASTIC_RUN_ID. Start the script with `phalanx run -n N`, or unset {' and '.join(stray)}"
        )
    return Place()


def _read(launcher: Launcher, environment: Mapping[str, str]) -> Place:
    def number(variable: str) -> int:
        text = environment.get(variable)
        if text is None:
            raise LauncherEnvironmentError(
                f"{launcher.name} is recognised, but {variable} is not set; it sets it for every rank. "
                f"Was the environment passed on only in part?"
            )
        try:
            return int(text)
        except ValueError:
            raise LauncherEnvironmentError(f"{variable}={text!r} is no whole number") from None

    def place_in(rank_variable: str, size_variable: str) -> tuple[int, int]:
        rank, size = number(rank_variable), number(size_variable)
        if size < 1 or not 0 <= rank < size:
            raise LauncherEnvironmentError(
                f"{rank_variable}={rank} and {size_variable}={size} describe no rank: "
                f"there must be at least one, and they count from 0 to {size_variable} - 1"
            )
        return rank, size

    rank, world_size = place_in(launcher.rank, launcher.world_size)
    local_rank, local_world_size = place_in(launcher.local_rank, launcher.local_world_size)
    node_rank, num_nodes = place_in(launcher.node_rank, launcher.num_nodes)
    return Place(launcher.name, rank, world_size, local_rank, local_world_size, node_rank, num_nodes)
