"""The handles of groups whose ranks change: what is one, and which order of ranks follows from them."""

from __future__ import annotations

import pytest

from phalanx.c10d.reconfigurable import Handle, digest, ordered
from phalanx.errors import ArgumentError


def test_handle_is_read_as_it_was_written_and_nothing_else_is() -> None:
    for rank in (0, 7, 1023):
        handle = Handle.new(rank)
        assert Handle.parse(str(handle)) == handle
        assert Handle.new(rank) != handle
    wrong = ["", "phalanx:0:12", "phalanx:-1:0123456789abcdef", "phalanx:01:0123456789abcdef"]
    wrong += ["phalanx:1:0123456789ABCDEF", "phalanx:1:0123456789abcdef\n", "gloo:1:-1:1:", "x" * 1_000_000]
    for text in wrong:
        with pytest.raises(ArgumentError, match="is not a handle of a group of Phalanx") as caught:
            Handle.parse(text)
        assert len(str(caught.value)) < 300


def test_list_keeps_its_order_and_a_set_is_sorted_by_rank() -> None:
    handles = [Handle.new(rank) for rank in (10, 2, 2, 0)]
    texts = [str(handle) for handle in handles]
    assert ordered(texts) == handles
    assert ordered(set(texts)) == sorted(handles)
    assert [handle.rank for handle in ordered(set(texts))] == [0, 2, 2, 10]
    assert digest(handles) == digest(ordered(texts))
    assert len({digest(handles[:2]), digest(handles[1::-1]), digest(handles[:1])}) == 3
    with pytest.raises(ArgumentError, match="got no handle"):
        ordered([])
    with pytest.raises(ArgumentError, match=f"{texts[0]} is listed twice"):
        ordered([texts[1], texts[0], texts[0]])
