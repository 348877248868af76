"""How a group comes about, or does not, when a rank cannot do its part of it; and what is left then."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.leaks import descriptors
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks, run_ranks
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

import phalanx
from phalanx import world
from phalanx.c10d import create
from phalanx.c10d.create import create_process_group
from phalanx.errors import DeviceError, InitializationError
from phalanx.topology.topology import gather
from phalanx.transports.hosts.choosing import Chosen
from phalanx.transports.hosts.guard import Guard
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.segment import NotOneHost

SOON = timedelta(seconds=20)


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:phalanx (" in line for line in maps)  # segments, and no recorder


def leave_no_room() -> None:
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 20), resource.RLIM_INFINITY))


def forbid_memfds() -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    pytest.MonkeyPatch().setattr(os, "memfd_create", refuse)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("hinder", "words"),
    [
        (leave_no_room, "rank 0: Cannot allocate memory"),
        (forbid_memfds, "rank 0: Operation not permitted (memfd_create)"),
    ],
)
def test_when_rank_0_has_no_segment_all_ranks_learn_it_alike(hinder: Callable[[], None], words: str, size: int) -> None:
    def body(member: Member) -> tuple[str, int]:
        store = member.store()
        if member.rank == 0:
            hinder()
        with pytest.raises(NotOneHost) as caught:
            SharedMemoryCommunicator(store, member.rank, member.size, SOON)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(caught.value), mapped()

    assert on_ranks(body, size) == [(words, 0)] * size


@pytest.mark.filterwarnings("ignore:backend 'phalanx'")
def test_a_group_without_a_segment_works_over_gloo() -> None:
    def body(member: Member) -> list[float]:
        if member.rank == 0:
            forbid_memfds()
        member.join()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor.tolist()

    assert on_ranks(body, 3) == [[3.0, 3.0]] * 3


def test_too_many_ranks_are_told_so() -> None:
    class AllHaveAnswered(PrefixStore):
        def wait(self, *_: Any) -> None:
            return None

        def compare_set(self, key: str, *_: Any) -> bytes:
            return b'["", ""]'

    with pytest.raises(NotOneHost, match="a shared segment serves at most 1024 ranks, not 1025"):
        SharedMemoryCommunicator(AllHaveAnswered("x", HashStore()), 0, 1025, SOON)


class Lost(PrefixStore):
    """A store that is lost once the ranks have attached: neither the answers nor the outcome can be read."""

    def wait(self, keys: list[str], *limits: Any) -> None:
        if keys[0].endswith("/outcome"):
            raise RuntimeError("the store is gone")
        super().wait(keys, *limits)
        if keys != ["offer"]:
            raise RuntimeError("the store is gone")

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("the store is gone")

    def delete_key(self, key: str) -> bool:
        if "/answer/" in key:
            raise RuntimeError("the store is gone")
        return super().delete_key(key)


def not_made(*_: Any) -> None:
    raise RuntimeError("not made")


@pytest.mark.parametrize("size", [2, 3])
def test_a_meeting_that_fails_leaves_nothing_mapped(size: int) -> None:
    def body(member: Member) -> tuple[int, int, int]:
        def held() -> tuple[int, int]:
            return mapped(), len(os.listdir("/proc/self/fd"))

        store = member.store()
        before = held()
        with pytest.raises(RuntimeError, match="the store is gone"):
            SharedMemoryCommunicator(Lost("x", store), member.rank, member.size, SOON)
        after = held()
        pytest.MonkeyPatch().setattr(create, "quicken", not_made)
        with pytest.raises(RuntimeError, match="not made"):
            create_process_group(store, member.rank, member.size, SOON, "group", [])
        return after[0] - before[0], after[1] - before[1], mapped() - before[0]

    assert on_ranks(body, size) == [(0, 0, 0)] * size


def test_all_ranks_together_have_the_timeout_to_come() -> None:
    """Rank 1 comes when the time runs already, and waits until that is over, not for a time of its own."""

    def body(member: Member) -> float:
        store, timeout_s = member.store(), 10.0 if member.rank == 0 else 250.0
        if member.rank == 1:
            store.wait(["offer"], timedelta(seconds=200))
        started = time.monotonic()
        if member.rank < 2:
            with pytest.raises(InitializationError, match="rank 2 did not come"):
                SharedMemoryCommunicator(store, member.rank, 3, timedelta(seconds=timeout_s))
        return time.monotonic() - started

    assert max(on_ranks(body, 3)) < 125


def test_every_rank_that_did_not_come_is_named() -> None:
    def body(member: Member) -> bool:
        if member.rank == 0:
            with pytest.raises(InitializationError, match="ranks 1, 2 did not come"):
                SharedMemoryCommunicator(member.store(), 0, 3, timedelta(seconds=0.2))
        return True

    assert on_ranks(body, 3) == [True] * 3


def attempt(member: Member, store: Store, timeout_s: float) -> float:
    group = create_process_group(store, member.rank, member.size, timedelta(seconds=timeout_s), "group", [])
    tensor = torch.ones(1)
    group.allreduce([tensor])
    group.shutdown()
    return tensor.item()


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("failures", [1, 2])
def test_a_rank_that_missed_failed_attempts_joins_the_next(late: int, failures: int) -> None:
    def body(member: Member) -> list[float]:
        store = member.store()
        if member.rank != late:
            for _ in range(failures):
                with pytest.raises(InitializationError):
                    attempt(member, store, 0.3)
            member.say(f"failed-{member.rank}")
        # All do: a rank that is ahead would come to an attempt of rank 0 that fails.
        member.await_said(*(f"failed-{rank}" for rank in {0, 1, 2} - {late}))
        return [attempt(member, store, 20) for _ in range(3)]

    assert on_ranks(body, 3) == [[3.0, 3.0, 3.0]] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_an_offer_that_is_taken_back_before_it_is_read_is_no_offer(size: int) -> None:
    def body(member: Member) -> str:
        class Slow(PrefixStore):
            def wait(self, keys: list[str], *limits: Any) -> None:
                super().wait(keys, *limits)
                if keys == ["offer"]:
                    member.say(f"has-waited-{member.rank}")
                    member.await_said("taken-back")

        store = member.store()
        store.set_timeout(timedelta(seconds=3))
        with pytest.raises(InitializationError) as caught:
            if member.rank == 0:
                member.await_said(*(f"comes-{rank}" for rank in range(1, size)))
                SharedMemoryCommunicator(PrefixStore("x", store), 0, size, timedelta(seconds=5))
            else:
                member.say(f"comes-{member.rank}")
                SharedMemoryCommunicator(Slow("x", store), member.rank, size, timedelta(seconds=20))
        if member.rank == 0:
            member.await_said(*(f"has-waited-{rank}" for rank in range(1, size)))
            member.say("taken-back")
        return str(caught.value)

    for text in on_ranks(body, size)[1:]:
        assert text.startswith(f"rank 0 did not come to a group of {size} ranks within "), text


@pytest.mark.parametrize("size", [3, 5])
def test_a_rank_that_gave_up_comes_again_while_rank_0_still_waits(size: int) -> None:
    """The last rank comes when all but rank 0 have given up, and some have not come again yet."""

    def body(member: Member) -> list[float]:
        store, middle = member.store(), range(1, size - 1)
        if member.rank in middle:
            with pytest.raises(InitializationError, match="rank 0 did not finish"):
                attempt(member, store, 0.3)
            member.say(f"failed-{member.rank}")
        if member.rank == 1:
            member.await_said("came-again")
        if member.rank == size - 1:
            member.await_said(*(f"failed-{rank}" for rank in middle))
            member.say("came-again")
        return [attempt(member, store, 60) for _ in range(2)]

    assert on_ranks(body, size) == [[float(size)] * 2] * size


@pytest.mark.parametrize("size", [2, 3])
def test_the_end_of_rank_0_while_the_others_use_its_store_is_an_error_of_init(size: int) -> None:
    def body(member: Member) -> str:
        (member.folder / f"pid-{member.rank}").write_text(str(os.getpid()))

        def later(*arguments: Any) -> Any:
            (member.folder / f"met-{member.rank}").touch()
            while not all((member.folder / f"met-{rank}").exists() for rank in range(size)):
                time.sleep(0.01)
            if member.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            pid = int((member.folder / "pid-0").read_text())
            while "Z" not in (Path(f"/proc/{pid}/stat").read_text() if Path(f"/proc/{pid}").exists() else "Z"):
                time.sleep(0.01)
            return gather(*arguments)

        pytest.MonkeyPatch().setattr(world, "gather", later)
        with pytest.raises(InitializationError) as caught:
            phalanx.init(
                quiet=True, init_method=f"tcp://127.0.0.1:{port}", rank=member.rank, world_size=size, timeout_s=60
            )
        return str(caught.value)

    with held_port() as port:
        outcomes = run_ranks(body, size)
    assert outcomes[0].signal == signal.SIGKILL
    for outcome in outcomes[1:]:
        assert "rank 0" in (outcome.value or ""), outcome.traceback


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_failed_at_different_steps_meet_at_the_next_attempt(size: int) -> None:
    """The last rank asks for a device that it has not, before it makes a group; the others fail when they make it."""

    def body(member: Member) -> list[int]:
        def join(device: str) -> phalanx.World:
            where = f"tcp://127.0.0.1:{port}"
            return phalanx.init(
                device=device, timeout_s=60, quiet=True, init_method=where, rank=member.rank, world_size=size
            )

        with pytest.raises(DeviceError if member.rank == size - 1 else InitializationError):
            join("nonsense" if member.rank == size - 1 else "cpu")
        world = join("cpu")
        met: list[int] = world.all_gather_object(member.rank)
        phalanx.close()
        return met

    with held_port() as port:
        assert on_ranks(body, size) == [list(range(size))] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("victim", ["first", "last"])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_goes_while_the_ranks_meet_is_told_to_the_others_at_once(
    how: str, victim: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all have joined the store, and before the group is made: as when a device cannot be opened."""
    lost = 0 if victim == "first" else size - 1
    told = [f"told-{rank}" for rank in range(size) if rank != lost]

    def body(member: Member) -> tuple[str, float]:
        for name, value in {"RANK": member.rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_PORT", str(port))
        if member.rank == lost:

            def fail(device: torch.device, rank: int) -> None:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the device is on fire")

            monkeypatch.setattr("phalanx.topology.device.open_device", fail)
            with contextlib.suppress(RuntimeError):
                phalanx.init(timeout_s=100, device="cpu", quiet=True)
            member.await_said(*told)  # its process goes on
            return "", 0.0
        started = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            phalanx.init(timeout_s=100, device="cpu", quiet=True)
        took_s = time.monotonic() - started
        member.say(f"told-{member.rank}")
        member.await_said(*told)  # a rank that comes later would find this one gone
        return str(caught.value), took_s

    with held_port() as port:
        outcomes = run_ranks(body, size)
    for outcome in outcomes:
        if outcome.rank != lost:
            assert outcome.error is None, outcome.traceback
            text, took_s = outcome.value
            assert f"rank {lost} (" in text or (lost == 0 and "rank 0 has ended" in text), text
            assert took_s < 50  # not the timeout


@pytest.mark.parametrize(("where", "step"), [(create, "choose_engine"), (Guard, "_meet"), (create, "quicken_messages")])
def test_nothing_stays_of_a_group_over_hosts_that_cannot_be_made(where: object, step: str) -> None:
    """Its error may be kept, and with it whatever its frames hold."""

    def body(member: Member) -> tuple[int, list[str], int]:
        pretend_host(member.rank // 2)
        first = create_process_group(member.store(), member.rank, member.size, SOON, "first", [])
        first.shutdown()
        make = getattr(where, step)

        def fail(*arguments: Any, **options: Any) -> None:
            if isinstance(made := make(*arguments, **options), Chosen):
                made.engine.close()
            raise InitializationError("a rank has gone")

        before, threads = descriptors(), set(threading.enumerate())
        with pytest.MonkeyPatch().context() as patch:
            patch.setattr(where, step, fail)
            with pytest.raises(InitializationError, match="a rank has gone") as kept:
                create_process_group(member.store(), member.rank, member.size, SOON, "second", [])
        until = time.monotonic() + 20
        while set(threading.enumerate()) - threads and time.monotonic() < until:
            time.sleep(0.05)  # those that have heard that they end
        assert kept.value
        return mapped(), sorted(set(descriptors()) - set(before)), len(set(threading.enumerate()) - threads)

    assert on_ranks(body, 4) == [(0, [], 0)] * 4


@pytest.mark.parametrize("several", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize(("size", "other"), [(2, 3), (3, 5)])
def test_processes_that_disagree_on_the_worlds_size_compute_nothing_together(
    size: int, other: int, several: bool
) -> None:
    """As when one of them has an old WORLD_SIZE: their sums would have too few terms on some, and say nothing."""

    def body(member: Member) -> str:
        if several:
            pretend_host(member.rank % 2)
        member.meet("all are there")  # else one could miss the others anyway
        said = other if member.rank == size - 1 else size
        with pytest.raises(InitializationError) as caught:
            dist.init_process_group(
                "phalanx", store=member.store(), rank=member.rank, world_size=said, timeout=timedelta(seconds=200)
            )
        return str(caught.value)

    # Those that have not found it themselves hear of it as the fault of one of their size that has.
    assert [text for text in on_ranks(body, size) if "came with WORLD_SIZE" not in text] == []
