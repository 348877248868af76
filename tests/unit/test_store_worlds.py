"""A child that is forked from a rank has connections of its own to the store that rank 0 serves."""

from __future__ import annotations

import os

from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks

from phalanx.membership.client import JobStore
from phalanx.membership.rendezvous import leave, meet
from phalanx.topology.place import Place


def test_forked_child_has_connections_of_its_own() -> None:
    """A worker of a data loader inherits the parent's descriptors; neither may read the other's answers."""

    def body(member: Member) -> None:
        at = {"master_addr": "127.0.0.1", "master_port": port}
        store = meet(Place("env", member.rank, member.size, None, None, None, None, **at), 60.0, 1)  # type: ignore[arg-type]
        assert isinstance(store, JobStore)
        store.set(f"rank {member.rank}", "before")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for number in range(200):
                    store.set(f"child {member.rank}", str(number))
                    assert store.get(f"child {member.rank}") == str(number).encode()
                code = 0
            finally:
                os._exit(code)
        for number in range(200):
            store.set(f"parent {member.rank}", str(number))
            assert store.get(f"parent {member.rank}") == str(number).encode()
        assert os.waitpid(pid, 0)[1] == 0
        store.set(f"done {member.rank}", "")
        store.wait(["done 0", "done 1"])
        leave(store)
        if member.rank == 0:
            store._server.loop.thread.join(20)  # type: ignore[union-attr] # this process ends without its exit handlers

    with held_port() as port:
        on_ranks(body, 2)
