"""The keys by which the ranks of a group over hosts meet: none goes before the slowest rank has read it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from itertools import count

import pytest
import torch
import torch.distributed as dist
from tests.support.interrupted import Interrupted
from tests.support.islands import OWN_KEYS, pretend_host
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon

from phalanx.c10d.create import create_process_group
from phalanx.errors import InitializationError

PATIENCE, SHORT = timedelta(seconds=200), timedelta(seconds=0.2)
LAG_S = 0.1  # by which one rank is slower than the others; it matters only for what the test can find
# The keys by which ranks agree on a segment, which rank 0 deletes itself: it has what it asked for, or all have looked.
OF_SEGMENT = ("offer", "answer/", "outcome")
# A rank's own addresses in engines. It deletes that of one which is not chosen when all have measured it.
ADDRESSES = ("lanes/0/{}", "ucx/ucx/{}")
MEASURED = "/times/times"
# Each rank writes one of these when it has come to the last step, and waits for those of all.
LAST_STEP = "/broken/lookout/"


def is_of_group(key: str) -> bool:
    return "pretended/" not in key


class Meeting:
    """One rank's attempts to make a group of the same name in the same store."""

    def __init__(self, member: Member) -> None:
        self.member, self.attempts = member, 0
        self.store = Interrupted(member.store(), counts=is_of_group)
        pretend_host(member.rank % 2)

    def make(self, timeout: timedelta = PATIENCE) -> dist.ProcessGroup:
        self.attempts += 1
        ranks = range(self.member.size)
        return create_process_group(self.store, self.member.rank, len(ranks), timeout, "same", ranks)

    def use(self, group: dist.ProcessGroup) -> None:
        tensor = torch.full((100,), float(self.member.rank + 1))
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [float(sum(range(1, self.member.size + 1)))] * 100

    def check_another(self) -> None:
        """A group of the same name works, and leaves no keys."""
        member = self.member
        member.meet(f"before {self.attempts}")
        before = self.store.num_keys()
        member.meet(f"counted {self.attempts}")
        group = self.make()
        self.use(group)
        member.meet(f"used {self.attempts}")
        group.shutdown()
        own = member.size * OWN_KEYS
        assert soon(lambda: self.store.num_keys() <= before + own)
        member.meet(f"left {self.attempts}")


Log = list[tuple[str, tuple[str, ...]]]


def last_step(log: Log, rank: int) -> int:
    """When this rank has said that it has come to the last step."""
    return next(at for at, (name, keys) in enumerate(log) if name == "set" and keys[0].endswith(f"{LAST_STEP}{rank}"))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_keys_are_deleted_when_all_have_come_to_the_last_step(size: int) -> None:
    """Shown of what each rank asks in which order, so whatever the time between two requests."""

    def body(member: Member) -> tuple[Log, int]:
        meeting = Meeting(member)
        group = meeting.make()
        made = len(meeting.store.log)
        meeting.use(group)
        member.meet("used")
        group.shutdown()
        return meeting.store.log, made

    found = on_ranks(body, size)
    cleared = set[str]()
    for rank, (log, made) in enumerate(found):
        said = last_step(log, rank)
        knows = next(at for at in range(said, made) if log[at][0] == "get" and LAST_STEP in log[at][1][0])
        assert len(log[knows][1]) == size  # it has waited for those of all ranks
        own = tuple(f"/{key.format(rank)}" for key in ADDRESSES)
        for at, (name, keys) in enumerate(log[:knows]):
            of_segment = any(f"/{key}" in keys[0] for key in OF_SEGMENT)
            unchosen = keys[0].endswith(own) and any(MEASURED in keys[0] for name, keys in log[:at] if name == "get")
            assert name != "delete" or of_segment or unchosen, keys
        cleared |= {keys[0] for name, keys in log[knows:made] if name == "delete"}
    assert cleared
    for rank, (log, _) in enumerate(found):
        said = last_step(log, rank)
        read_before = {key for name, keys in log[:said] if name != "delete" for key in keys}
        read_after = {key for name, keys in log[said:] if name != "delete" for key in keys}
        assert cleared & read_before
        assert not cleared & read_after


def in_turns(member: Member, victims: range, attempt: Callable[[Meeting, bool], None], step: int = 1) -> None:
    """Make an attempt for each request of each victim, or each so many, which does something else before it."""
    meeting = Meeting(member)
    for victim in victims:
        for request in count(step=step):
            is_victim = member.rank == victim
            meeting.store.requests_until = request if is_victim else -1
            attempt(meeting, is_victim)
            turn = f"turn {victim} {request}"
            if is_victim and meeting.store.requests_until >= 0:
                member.say(f"over {turn}")  # it had fewer requests
            meeting.store.requests_until = -1
            member.meet(turn)
            if (member.folder / f"over {turn}").exists():
                assert request > 5
                break


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_slow_before_any_of_its_requests_finds_every_key(size: int) -> None:
    """Slower than the others, which go on meanwhile as far as they can."""

    def body(member: Member) -> None:
        def attempt(meeting: Meeting, is_victim: bool) -> None:
            made = f"made {meeting.attempts}"

            def others_go_on() -> None:
                soon(lambda: all((member.folder / f"{made} {rank}").exists() for rank in others), LAG_S)

            others = [rank for rank in range(size) if rank != member.rank]
            meeting.store.something = others_go_on
            group = meeting.make()
            member.say(f"{made} {member.rank}")
            meeting.use(group)
            group.shutdown()

        in_turns(member, range(0, size, size - 1), attempt)
        Meeting(member).check_another()

    on_ranks(body, size)


class Fault(Exception):
    """What happens to a rank while it makes a group."""


@pytest.mark.parametrize(("size", "step"), [(2, 2), (3, 5), pytest.param(3, 1, marks=pytest.mark.long)])
def test_a_group_whose_making_failed_on_one_rank_can_be_made_in_the_same_store(size: int, step: int) -> None:
    """Before whichever of its requests it failed, and whether or not the others came to an end by then."""

    def body(member: Member) -> None:
        def fail() -> None:
            raise Fault

        def attempt(meeting: Meeting, is_victim: bool) -> None:
            meeting.store.something = fail
            with contextlib.suppress(Fault, InitializationError, RuntimeError):
                meeting.make(SHORT).shutdown()  # that this may be too short for a busy machine is as good a failure
            member.meet(f"tried {meeting.attempts}")
            left, meeting.store.requests_until = meeting.store.requests_until, -1
            meeting.check_another()
            meeting.store.requests_until = left

        in_turns(member, range(0, size, size - 1), attempt, step)

    on_ranks(body, size)
