"""What a rank reads of the others, in a group over several hosts that has broken."""

from __future__ import annotations

import json
import threading

import pytest
from torch._C._distributed_c10d import HashStore

from phalanx.transports.hosts import whereabouts
from phalanx.transports.hosts.asking import Questions
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.whereabouts import Whereabouts

OWN, PLACE, CALL = (1, "broadcast(src=0)", ""), (0, "train.py:7", ""), (1, "broadcast(src=1)", "")


def gathered(monkeypatch: pytest.MonkeyPatch, *, with_later_calls: bool) -> whereabouts.Found:
    """What rank 0 finds if rank 1 says where it is, and then comes to a call."""
    store = HashStore()
    store.set("place/1", json.dumps(PLACE))
    monkeypatch.setattr(whereabouts, "PROMPT_S", 60.0 if with_later_calls else 0.5)
    monkeypatch.setattr(whereabouts, "PATIENCE_S", 60.0)
    comes = threading.Timer(0.1, lambda: store.set("call/1", json.dumps(CALL)))
    comes.start()
    questions = Questions()
    try:
        return Whereabouts(store, 0, Layout([0, 1], 0), [1, 2], questions).gather(
            OWN, with_later_calls=with_later_calls
        )
    finally:
        comes.join()
        questions.close(lambda: None)


def test_of_calls_that_differ_that_of_a_rank_that_comes_a_moment_later_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = gathered(monkeypatch, with_later_calls=True).mismatch(1)
    assert error.calls == {0: "broadcast(src=0)", 1: "broadcast(src=1)"}
    assert "rank 1: broadcast(src=1)" in str(error)
    assert "in no collective" not in str(error)


def test_a_rank_that_comes_after_the_timeout_was_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gathered(monkeypatch, with_later_calls=False)
    assert found.behind(1) == {1: "at train.py:7"}
