"""The handles of groups whose ranks change: what is one, and which order of ranks follows from them."""

from __future__ import annotations

import pytest

from phalanx.c10d.reconfigurable import digest, new_handle, ordered, rank_in
from phalanx.errors import ArgumentError


def test_handle_is_read_as_it_was_written_and_nothing_else_is() -> None:
    for rank in (0, 7, 1023):
        handle = new_handle(rank)
        assert rank_in(handle) == rank
        assert new_handle(rank) != handle
    wrong = ["", "phalanx:0:12", "phalanx:-1:0123456789abcdef", "phalanx:01:0123456789abcdef"]
    wrong += ["phalanx:1:0123456789ABCDEF", "phalanx:1:0123456789abcdef\n", "gloo:1:-1:1:", "x" * 1_000_000]
    for text in wrong:
        with pytest.raises(ArgumentError, match="is not a handle of a group of Phalanx") as caught:
            rank_in(text)
        assert len(str(caught.value)) < 300


def test_list_keeps_its_order_and_a_set_is_sorted_by_rank() -> None:
    handles = [new_handle(rank) for rank in (10, 2, 2, 0)]
    assert ordered(handles) == handles
    assert [rank_in(handle) for handle in ordered(set(handles))] == [0, 2, 2, 10]
    assert len({digest(handles[:2]), digest(handles[1::-1]), digest(handles[:1])}) == 3
    with pytest.raises(ArgumentError, match="got no handle"):
        ordered([])
    with pytest.raises(ArgumentError, match=f"{handles[0]} is listed twice"):
        ordered([handles[1], handles[0], handles[0]])
