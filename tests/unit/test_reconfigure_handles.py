"""The handles of groups whose ranks change: what is one, and which order of ranks follows from them."""

from __future__ import annotations

import pytest

from phalanx.c10d.reconfigure_handles import Handle, digest, ordered
from phalanx.errors import ArgumentError


def test_a_handle_is_read_as_it_was_written() -> None:
    for rank in (0, 7, 1023):
        handle = Handle.new(rank)
        assert Handle.parse(str(handle)) == handle
        assert Handle.new(rank) != handle


@pytest.mark.parametrize(
    "text",
    [
        "",
        "phalanx:0:12",
        "phalanx:-1:0123456789abcdef",
        "phalanx:01:0123456789abcdef",
        "phalanx:1:0123456789ABCDEF",
        "phalanx:1:0123456789abcdef\n",
        "phalanx:\u0661:0123456789abcdef",
        "gloo:1:-1:1:",
        "x" * 1_000_000,
    ],
)
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a handle of a group of Phalanx") as caught:
        Handle.parse(text)
    assert len(str(caught.value)) < 300


def test_a_list_keeps_its_order_and_a_set_is_sorted_by_rank() -> None:
    handles = [Handle.new(rank) for rank in (10, 2, 2, 0)]
    texts = [str(handle) for handle in handles]
    assert ordered(texts) == handles
    assert [handle.rank for handle in ordered(set(texts))] == [0, 2, 2, 10]
    assert ordered(set(texts)) == sorted(handles)


def test_the_digest_knows_the_members_and_their_order() -> None:
    first, second = Handle.new(0), Handle.new(1)
    assert digest([first, second]) == digest([first, second])
    assert len({digest([first, second]), digest([second, first]), digest([first])}) == 3


def test_none_and_one_twice_are_refused() -> None:
    with pytest.raises(ArgumentError, match="got no handle"):
        ordered([])
    handle = str(Handle.new(3))
    with pytest.raises(ArgumentError, match=f"{handle} is listed twice"):
        ordered([str(Handle.new(3)), handle, handle])
