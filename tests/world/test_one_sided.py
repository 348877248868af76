"""One-sided transfers between processes of one host: torch's transports, which torch has from 2.15 on."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from torch._C._distributed_c10d import PrefixStore

from phalanx.errors import ArgumentError, DeviceMismatch, InitializationError, PeerLost

if importlib.util.find_spec("torch.distributed._transport") is None:
    pytest.skip("torch has transports from 2.15 on", allow_module_level=True)

from torch.distributed._transport import available_transports, new_transport, new_transport_rank

from phalanx.c10d.one_sided import PIECE_BYTES
from phalanx.c10d.one_sided_memory import RemoteMemory


def test_ranks_read_and_write_each_others_tensors() -> None:
    """Every pair of ranks; more than one piece; a part of a tensor; tensors of any dtype."""
    size, count = 3, PIECE_BYTES // 4 + 1000
    assert "phalanx" in available_transports()

    def body(member: Member) -> bool:
        member.join(backend="gloo")
        for peer in range(size):
            if peer == member.rank:
                continue
            transport = new_transport_rank("phalanx", "cpu", peer_rank=peer)
            own = torch.full((count,), float(member.rank))
            inbox = torch.zeros(4, dtype=torch.int64)
            store = PrefixStore(f"{min(peer, member.rank)}-{max(peer, member.rank)}", member.store("memory"))
            for name, tensor in (("own", own), ("inbox", inbox)):
                described = transport.register_memory(tensor).to_remote_buffer().serialize()
                store.set(f"{name}/{member.rank}", described.hex())
            remote = {
                name: RemoteMemory.deserialize(bytes.fromhex(store.get(f"{name}/{peer}").decode()))
                for name in ("own", "inbox")
            }
            found = torch.zeros(count)
            assert transport.read(transport.register_memory(found).to_mutable_view(), remote["own"]) == 0
            assert found.unique().tolist() == [float(peer)]
            sent = torch.tensor([7, 10 + member.rank, 20 + member.rank, 7])
            assert transport.write(transport.register_memory(sent).to_view(8, 16), remote["inbox"]) == 0
            store.set(f"written/{member.rank}", "")
            store.wait([f"written/{peer}"])
            assert inbox.tolist() == [10 + peer, 20 + peer, 0, 0]
            store.set(f"done/{member.rank}", "")
            store.wait([f"done/{peer}"])
            transport.close()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


def test_peer_that_has_ended_is_named() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        transport, tensor = new_transport("phalanx"), torch.full((8,), 3.0)
        described = transport.register_memory(tensor).to_remote_buffer().serialize()
        os.write(writer, transport.bind() + b"\n" + described + b"\n")
        signal.pause()
    with os.fdopen(reader, "rb") as pipe, new_transport("phalanx") as here:
        found = torch.zeros(8)
        local = here.register_memory(found).to_mutable_view()
        here.connect(pipe.readline().strip())
        remote = RemoteMemory.deserialize(pipe.readline().strip())
        here.read(local, remote)
        assert found.tolist() == [3.0] * 8
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writer)
        with pytest.raises(PeerLost, match=f"process {child}") as caught:
            here.read(local, remote)
        assert caught.value.pid == child


def test_mistakes_are_told() -> None:
    with new_transport("phalanx", "cpu") as here, new_transport("phalanx") as there:
        here.connect(there.bind())
        there.connect(here.bind())
        small, large = torch.zeros(4), here.register_memory(torch.zeros(8)).to_view()
        at_peer = there.register_memory(small)
        remote = RemoteMemory.deserialize(at_peer.to_remote_buffer().serialize())
        with pytest.raises(ArgumentError, match="32 bytes do not fit in the peer's memory, which has 16"):
            here.write(large, remote)
        with pytest.raises(ArgumentError, match="was not registered by this transport"):
            here.write(at_peer.to_view(), remote)
        with pytest.raises(InitializationError, match="connected already"):
            here.connect(there.bind())
        with pytest.raises(DeviceMismatch):
            here.register_memory(torch.zeros(4, device="meta"))
