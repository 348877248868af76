"""This process as a worker of torch's API: what stands in for ``TensorPipeAgent``, from ``init_rpc`` to ``shutdown``.

The workers of a static group give each other their names by the store of ``init_rpc``, so that no two have one. From
then on they know each other as the workers of ``rpc.init`` do. A worker that is gone is not waited for.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.errors import ArgumentError, InitializationError, PhalanxError, RankError
from phalanx.rpc import session
from phalanx.rpc.future import Future
from phalanx.rpc.members import LEFT
from phalanx.rpc.torch_api.torch_names import api, cpp, stand_in
from phalanx.rpc.worker import Member, Worker
from phalanx.system.host import this_host
from phalanx.words import tell

__all__ = ["TensorPipeAgent", "agent", "check_device_maps", "init_backend", "is_set", "wait_all_workers"]

_NAMES_S = 1800.0  # for all workers to come, if calls have no limit
_AT_ONCE_S = 0.1  # in which workers that shut down at the same time have come

_agent: TensorPipeAgent | None = None


def is_set() -> bool:
    """Return whether ``init_rpc`` has made an agent that ``shutdown`` has not ended."""
    return _agent is not None


def agent() -> TensorPipeAgent:
    """The agent of this process.

    Raises:
        InitializationError: there is none.
    """
    if _agent is None:
        raise InitializationError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return _agent


def init_backend(backend: Any, *, rpc_backend_options: Any, **arguments: Any) -> Any:
    """Stand in for torch's function of that name."""
    if backend.name != "TENSORPIPE":
        return backend.value.init_backend_handler(rpc_backend_options=rpc_backend_options, **arguments)
    if not isinstance(rpc_backend_options, cpp._TensorPipeRpcBackendOptionsBase):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    return TensorPipeAgent(options=rpc_backend_options, **arguments)


stand_in(is_set, "_is_current_rpc_agent_set")
stand_in(agent, "_get_current_rpc_agent")


@stand_in
class TensorPipeAgent:
    """This process as a worker of torch's API.

    Attributes:
        store: that of ``init_rpc``.
        timeout_s: how long a call may take by default, in seconds; 0 for no limit.
        profiles_gil: whether ``get_debug_info`` shows the time spent waiting for the interpreter's lock.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int | None, options: Any) -> None:
        global _agent
        self._info = cpp.WorkerInfo(name, rank)  # which checks the name
        check_device_maps(options.device_maps)
        self.store, self._options = store, options
        self._world_size = world_size or 0
        self.timeout_s = float(options.rpc_timeout)
        self.profiles_gil = False
        self._lock = threading.Condition()
        self._calls = self._begun = 0  # calls of this worker: those under way, and all
        self._meetings = 0
        self._left: set[Member] = set()  # of a dynamic group
        self._agree_on_membership()
        names, one_host = self._names() if world_size else ([name], False)
        self._infos = [cpp.WorkerInfo(each, number) for number, each in enumerate(names)]
        address, limit_s = session.own_address(one_host=one_host), self.timeout_s or math.inf
        _agent = self  # before others can find this worker: they may call it at once
        try:
            made = session.begin(PrefixStore("phalanx", store), name, rank, address, limit_s)
        except BaseException:
            _agent = None
            raise
        try:
            if world_size:  # nobody calls a worker that is not in the directory yet
                self._exchange("there", "")
            self._others = [made.directory.find(each) for each in names if each != name]
            if world_size:
                if rank > 0:  # so that the first calls of rank 0 find a link
                    made.reach(self._others[0], session.REACH_S)
                self._exchange("linked", "")
        except BaseException:
            self.shutdown()
            _agent = None
            raise

    def _agree_on_membership(self) -> None:
        """Refuse a worker that joins a static group later, or without a world size."""
        mine = "static" if self.is_static_group else "dynamic"
        found = self.store.compare_set("phalanx/membership", "", mine).decode()
        if found != mine:
            raise InitializationError(
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                f"The first worker made a {found} group; give init_rpc a world_size on all workers or on none"
            )

    def _names(self) -> tuple[list[str], bool]:
        """The names of all workers of a static group, by rank, and whether all are on one host."""
        network = ""
        with contextlib.suppress(OSError):
            network = os.readlink("/proc/self/ns/net")  # containers may have loopback addresses of their own
        said = json.dumps([self._info.name, f"{this_host()} {network}"])
        found = [json.loads(each) for each in self._exchange("names", said)]
        names = [name for name, _ in found]
        for rank, name in enumerate(names):
            if names.index(name) < rank:
                raise InitializationError(
                    f"RPC worker name {name} is not unique: the workers {names.index(name)} and {rank} have it"
                )
        return names, len({place for _, place in found}) == 1

    def _exchange(self, what: str, text: str) -> list[str]:
        """Say a text, and return those of all workers, by rank."""
        keys = [f"phalanx/{what}/{rank}" for rank in range(self._world_size)]
        self.store.set(keys[self._info.id], text)
        self.store.wait(keys, datetime.timedelta(seconds=self.timeout_s or _NAMES_S))
        return [value.decode() for value in self.store.multi_get(keys)]

    @property
    def phalanx(self) -> Worker:
        """The agent that moves the messages."""
        return session.worker()

    def member(self, to: Any) -> Member:
        """The worker that torch calls so."""
        try:
            return self.phalanx.directory.find(to.name if isinstance(to, cpp.WorkerInfo) else to)
        except RankError as error:
            raise RankError(f"could not find destination {to}: {error}") from None

    def count(self, call: Future[Any]) -> None:
        """Count a call of this worker, which has begun."""
        with self._lock:
            self._calls += 1
            self._begun += 1
        call.add_done_callback(self._over, short=True)

    def _over(self, _: Future[Any]) -> None:
        with self._lock:
            self._calls -= 1
            self._lock.notify_all()

    # What torch asks

    def get_worker_info(self, who: Any = None) -> Any:
        """The name and number of a worker; of this one by default."""
        if who is None:
            return self._info
        if isinstance(who, cpp.WorkerInfo):
            return who
        member = self.member(who)
        return cpp.WorkerInfo(member.name, member.rank)

    def get_worker_infos(self) -> list[Any]:
        """All workers."""
        if self.is_static_group:
            return list(self._infos)
        there = [member for member in self.phalanx.directory.all() if member not in self._left]
        return [cpp.WorkerInfo(member.name, member.rank) for member in there]

    @property
    def is_static_group(self) -> bool:
        """Return whether all workers were there from the beginning."""
        return bool(self._world_size)

    def _get_backend_options(self) -> Any:
        return self._options

    def _get_device_map(self, dst: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = self._options.device_maps.get(dst.name, {})
        return found

    def _update_group_membership(self, worker_info: Any, devices: Any, reverse_device_maps: Any, is_join: bool) -> None:
        if not is_join:
            self._left.add(self.member(worker_info))

    def get_debug_info(self) -> dict[str, str]:
        """Counts by torch's names."""
        counts = {"thread_pool_size": self._options.num_worker_threads, "client_active_calls": self._calls}
        if self.profiles_gil:
            counts["gil_average_wait_time_us"] = 0
        return {f"agent.{name}": str(count) for name, count in counts.items()}

    get_metrics = get_debug_info

    def sync(self) -> None:
        """Do nothing, as TensorPipe's."""

    # Ends

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no call of this worker is under way; in a static group, no call of anybody.

        There each worker says how many calls it has begun, once all of them are over. If the sum is the same twice, no
        call has begun another one meanwhile.

        Args:
            shutdown: this worker leaves. Of a dynamic group it says so now, while torch lets nobody join: whoever comes
                next calls all workers that are there.
            timeout: in seconds; 0 for no limit.

        Raises:
            InitializationError: the time is over; it says who is late and what they do.
        """
        before = -1
        while (total := self._sum_of_calls(timeout)) > before:
            before = total
        if shutdown and not self.is_static_group:
            self.phalanx.directory.leave(self.phalanx.me, LEFT)

    def _sum_of_calls(self, timeout_s: float) -> int:
        """Wait until all calls of this worker are over, and meet the others.

        Returns:
            How many calls all workers of a static group have begun; -1 if they cannot be asked, or it is a dynamic one.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: not self._calls, timeout_s or threading.TIMEOUT_MAX):
                raise InitializationError(
                    f"{self._calls} calls of {self._info.name} had not ended after {timeout_s:g} s"
                )
            begun = self._begun
        if not self.is_static_group:
            return -1
        self._meetings += 1
        store = PrefixStore(f"phalanx/meeting/{self._meetings}", self.store)
        late = {member.rank: member for member in self._others}

        def missing() -> list[Member]:
            nonlocal begun
            gone = self.phalanx.directory.known_gone()
            for rank, member in list(late.items()):
                if store.check([str(rank)]):
                    begun += int(store.get(str(rank)))
                    del late[rank]
                elif member in gone:
                    del late[rank]
            return list(late.values())

        try:
            store.set(str(self._info.id), str(begun))
            with contextlib.suppress(RuntimeError):  # which most often ends sooner than a look comes
                store.wait([str(rank) for rank in late], datetime.timedelta(seconds=_AT_ONCE_S))
            session.wait_for_shutdown(self.phalanx, missing, timeout_s or math.inf, len(self._others))
        except PhalanxError:
            raise
        except RuntimeError:  # the store has gone with the worker that had it, which had seen everybody
            return -1
        return begun

    def shutdown(self) -> None:
        """Stop being a worker."""
        session.shutdown(wait=False)


def wait_all_workers(timeout: float = api.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Stand in for torch's ``_wait_all_workers``: wait until nobody calls any more."""
    agent().join(timeout=timeout)
    own = agent().phalanx
    for member in own.directory.known_gone():
        departure = own.reach(member, 0.0)
        if departure is not None and not departure.left:
            tell(f"warning: {member.name} is gone; rpc.shutdown() goes on without it")


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


@stand_in
def enable_gil_profiling(flag: bool) -> None:
    """As torch's: whether the time spent waiting for the interpreter's lock is shown. Nothing is measured."""
    agent().profiles_gil = flag


@stand_in
def get_rpc_timeout() -> float:
    """Return how long a call may take by default, in seconds."""
    return agent().timeout_s


@stand_in
def _set_rpc_timeout(timeout: float) -> None:
    agent().timeout_s = float(timeout)


@stand_in
def _set_and_start_rpc_agent(made: TensorPipeAgent) -> None:
    global _agent
    _agent = made


@stand_in
def _reset_current_rpc_agent() -> None:
    global _agent
    _agent = None


@stand_in
def _cleanup_python_rpc_handler() -> None:
    pass
