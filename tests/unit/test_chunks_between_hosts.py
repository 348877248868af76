"""How a tensor is cut into the parts that travel between hosts one after the other, and what goes before them."""

from __future__ import annotations

from unittest.mock import Mock

import torch

from phalanx.transports.hosts.crossing import Lines
from phalanx.transports.hosts.frames import Frames
from phalanx.transports.hosts.sizes import in_chunks


def test_chunks_are_the_whole_tensor_in_order_and_the_first_and_last_are_short() -> None:
    for count in (0, 1, 2, 9, 1023, 5000, 10_000):
        flat = torch.arange(count, dtype=torch.float32)
        for chunk_bytes in (1, 4, 100, 4096):
            parts = in_chunks(flat, chunk_bytes)
            assert torch.equal(torch.cat(parts), flat)
            assert all(part.numel() for part in parts) or count == 0
    for count in (4097, 1_000_003):
        first, *middle, last = (part.nbytes for part in in_chunks(torch.empty(count), 4096))
        assert first == last == 2048
        assert max(middle) <= 2 * 4096 + 256  # those between begin at cache lines


def test_leader_hears_the_others_while_its_own_frame_is_on_its_way() -> None:
    """It may be for ever, behind what was sent before it in the same call."""
    engine = Mock(ends_waits_for_sends=True)
    engine.recv.side_effect = lambda memory, *_: Mock(wait=memory.zero_)
    frames = Frames(engine, [[0], [1]], 0, 64, Lines(0, {}, lambda: True))
    frames.begin(7, {})
    frames.end()
    assert not engine.send_kept.return_value.wait.called
