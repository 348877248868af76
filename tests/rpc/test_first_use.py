"""What a worker can do from the moment when others can find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from phalanx import rpc
from phalanx.errors import PhalanxError
from phalanx.rpc import session
from phalanx.rpc.members import Members
from tests.support.ranks import Member, on_ranks


def test_a_worker_that_can_be_found_can_make_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may call it before its own ``rpc.init()`` has returned, and what is called may call in turn."""
    join = Members.join
    found: list[str] = []

    def join_and_look(members: Members, me: Any, is_there: Callable[[Any], Any]) -> None:
        join(members, me, is_there)
        found.append(session.agent().me.name)

    monkeypatch.setattr(Members, "join", join_and_look)

    def body(member: Member) -> tuple[str, list[str]]:
        member.join()
        me = rpc.init()
        rpc.shutdown()
        return me.name, found

    for name, names in on_ranks(body, 2):
        assert names == [name]


def test_a_worker_that_could_not_join_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PhalanxError("the store does not answer")

    def body(member: Member) -> bool:
        member.join()
        with monkeypatch.context() as patch:
            patch.setattr(Members, "join", fail)
            with pytest.raises(PhalanxError, match="does not answer"):
                rpc.init()
        is_none = session.current() is None
        rpc.init()  # and may try again
        rpc.shutdown()
        return is_none

    assert on_ranks(body, 2) == [True, True]
