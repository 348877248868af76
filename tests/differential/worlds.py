"""Running programs in worlds of forked ranks: many in one world, and a fresh world after one that broke its own."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.program import PROGRAMS, SERVED_HERE, Program, Raised
from tests.differential.values import difference, plain
from tests.support.islands import pretend_host
from tests.support.pool import Pool
from tests.support.ranks import Member

__all__ = ["BETWEEN_HOSTS", "differences"]

# In place of a backend's name: Phalanx in a world whose ranks take themselves for ranks of two hosts.
BETWEEN_HOSTS = "phalanx over two hosts"

# For one operation, and for one program: a busy machine needs neither; a program that hangs is reported after this.
GROUP_TIMEOUT_S = 60.0
PATIENCE_S = 120.0
# Gloo's ranks sometimes fail to connect to each other, when a port that one has read is not listened on any more.
ATTEMPTS = 3
UNCONNECTED = "Gloo connectFullMesh failed"


class Broke(str):
    """How a program ended that did not return on every rank: the error, the signal, or every rank's stacks."""


def differences(backend: str, size: int, programs: Sequence[Program]) -> list[str]:
    """Run the programs on ``size`` ranks over Gloo and over a backend; a text for each that is not as declared."""
    expected, found = (run_programs(each, size, programs) for each in ("gloo", backend))
    texts = {program.name: verdict(program, expected[program.name], found[program.name]) for program in programs}
    return [f"{name}: {text}" for name, text in texts.items() if text]


def verdict(program: Program, expected: list[Any] | Broke, value: list[Any] | Broke) -> str:
    """Say what is wrong; empty if the outcomes are equal, or differ as declared."""
    if isinstance(expected, Broke) and not program.differs:
        return f"over Gloo the program fails itself: {expected}"
    if isinstance(value, Broke):
        return f"over Gloo it returns {expected}, here {value}"
    if program.differs == SERVED_HERE and any(isinstance(of_rank, Raised) for of_rank in value):
        return f"it is to be served here, and is refused: {value}"
    if program.differs:
        if isinstance(expected, Broke) or difference(expected, value, program.tolerance):
            return ""
        return f"the values are equal by now: take the entry {program.differs!r} away"
    return difference(expected, value, program.tolerance, "by rank, the value")


def run_programs(backend: str, size: int, programs: Sequence[Program]) -> dict[str, list[Any] | Broke]:
    """By name, what each rank returned, or how the program broke."""
    outcomes: dict[str, list[Any] | Broke] = {}
    shared = [program for program in programs if not program.alone]
    alone = [[program] for program in programs if program.alone]
    for together in [shared, *alone] if shared else alone:
        with Pool(size, _JOIN[backend], PATIENCE_S) as ranks:
            outcomes |= {program.name: _run(ranks, program) for program in together}
    return outcomes


def _run(ranks: Pool, program: Program) -> list[Any] | Broke:
    for _ in range(ATTEMPTS):
        try:
            return [pickle.loads(value) for value in ranks.do(_perform, program.name)]
        except AssertionError as error:
            broke = Broke(error)
            if UNCONNECTED not in broke:
                break
    return broke


def _perform(member: Member, name: str) -> bytes:
    torch.manual_seed(0)
    program = PROGRAMS[name]
    value = plain(program.run(member))
    if not program.alone:
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    return pickle.dumps(value)


def _join_gloo(member: Member) -> Member:
    member.join("gloo", GROUP_TIMEOUT_S)
    return member


def _join_phalanx(member: Member) -> Member:
    member.join("phalanx", GROUP_TIMEOUT_S)
    return member


def _join_two_hosts(member: Member) -> Member:
    pretend_host(2 * member.rank // member.size)
    return _join_phalanx(member)


_JOIN = {"gloo": _join_gloo, "phalanx": _join_phalanx, BETWEEN_HOSTS: _join_two_hosts}
