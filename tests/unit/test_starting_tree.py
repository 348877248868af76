"""The tree in which the agents of many hosts are started: who starts whom."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.launch.remote.tree import FAN, starting_host


def test_the_head_starts_the_first_hosts_itself() -> None:
    assert [starting_host(number) for number in range(FAN)] == [None] * FAN


@pytest.mark.parametrize("hosts", [FAN + 1, 2 * FAN, FAN + FAN * FAN, 3 * FAN * FAN, 5000])
def test_every_other_host_is_started_by_one_that_comes_before_it(hosts: int) -> None:
    parents = [starting_host(number) for number in range(FAN, hosts)]
    assert all(parent is not None and parent < number for number, parent in enumerate(parents, FAN))
    # Each level is shared out evenly over the one before.
    shares = Counter(parents)
    assert max(shares.values()) <= FAN
    first_level = [shares[number] for number in range(FAN)]
    assert max(first_level) - min(first_level) <= 1
    depth = 0
    number: int | None = hosts - 1
    while number is not None:
        number = starting_host(number)
        depth += 1
    assert depth <= (2 if hosts <= FAN + FAN**2 else 4)
