"""Equal calls that do not belong together, in groups over several hosts. And programs that are right."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest
import torch.distributed as dist
from tests.support.call_programs import MISTAKES, RIGHT, Program
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, on_ranks, run_ranks

from phalanx.errors import CollectiveMismatch

PLACES = [("cyclic", 2), ("halves", 3), ("cyclic", 5)]
HOSTS = 2


def name_of(program: Program) -> str:
    return program.__name__


@pytest.mark.parametrize(("where", "size"), PLACES)
@pytest.mark.parametrize("program", MISTAKES, ids=name_of)
def test_a_mistake_is_warned_of_by_a_rank_or_two(
    monkeypatch: pytest.MonkeyPatch, program: Program, where: str, size: int
) -> None:
    divide_by(monkeypatch, ISLANDS[where])

    def body(member: Member) -> str:
        member.join()
        # The numbers of calls may differ in the end.
        with contextlib.redirect_stderr(io.StringIO()) as text, contextlib.suppress(RuntimeError):
            program(member)
        return text.getvalue()

    told = [text for text in on_ranks(body, size) if text]
    assert 1 <= len(told) <= HOSTS, told
    for warning in told:
        assert warning.startswith("phalanx: warning: ranks ")
        assert warning.count("call_programs.py:") == 2
        assert warning.count("\n") <= 12


@pytest.mark.parametrize(("where", "size"), PLACES)
@pytest.mark.parametrize("program", RIGHT, ids=name_of)
def test_a_program_that_is_right_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, program: Program, where: str, size: int
) -> None:
    divide_by(monkeypatch, ISLANDS[where])

    def body(member: Member) -> str:
        os.environ["PHALANX_CALL_SITES"] = "error"
        member.join()
        with contextlib.redirect_stderr(io.StringIO()) as text:
            program(member)
            dist.barrier()
            dist.destroy_process_group()
        return text.getvalue()

    assert on_ranks(body, size) == [""] * size


@pytest.mark.parametrize(("where", "size"), PLACES)
@pytest.mark.parametrize("program", MISTAKES, ids=name_of)
def test_a_mistake_is_an_error_if_the_user_wants_that(
    monkeypatch: pytest.MonkeyPatch, program: Program, where: str, size: int
) -> None:
    divide_by(monkeypatch, ISLANDS[where])

    def body(member: Member) -> None:
        os.environ["PHALANX_CALL_SITES"] = "error"
        member.join(timeout_s=60)
        program(member)
        dist.barrier()  # a rank that has no other call to come to

    for outcome in run_ranks(body, size):
        assert isinstance(outcome.error, CollectiveMismatch), outcome.traceback
        text = str(outcome.error)
        assert "the ranks of a group called different operations" in text
        assert re.search(r"call_programs\.py:\d+ was call #\d+ of rank \d and #\d+ of rank \d", text), text


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_said_if_the_user_wants_that(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    divide_by(monkeypatch, ISLANDS["cyclic"])

    def body(member: Member) -> str:
        os.environ["PHALANX_CALL_SITES"] = "ignore"
        member.join()
        with contextlib.redirect_stderr(io.StringIO()) as text:
            MISTAKES[0](member)
        return text.getvalue()

    assert on_ranks(body, size) == [""] * size
