"""The process group that torch calls: its name, its backends, its timeouts, and its end.

It is a Python subclass of ``ProcessGroup``, which costs less per call than a backend behind torch's dispatcher
(docs/design/transports.md). What it does is in ``collectives.py``, behind a front for each. An attached
Gloo group serves sparse tensors, and the C++ virtuals that cannot be overridden from Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from phalanx import settings
from phalanx.c10d.arguments import SUM, Checks
from phalanx.c10d.collectives import Collectives, front, is_watched
from phalanx.c10d.ddp import BackwardPasses, current_pass, serve_reducers
from phalanx.c10d.dispatcher import OPERATIONS, UNSET, watch_all, watch_calls_of_cpp
from phalanx.c10d.hooked import HookedBackend
from phalanx.c10d.leaving import LAST_CALLS_S, track_group
from phalanx.c10d.messages import Messages
from phalanx.c10d.progress import Progress, nothing
from phalanx.c10d.recording import RecordedCalls
from phalanx.c10d.torch_versions import adopt_older_names, name_holder, uncompiled
from phalanx.c10d.work import PhalanxWork
from phalanx.diagnosis import recorder
from phalanx.diagnosis.ends import cause_of_going
from phalanx.diagnosis.own_waits import OtherHosts, OwnWaits, watch_own_waits
from phalanx.errors import ArgumentError, BackendError, ClosedError, PhalanxError
from phalanx.native.core import RecordedGroup
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.gloo import GlooOnDemand
from phalanx.transports.operands import DTYPES

__all__ = ["PhalanxProcessGroup", "serve_operations"]

SMALL_BYTES = 64 * 1024  # up to here an asynchronous operation takes less time than waking a thread for it


class PhalanxProcessGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """A process group over a communicator. Made by ``init_process_group`` and ``new_group``, not by hand.

    Args:
        name: the backend's, for ``dist.get_backend`` and messages.
        communicator: moves the bytes.
        gloo: the attached Gloo group, which serves the rest; shut down with this group.
        group_name: torch's name for the group.
        store: where its ranks met.
        split: makes a group of some of its ranks, given their group ranks, the timeout and a name.
        hooked: whether torch's hooks see its calls (``hooked.py``).
    """

    allreduce: Any  # as the others: behind its front it takes every form of arguments that torch's takes
    supports_reconfigure = False  # for torch >= 2.15; the groups of ``reconfigurable.py`` can

    def __init__(
        self,
        name: str,
        communicator: Communicator,
        gloo: GlooOnDemand,
        group_name: str,
        store: Store | None = None,
        split: Callable[[list[int], timedelta, str], dist.ProcessGroup] | None = None,
        hooked: bool = False,
    ) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._store, self._split, self._splits = store, split, 0
        self._backend_name = name
        self._communicator = communicator
        self._calls: Any = communicator  # or what records its calls
        self.recorded: RecordedGroup | None = None
        self._rank, self._size = communicator.rank, communicator.size
        self._group_name = group_name
        self._check = Checks(name, communicator)
        self._progress = Progress(group_name)
        self._passes = BackwardPasses(self._progress)
        self._messages = Messages(group_name, communicator)
        self._gloo = gloo
        self.retire = partial(_retire, group_name, self._progress, self._messages, communicator, gloo)
        self._summed = frozenset(dtype for dtype in DTYPES if communicator.can_reduce(dtype, SUM))
        self._waits: OwnWaits | None = None
        self._dropped: weakref.finalize[[], PhalanxProcessGroup] | None = None  # gives it back, once it is aborted
        self._attached = self.hooked = hooked  # a hooked group has a backend of its own in Gloo's place
        kind = dist.ProcessGroup.BackendType.CUSTOM if hooked else dist.ProcessGroup.BackendType.UNDEFINED
        self._backend = HookedBackend(self) if hooked else name_holder(self._rank, self._size)
        self._register_backend(torch.device("cpu"), kind, self._backend)
        self._set_default_backend(kind)
        self._set_group_name(group_name)  # type: ignore[arg-type]  # GroupName, which torch 2.9 lacks
        track_group(self)
        serve_reducers()
        watch_calls_of_cpp()

    def record(self, ranks: Sequence[int]) -> None:
        """Have the flight recorder see the operations of these ranks of the world (none: all), if there is one."""
        members = ranks or range(self._size)
        if recorder.open_recorder(*((self._rank, self._size) if not ranks else ())):
            self.recorded = recorder.group(self._group_name, self._backend_name, members, self._rank)
        if self.recorded is not None:
            self._calls = RecordedCalls(self._communicator, self.recorded)

    def watch_waits(self, pids: Mapping[int, int], others: OtherHosts | None = None) -> None:
        """Without ``phalanx run``: have a thread say for whom this rank of the world waits, until the group's end.

        Args:
            pids: of the ranks on this host, by rank.
            others: asks the ranks of other hosts.
        """
        waits = watch_own_waits(self._rank, pids, others)
        if waits is not None:
            self._waits = waits
            weakref.finalize(self, waits.close).atexit = False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        # For C++ alone. Where it reads gloo, DDP's logger takes the group's backend for a ProcessGroupGloo.
        return settings.BACKEND if self._backend_name == "gloo" else self._backend_name

    def name(self) -> str:
        return self._backend_name

    _get_backend_name = name

    @property
    def engine(self) -> str:
        """What carries the bytes between hosts, as ``TCP``; empty on one host, and over MPI."""
        return self._communicator.engine

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes for tensors that the group sums quickest; see ``phalanx.empty``. Every rank calls it."""
        found: list[torch.Tensor] = []
        self._progress.run(lambda: found.append(self._communicator.empty(nbytes)))
        return found[0]

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of every operation that starts from now on. torch's own method would reach its backends only."""
        self._gloo.set_timeout(timeout)
        self._communicator.set_timeout(timeout)

    def attach(self) -> None:
        """Give torch the attached Gloo group, for calls that reach no method of this one; it is made now."""
        if not self._attached:
            self.serve(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo.get())
            self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            self._attached = True

    def serve(self, device: torch.device, kind: dist.ProcessGroup.BackendType, backend: Backend) -> None:
        """Give torch a backend for ``device``, with the group's name and description."""
        name, description = self.group_name, self.group_desc
        self._register_backend(device, kind, backend)
        self._set_group_name(name)
        self._set_group_desc(description)

    def _get_backend(self, device: torch.device) -> Backend:
        if device.type == "cpu":
            self.attach()
        return super()._get_backend(device)

    def get_group_store(self) -> Store:
        """The store in which the group's ranks met; groups of MPI have none."""
        if self._store is None:
            raise BackendError(f"a group of backend {self._backend_name!r} has no store: its ranks met without one")
        return self._store

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        devices: list[torch.device] | None = None,
        device_types: list[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """A group of some of this group's ranks, given as group ranks; None on a rank that is not in it.

        Every rank of this group calls it; torch's own would crash. The new group serves the devices of this one,
        whatever ``opts``, ``devices`` and ``device_types`` say.
        """
        for rank in ranks:
            self._check.peer(rank)
        if self._split is None:
            raise BackendError(
                f"backend {self._backend_name!r} cannot split a group; make a new one with torch.distributed.new_group"
            )
        self._splits += 1
        name = group_name or f"{self.group_name}:split:{self._splits}"
        if self._rank not in ranks:
            return None
        group = self._split(list(ranks), timeout or self._gloo.timeout, name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def _start(
        self, opts: Any, result: list[torch.Tensor], body: Callable[[], None], urgent: bool | None = None
    ) -> PhalanxWork | None:
        """Run an operation here and now, or queue it and return its ``Work``, as torch's options say.

        Args:
            opts: whether it is asynchronous, and a timeout of its own, if it has one.
            result: its tensors.
            urgent: whether a thread begins it at once; by default with large tensors.
        """
        if opts.timeout != UNSET:
            body = self._within(opts.timeout, body)
        if not opts.asyncOp:
            self._progress.run(body)
            return None
        if urgent is None:
            urgent = sum(tensor.nbytes for tensor in result) > SMALL_BYTES
        return self._queued(body, result, urgent)

    def _queued(self, body: Callable[[], None], result: list[torch.Tensor], urgent: bool) -> PhalanxWork:
        work = PhalanxWork(self._progress, self._progress.submit(body, result, urgent))
        if current_pass() >= 0:
            self._passes.begun(work)
        return work

    def _within(self, timeout: timedelta, body: Callable[[], None]) -> Callable[[], None]:
        """``body`` with a timeout of its own, which counts from when it begins to run; messages keep the group's."""

        def run() -> None:
            self._communicator.set_timeout(timeout, of_messages=self._gloo.timeout)
            try:
                body()
            finally:
                self._communicator.set_timeout(self._gloo.timeout)

        return run

    def sum_in_place(self, tensor: torch.Tensor) -> bool:
        """All-reduce a tensor of the usual kind and return True, or do nothing; ``Group.all_reduce`` calls it first."""
        if self.hooked or is_watched() or torch._C._len_torch_function_stack() or not self._summable(tensor):
            return False
        self._progress.run(self._calls.all_reduce, tensor, SUM)
        return True

    def send_now(self, tensor: torch.Tensor, peer: int, tag: int) -> bool:
        """Send it and return True, or do nothing; for ``Group.send``. The quick methods (``quick.py``) do it."""
        return False

    recv_now = send_now

    # -- lifetime ----------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: the operations of a group run one after the other in any case."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._queued(nothing, [], urgent=False)

    def shutdown(self) -> None:
        """Finish what is queued and give back the communicator. ``destroy_process_group`` calls it.

        Called by a signal handler that has interrupted an operation of this group, it ends that operation with an
        error. In a process that was forked from the group's own it does nothing. While an exception is on its way out
        nothing is compared, and ranks that wait for this one are told that exception.

        Raises:
            CollectiveMismatch, PeerLost: the ranks' last calls differ. The group is given back all the same.
        """
        if self._progress.inherited:
            # Gloo's destructor would wait for threads that are not in this process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo.made))
            return
        if self._progress.interrupted():
            self.abort()
            # The thread waits for the group's lock, which the interrupted operation holds. It is not a daemon, so that
            # an exit waits for it.
            threading.Thread(target=self.shutdown, name="phalanx-closing").start()
            return
        if self._waits is not None:
            self._waits.close()
        self._progress.close()
        going = sys.exc_info()[1]
        if going is not None and (cause := cause_of_going(going)):
            self._communicator.group_fails(going, cause)
        self._messages.close()
        try:
            if going is None:
                self._communicator.compare_rest(LAST_CALLS_S)
        finally:
            self._communicator.close()
            self._gloo.shutdown()
            if self._dropped is not None:
                self._dropped.detach()

    def compare_at_exit(self, patience_s: float) -> PhalanxError | None:
        """Compare the ranks' last calls in a process that exits without shutting the group down."""
        running = self._progress.running
        if not running.acquire(blocking=False):
            return None  # an operation is under way, and stays so
        try:
            if not self._progress.busy and not self._progress.queue:
                self._communicator.compare_rest(patience_s)
        except PhalanxError as error:
            return error
        finally:
            running.release()
        return None

    def leave(self) -> list[threading.Thread]:
        """Ask the group's threads to end, whatever is under way, and return them; the process exits."""
        waiting = [] if self._waits is None else self._waits.leave()
        return [*self._progress.leave(), *self._messages.leave(), *waiting]

    def give_back(self) -> None:
        """Give back what would disturb the interpreter's end, when the threads have ended."""
        self._messages.give_back()

    def inherit(self) -> None:
        """Count as closed in a child of the group's process."""
        self._progress.inherit()
        self._messages.inherit()

    def abort(self) -> None:
        """End operations under way on every rank with an error; the group cannot be used afterwards.

        What it holds is given back by :meth:`shutdown`, or when nobody holds the group any more: programs that survive
        the loss of ranks only drop it.
        """
        if self._progress.inherited:
            return  # it is the parent's
        if self._dropped is None:
            self._dropped = weakref.finalize(self, self.retire)
            self._dropped.atexit = False
        if self._waits is not None:
            self._waits.leave()  # an abort waits for nothing
        self._communicator.abort()
        self._gloo.abort()

    # -- what else torch asks for ------------------------------------------------------------------

    def get_reconfigure_handle(self, opts: Any = None) -> str:
        """Refused: the ranks of this group stay as they are."""
        raise ArgumentError(
            f"the ranks of process group {self.group_name!r} stay as they are: give init_process_group "
            "enable_reconfigure=True for one whose ranks can change"
        )

    reconfigure = get_reconfigure_handle

    def boxed(self) -> torch.ScriptObject:
        """This group as an argument of an operation of torch's library ``c10d``, called by itself."""
        watch_all()
        return super().boxed()


def serve_operations(kind: type[PhalanxProcessGroup], body: Callable[[str], Callable[..., Any]]) -> None:
    """Give a class of groups its operations: ``body`` of each name, behind a front."""
    for name in OPERATIONS:
        setattr(kind, name, front(name, body(name)))
    adopt_older_names(kind)
    uncompiled(kind)


serve_operations(PhalanxProcessGroup, partial(getattr, Collectives))


def _retire(name: str, progress: Progress, messages: Messages, communicator: Communicator, gloo: GlooOnDemand) -> None:
    """Give back what a group holds, now and without waiting for its other ranks, which may be gone for good.

    An operation under way ends with an error, here and on the other ranks; if there is none, this rank leaves in order.
    """
    if progress.inherited:
        return
    if progress.interrupted():
        progress.run(nothing)  # raises ReentryError: a handler has interrupted what uses the communicator
    abort = partial(communicator.abort, "reconfigure(), which ended this group")
    with contextlib.ExitStack() as each:  # what fails must not keep the others from it
        each.callback(gloo.release)
        each.callback(communicator.close)
        each.callback(progress.close)
        each.callback(progress.give_up, ClosedError.given_up(name), abort)
        each.callback(messages.close)  # the first to be called: messages need not learn of the abort
