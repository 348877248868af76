"""Functions on forked ranks: what each returned or raised, or the stacks of one that does not end in time."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.support.waiting import soon

TIMEOUT_S = 300.0  # no busy machine needs as long; one that hangs shows its stacks then


@dataclass
class Outcome:
    """How one rank ended: by a value, an error with its traceback, or a signal."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    signal: int = 0


@dataclass(frozen=True)
class Member:
    """Which rank it is, a folder to meet the others in, and what the backend of its world promises (``worlds.py``)."""

    rank: int
    size: int
    folder: Path
    promises: frozenset[str] = frozenset()
    _stores: list[Store] = field(default_factory=list, repr=False, compare=False)

    def store(self, name: str = "store") -> Store:
        store = PrefixStore("test", FileStore(str(self.folder / name), self.size))
        self._stores.append(store)  # with the last of all ranks' stores torch removes the file, even if one is opened
        return store

    def join(self, backend: str = "phalanx", timeout_s: float = 60.0, name: str = "store") -> None:
        """``init_process_group`` through a file in this run's folder, so that no port is needed."""
        if backend == "mpi":
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            return
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=self.store(name), rank=self.rank, world_size=self.size, timeout=timeout)

    def join_patiently(self, timeout_s: float) -> None:
        """:meth:`join`, and have this timeout only when all are in: joining takes longer on a busy machine."""
        self.join()
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=timeout_s))
        self.meet("patient")

    def meet(self, name: str) -> None:
        """Return when every rank has come here, without Phalanx; once for each name."""
        self.say(f"{name}-{self.rank}")
        for rank in range(self.size):
            self.await_said(f"{name}-{rank}")

    def say(self, what: str) -> None:
        (self.folder / what).touch()

    def await_said(self, *whats: str) -> None:
        """Return when other ranks have said all of these; a rank that is late by this is late however slow they are."""
        assert soon(lambda: all((self.folder / what).exists() for what in whats), TIMEOUT_S), whats


def run_ranks(
    function: Callable[[Member], Any], size: int, timeout_s: float = TIMEOUT_S, inside: Sequence[int] = ()
) -> list[Outcome]:
    """Run ``function`` on forked ranks, each in the namespaces of a process (``inside``) such as a test host's."""
    with tempfile.TemporaryDirectory(prefix="phalanx-test-") as name:
        folder = Path(name)
        where = inside or [0] * size
        children = [fork_rank(function, Member(rank, size, folder), where[rank]) for rank in range(size)]
        return _collect(children, folder, timeout_s)


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return what every rank returned; fail with the tracebacks of those that did not."""
    failed = [
        f"rank {outcome.rank} was ended by {signal.Signals(outcome.signal).name}"
        if outcome.signal
        else f"rank {outcome.rank} raised:\n{outcome.traceback or outcome.error}"
        for outcome in outcomes
        if outcome.signal or outcome.error is not None
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def on_ranks(function: Callable[[Member], Any], size: int, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What every rank returned, all of which must succeed."""
    return values(run_ranks(function, size, timeout_s))


def fork_rank(function: Callable[[Member], Any], member: Member, inside: int = 0) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = _fork_inside(inside) if inside else os.fork()
    if pid:
        return pid
    # What an earlier test left in a circle is never collected here: a destructor in C++ that joins a thread of the
    # parent's ends this process, once a thread of its own lies at the same address.
    gc.freeze()
    code = 1
    try:
        stacks = open(member.folder / f"stacks-{member.rank}", "w")  # noqa: SIM115 - open as long as the process
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        run_rank(function, member)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_rank(function: Callable[[Member], Any], member: Member) -> None:
    """Run ``function`` in this process, and leave what came of it in the folder."""
    torch.set_num_threads(1)
    try:
        outcome = Outcome(member.rank, value=function(member))
    except BaseException as error:
        outcome = Outcome(member.rank, error=error, traceback=traceback.format_exc())
    partial = member.folder / f"outcome-{member.rank}.part"
    partial.write_bytes(_pickled(outcome))
    partial.rename(member.folder / f"outcome-{member.rank}")


def _fork_inside(process: int) -> int:
    """Fork into the namespaces of another process."""
    here = os.getcwd()
    spaces = [f"{process}/ns/{kind}" for kind in ("pid", "uts", "net", "mnt")]
    own, ids, *others = [os.open(f"/proc/{space}", os.O_RDONLY) for space in ("self/ns/pid", *spaces)]
    try:
        _set_namespace(ids)  # of the children that this thread makes from now on
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid:
            _set_namespace(own)
            assert pid > 0
            return pid
        for namespace in others:
            _set_namespace(namespace)
        os.chdir(here)
        return 0
    finally:
        for descriptor in (own, ids, *others):
            os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _pickled(outcome: Outcome) -> bytes:
    try:
        pickle.loads(data := pickle.dumps(outcome))
    except Exception:
        plain = AssertionError(f"{type(outcome.error).__name__}: {outcome.error}")
        data = pickle.dumps(Outcome(outcome.rank, error=plain, traceback=outcome.traceback))
    return data


def _collect(children: list[int], folder: Path, timeout_s: float) -> list[Outcome]:
    deadline = time.monotonic() + timeout_s
    handles = {os.pidfd_open(pid): rank for rank, pid in enumerate(children)}
    waiting = dict(handles)
    try:
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(stacks_of(children, list(waiting.values()), folder, timeout_s))
            for handle in ready:
                del waiting[handle]
    finally:
        for handle, rank in handles.items():
            if handle in waiting:
                os.kill(children[rank], signal.SIGKILL)
            os.close(handle)
        ends = [os.waitpid(pid, 0)[1] for pid in children]
    return [outcome_of(rank, status, folder) for rank, status in enumerate(ends)]


def outcome_of(rank: int, status: int, folder: Path) -> Outcome:
    if os.WIFSIGNALED(status):
        return Outcome(rank, signal=os.WTERMSIG(status))
    file = folder / f"outcome-{rank}"
    if not file.exists():
        return Outcome(rank, error=AssertionError(f"exit code {os.WEXITSTATUS(status)} without an outcome"))
    outcome: Outcome = pickle.loads(file.read_bytes())
    return outcome


def stacks_of(children: list[int] | dict[int, int], ranks: list[int], folder: Path, timeout_s: float) -> str:
    text = [f"ranks {ranks} did not end within {timeout_s:.0f} s"]
    for rank in ranks:
        file = folder / f"stacks-{rank}"
        os.kill(children[rank], signal.SIGUSR1)
        soon(partial(os.path.getsize, file), 2.0)
        text.append(f"--- rank {rank}\n{file.read_text()}")
    return "\n".join(text)
