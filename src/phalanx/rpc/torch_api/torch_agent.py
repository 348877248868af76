"""What stands in for ``TensorPipeAgent``: torch's methods of an agent, over Phalanx's."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.errors import ArgumentError, InitializationError, PhalanxError, RankError
from phalanx.rpc import session
from phalanx.rpc.agent import Agent, Member
from phalanx.rpc.future import Future
from phalanx.rpc.handlers import Handlers
from phalanx.rpc.torch_api import current, gathering
from phalanx.rpc.torch_api.references import References
from phalanx.rpc.torch_api.service import Service
from phalanx.rpc.torch_api.torch_names import cpp, registry
from phalanx.system.host import this_host
from phalanx.words import tell

__all__ = ["StoreGroup", "TensorPipeAgent", "check_device_maps"]

_LOOK_S = 0.01
_NAMES_S = 1800.0


def check_device_maps(maps: Mapping[str, Mapping[Any, Any]]) -> None:
    """Refuse device maps by which tensors would have to arrive on another device than they left.

    Raises:
        ArgumentError: one of them does.
    """
    for worker, devices in maps.items():
        for here, there in devices.items():
            if torch.device(here) != torch.device(there):
                raise ArgumentError(
                    f"the device map to {worker} leads from {here} to {there}, but tensors arrive on the device that "
                    f"they left. Map each device to itself, and move tensors in the function that is called"
                )


class TensorPipeAgent:
    """This process as a worker of torch's API. ``init_rpc`` makes one.

    Attributes:
        me: this worker.
        phalanx: the agent that moves the messages.
        references: the remote references of this process.
        pool: threads for the callbacks of futures.
        timeout_s: how long a call may take by default, in seconds; 0 for no limit.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        worker_id: int,
        world_size: int | None,
        opts: Any,
        reverse_device_maps: Any,
        devices: Any,
    ) -> None:
        cpp.WorkerInfo(name, worker_id)  # checks the name
        check_device_maps(opts.device_maps)
        self._store, self._options = store, opts
        self._world_size = world_size
        self._reverse_device_maps, self._devices = dict(reverse_device_maps), list(devices)
        self.timeout_s = float(opts.rpc_timeout)
        self._infos: dict[str, Any] = {}
        self.leaks: list[str] = []
        one_host = False
        _agree_on_membership(store, bool(world_size))
        group = StoreGroup(PrefixStore("phalanx", store), worker_id, world_size or 1)
        if world_size:
            self._infos, one_host = _meet_all(group, name, self.timeout_s)
        address = session.own_address(one_host=one_host)
        self.phalanx: Agent = session.begin(
            PrefixStore("phalanx", store), name, worker_id, address, self.timeout_s or float("inf")
        )
        self.me: Member = self.phalanx.me
        with contextlib.ExitStack() as begun:
            begun.callback(session.shutdown, wait=False)
            self.pool = Handlers()
            begun.callback(self.pool.close)
            self._lock = threading.Condition()
            self._calls = 0  # of this worker, under way
            self._joins = 0
            self.lost: set[str] = set()  # the names of workers that went without shutdown()
            self.phalanx.on_change(self._on_change)
            self.references = References(self.phalanx, worker_id)
            begun.callback(self.references.close)
            self._service = Service(self)
            if world_size:  # nobody calls a worker that is not in the directory yet, or serves nothing
                group.exchange("there", "", self.timeout_s)
            else:
                for member in self.phalanx.members():
                    self._infos[member.name] = cpp.WorkerInfo(member.name, member.rank)
            self._infos[name] = cpp.WorkerInfo(name, worker_id)
            begun.pop_all()

    # What torch asks

    def get_worker_info(self, who: Any = None) -> Any:
        """The name and number of a worker; of this one by default."""
        if who is None:
            return self._infos[self.me.name]
        if isinstance(who, cpp.WorkerInfo):
            return who
        if isinstance(who, str):
            found = self._infos.get(who)
        else:
            found = next((info for info in list(self._infos.values()) if info.id == who), None)
        if found is None:
            raise RankError(f"could not find destination {who}; the workers are {', '.join(sorted(self._infos))}")
        return found

    def get_worker_infos(self) -> list[Any]:
        """All workers."""
        return sorted(self._infos.values(), key=lambda info: info.id)

    def member(self, to: Any) -> Member:
        """The worker that torch calls so."""
        return self.phalanx.member(self.get_worker_info(to).name)

    @property
    def is_static_group(self) -> bool:
        """Whether all workers were there from the beginning."""
        return bool(self._world_size)

    @property
    def store(self) -> Store:
        """The store of ``init_rpc``."""
        return self._store

    def _get_backend_options(self) -> Any:
        return self._options

    def _get_device_map(self, dst: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = self._options.device_maps.get(dst.name, {})
        return found

    def _update_group_membership(self, worker_info: Any, devices: Any, reverse_device_maps: Any, is_join: bool) -> None:
        if is_join:
            self._infos = {**self._infos, worker_info.name: worker_info}
            self._reverse_device_maps.update(reverse_device_maps)
            self._devices = list(devices)
        else:
            self._infos = {name: info for name, info in self._infos.items() if name != worker_info.name}
            self._reverse_device_maps.pop(worker_info.name, None)

    def get_debug_info(self) -> dict[str, str]:
        """Counts by torch's names."""
        with self._lock:
            calls = self._calls
        counts = {
            "agent.num_idle_threads": 0,
            "agent.thread_pool_size": self._options.num_worker_threads,
            "agent.client_active_calls": calls,
            "agent.server_active_calls": self._service.running,
            "agent.server_active_async_calls": 0,
        }
        if _gil_profiling:
            counts["agent.gil_average_wait_time_us"] = 0
        return {name: str(count) for name, count in counts.items()}

    def get_metrics(self) -> dict[str, str]:
        """As torch's: the same counts."""
        return self.get_debug_info()

    def sync(self) -> None:
        """Does nothing, as TensorPipe's."""

    def count(self, call: Future[Any]) -> None:
        """A call of this worker has begun."""
        with self._lock:
            self._calls += 1
        call.add_done_callback(self._over, short=True)

    def _over(self, _: Future[Any]) -> None:
        with self._lock:
            self._calls -= 1
            self._lock.notify_all()

    # Ends

    def _on_change(self, member: Member, how: str) -> None:
        if how == "lost":
            self.lost.add(member.name)
            gathering.lost(self.me.name, member.name)

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until all workers of a static group are here and no call is under way.

        Workers that are gone are not waited for.

        Args:
            shutdown: as torch's; nothing depends on it.
            timeout: in seconds; 0 for no limit.
        """
        until = time.monotonic() + (timeout or threading.TIMEOUT_MAX)
        with self._lock:
            if not self._lock.wait_for(lambda: not self._calls, max(0.0, until - time.monotonic())):
                raise InitializationError(f"{self._calls} calls of {self.me.name} had not ended after {timeout:g} s")
        if not self._world_size:
            return
        self._joins += 1
        round_ = 0
        while True:
            with self._lock:
                busy = self._calls
            round_ += 1
            self.leaks = self.references.leaks()  # now, before the others may leave, which frees what they hold
            if not self._meet(f"join/{self._joins}/{round_}", busy, until):
                return

    def _meet(self, key: str, busy: int, until: float) -> int:
        """How many calls are under way anywhere, as each worker said when it came."""
        store = PrefixStore("phalanx", self._store)
        total = busy
        try:
            store.set(f"{key}/{self.me.rank}", str(busy))
            missing = {info.name: info.id for info in self._infos.values() if info.id != self.me.rank}
            while missing:
                for name, rank in list(missing.items()):
                    if store.check([f"{key}/{rank}"]):
                        total += int(store.get(f"{key}/{rank}"))
                        del missing[name]
                living = {member.name for member in self.phalanx.members()} if missing else set()
                missing = {name: rank for name, rank in missing.items() if name in living}
                if missing and time.monotonic() > until:
                    raise InitializationError(f"{', '.join(sorted(missing))} had not come to shutdown() in time")
                if missing:
                    time.sleep(_LOOK_S)
        except PhalanxError:
            raise
        except RuntimeError:
            return 0  # the store has gone with the worker that had it, which had seen everybody
        return total

    def shutdown(self) -> None:
        """Stop being a worker."""
        self.references.close()
        session.shutdown(wait=False)
        self.pool.close()


def _agree_on_membership(store: Store, is_static: bool) -> None:
    """Refuse a worker that joins a static group later, or without a world size.

    Raises:
        InitializationError: this worker's group is of the other kind.
    """
    mine = "static" if is_static else "dynamic"
    found = store.compare_set("phalanx/membership", "", mine).decode()
    if found != mine:
        raise InitializationError(
            "RPC group mixes statically and dynamically initialized members which is not supported. "
            f"The first worker made a {found} group; give init_rpc a world_size on all workers or on none"
        )


class StoreGroup:
    """The workers of a static group, as they exchange texts through the store of ``init_rpc``.

    It stands in for the Gloo group that torch makes for this.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._size = PrefixStore("phalanx/group", store), rank, world_size

    def exchange(self, name: str, text: str, timeout_s: float = 0.0) -> list[str]:
        """Say a text, and return those of all workers, by rank. Every worker calls it, once for a name."""
        keys = [f"{name}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        self._store.wait(keys, datetime.timedelta(seconds=timeout_s or _NAMES_S))
        return [value.decode() for value in self._store.multi_get(keys)]

    def barrier(self) -> StoreGroup:
        """Wait for all workers."""
        self.exchange("barrier", "")
        return self

    def wait(self) -> None:
        """The barrier has waited."""

    def exchange_device_maps(
        self, name: str, count: int, maps: Mapping[str, Any], devices: list[Any]
    ) -> tuple[Any, Any]:
        """Check the device maps of all workers: the reverse of those that lead here, and this worker's devices."""
        said = json.dumps([name, count, {to: _as_texts(pairs) for to, pairs in maps.items()}, list(map(str, devices))])
        names, counts, all_maps, all_devices = list[str](), {}, {}, {}
        for text in self.exchange("devices", said):
            other, counts[other], maps_there, devices_there = json.loads(text)
            names.append(other)
            all_maps[other] = {to: {torch.device(a): torch.device(b) for a, b in at} for to, at in maps_there.items()}
            all_devices[other] = list(map(torch.device, devices_there))
        registry._validate_device_maps(names, counts, all_maps, all_devices)
        reverse = registry._create_reverse_mapping(name, names, all_maps)
        return reverse, registry._create_device_list(devices, maps, reverse)


def _as_texts(pairs: Mapping[Any, Any]) -> list[tuple[str, str]]:
    return [(str(here), str(there)) for here, there in pairs.items()]


def _meet_all(group: StoreGroup, name: str, timeout_s: float) -> tuple[dict[str, Any], bool]:
    """The workers of a static group, each of which says its name, and whether all are on one host.

    Raises:
        InitializationError: two have the same name.
    """
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")  # containers of one host may have loopback addresses of their own
    where = f"{this_host()} {network}"
    found: dict[str, Any] = {}
    places: set[str] = set()
    for other, said in enumerate(group.exchange("names", json.dumps([name, where]), timeout_s)):
        other_name, place = json.loads(said)
        if other_name in found:
            raise InitializationError(
                f"RPC worker name {other_name} is not unique: the workers {found[other_name].id} and {other} have it"
            )
        found[other_name] = cpp.WorkerInfo(other_name, other)
        places.add(place)
    return found, len(places) == 1


_gil_profiling = False


def enable_gil_profiling(flag: bool) -> None:
    """As torch's: whether the time spent waiting for the interpreter's lock is shown. Nothing is measured."""
    global _gil_profiling
    _gil_profiling = flag


def get_rpc_timeout() -> float:
    """How long a call may take by default, in seconds."""
    return current.agent().timeout_s


def _set_rpc_timeout(timeout: float) -> None:
    current.agent().timeout_s = float(timeout)


def _rref_context_get_debug_info() -> dict[str, str]:
    return current.agent().references.debug_info()


def _delete_all_user_and_unforked_owner_rrefs(timeout: datetime.timedelta = datetime.timedelta(seconds=100)) -> None:
    for late in current.agent().references.give_all_up(timeout.total_seconds()):
        tell(f"warning: rpc.shutdown() does not wait any longer for {late}")


def _destroy_rref_context(ignore_leaks: bool) -> None:
    leaks = current.agent().leaks
    if leaks and not ignore_leaks:
        raise PhalanxError(
            "; ".join(leaks) + ". Detected RRef Leaks during shutdown. This usually occurs when the application code "
            "still holds references to RRef instances when calling shutdown()"
        )


def _cleanup_python_rpc_handler() -> None:
    pass


STAND_INS: dict[str, Any] = {
    function.__name__: function
    for function in (
        enable_gil_profiling,
        get_rpc_timeout,
        _set_rpc_timeout,
        _rref_context_get_debug_info,
        _delete_all_user_and_unforked_owner_rrefs,
        _destroy_rref_context,
        _cleanup_python_rpc_handler,
    )
}
