"""How a tensor is cut into the parts that travel between hosts one after the other."""

from __future__ import annotations

import pytest
import torch

from phalanx.transports.hosts.sizes import in_chunks


@pytest.mark.parametrize("chunk_bytes", [1, 4, 8, 100, 4096])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 100, 1023, 1024, 1025, 5000])
def test_chunks_are_the_whole_tensor_in_order(count: int, chunk_bytes: int) -> None:
    flat = torch.arange(count, dtype=torch.float32)
    parts = in_chunks(flat, chunk_bytes)
    assert torch.equal(torch.cat(parts), flat)
    assert all(part.numel() for part in parts)
    assert [part.numel() for part in parts] == [part.numel() for part in in_chunks(flat.clone(), chunk_bytes)]


@pytest.mark.parametrize("count", [4097, 10_000, 1_000_003])
def test_the_first_and_the_last_are_short(count: int) -> None:
    first, *middle, last = (part.nbytes for part in in_chunks(torch.empty(count), 4096))
    assert first == last == 2048
    assert max(middle) <= 2 * 4096 + 256  # those between begin at cache lines


def test_no_elements_are_one_chunk() -> None:
    assert [part.numel() for part in in_chunks(torch.empty(0), 4096)] == [0]
