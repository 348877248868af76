"""Operations on Linux processes that Python's os module does not offer: look at them, end them, outlive a parent."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NoReturn

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TRACKERS_S = 2.0  # for Python's resource trackers to end by themselves; they take some milliseconds

# Of <linux/prctl.h>, <linux/sched.h> and <linux/mempolicy.h>. The C library has no function for set_mempolicy, so its
# number is needed.
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_PF_EXITING = 0x4
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_LOCAL = 4

# What the kernel's letters mean.
STATES = {
    "T": "stopped (state T)",
    "t": "held by a debugger (state t)",
    "D": "waiting for a disk or a driver (state D)",
    "R": "running",
}

_libc = ctypes.CDLL(None, use_errno=True)

# -- this process --------------------------------------------------------------------------------------


def _prctl(option: int, argument: int | bytes) -> None:
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if _libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent, whose process id this is, ends.

    If it has ended already, the signal would never come, so this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant that loses its own: a subreaper."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Name this process in ``ps`` and ``top`` (at most 15 bytes are kept)."""
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NAME, name.encode()[:15])


def guard_standard_streams() -> None:
    """Fill closed standard descriptors with /dev/null, so that no pipe is mistaken for one of them."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def release_input() -> None:
    """Close this process's standard input, so that its writer notices when no other process reads it any more."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def take_memory_nearby() -> None:
    """Have each thread take memory from the NUMA node on which it runs, and the kernel leave it there.

    Where a container forbids the call, memory comes from there too unless a policy was inherited (numactl).
    """
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is not None:
        _libc.syscall(ctypes.c_long(number), _MPOL_LOCAL, None, ctypes.c_ulong(0))


def skip_library_teardown() -> None:
    """Leave the memory of the libraries loaded so far to the kernel when this process ends.

    libtorch's static destructors take 90 ms a process, and in a fork each page they touch is copied first. Handlers
    registered from now on still run, because ``exit()`` runs the last one first; then C streams are flushed. Without
    ``on_exit``, which glibc has, everything is torn down, slowly.
    """
    if hasattr(_libc, "on_exit") and hasattr(_libc, "__cxa_atexit"):
        _libc.on_exit(_libc._exit, None)
        _libc["__cxa_atexit"](_libc.fflush, None, None)


def exit_without_finalising(code: int) -> NoReturn:
    """End this process by C's ``exit()``, whose handlers run, and leave the interpreter as it is."""
    _libc.exit(code)
    os._exit(code)


def own_sight() -> str:
    """Return a name that is equal for processes which see each other under the same ids; empty if none can."""
    try:
        if int(os.readlink("/proc/self")) != os.getpid():
            return ""  # /proc counts as another pid namespace does
        with open("/proc/sys/kernel/random/boot_id") as file:
            seen = [file.read(), str(os.stat("/proc").st_dev), str(os.getuid())]
        seen += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time")]
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


# -- what a process is doing, by the line of /proc that proc(5) describes --------------------------------


@dataclass(frozen=True)
class ProcessUse:
    """One look at a process.

    Attributes:
        state: of its main thread, by the kernel's letter; ``T`` is stopped, ``Z`` ended and not reaped.
        start: when it was started, in clock ticks after the boot. With the process id it names a process for good.
        cpu_s: the time that all of its threads have had on a core, without its children.
        resident_bytes: its memory that is in RAM, with what it shares with others.
    """

    state: str
    start: int
    cpu_s: float
    resident_bytes: int

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"


def process_use(pid: int) -> ProcessUse | None:
    """Look at a process; None if there is none with this id."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _fields_in(f"/proc/{pid}/stat")
        cpu_ticks = int(fields[11]) + int(fields[12])
        return ProcessUse(fields[0].decode(), int(fields[19]), cpu_ticks * _TICK_S, int(fields[21]) * _PAGE_BYTES)
    return None


def start_of(pid: int) -> int:
    """Return when a process was started, in clock ticks after the boot; 0 if there is none, or if it has ended."""
    found = process_use(pid)
    return 0 if found is None or found.has_ended else found.start


def has_ended(pid: int, start: int) -> bool:
    """Return whether the process that had this id, and was started then, has ended."""
    if start_of(pid) == start:
        return False
    if process_use(pid) is not None:
        return True  # a zombie, or another process of the same id
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the second for a number that no process can have
        return True
    except PermissionError:
        pass
    return False  # /proc hides it


def state_of(pid: int, thread: int = 0) -> str:
    """Return the kernel's letter for the state of a process, or of one of its threads; empty if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return _fields_in(f"/proc/{pid}/task/{thread or pid}/stat")[0].decode()
    return ""


def state_if_stopped(pid: int, start: int) -> str:
    """Return the state of a process if it is stopped or held by a debugger, and still the one that began then."""
    use = process_use(pid)
    return use.state if use is not None and use.start == start and use.state in "Tt" else ""


def state_text(state: str) -> str:
    """Say what the kernel's letter for a process's state means, as "stopped (state T)"."""
    return STATES.get(state) or ("sleeping" if state == "S" else f"state {state}" if state else "not known")


def is_ending(pid: int) -> bool:
    """Return whether a process has begun to end, or has ended: no signal makes a difference to it any more.

    Its parent is told only when its memory is gone, which takes long if it had much.
    """
    try:
        return bool(int(_fields_in(f"/proc/{pid}/stat")[6]) & _PF_EXITING)
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return True
    except OSError:  # this process has no descriptor left to look with
        return False


def _fields_in(path: str) -> list[bytes]:
    """Return the fields from the state on, which proc(5) numbers 3."""
    with open(path, "rb") as file:
        # The command between the parentheses may hold spaces and parentheses of its own.
        return file.read().rpartition(b")")[2].split()


# -- what a process does with signals ------------------------------------------------------------------


def signal_sets(pid: int, signum: int) -> set[str]:
    """Return in which sets of a process, or of a thread of this id, a signal is, by the names of /proc.

    ``SigCgt`` is handled, ``SigIgn`` ignored, ``SigBlk`` blocked, ``SigPnd`` and ``ShdPnd`` not taken so far.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        masks = (line.split() for line in file if line.startswith(("Sig", "ShdPnd")) and not line.startswith("SigQ"))
        return {name.rstrip(":") for name, mask in masks if int(mask, 16) >> (signum - 1) & 1}
    return set()


# -- whose child it is ---------------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    """Return the children of ``pid``, zombies included; empty when it has gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants_of(pids: Iterable[int]) -> list[int]:
    """List everything below ``pids``, parents before their children, ``pids`` themselves left out."""
    found: dict[int, None] = {}
    front = list(pids)
    while front:
        front = [child for pid in front for child in children_of(pid) if child not in found]
        found.update(dict.fromkeys(front))
    return [*found]


def belongs_to(pid: int, session: int, memfd_name: str, environment: Iterable[bytes]) -> bool:
    """Return whether an orphan came from a given rank; it may have left its process group, or lost its parent.

    It is in the rank's session, or was started with variables (``b"RANK=3"``) that only this rank's programs have, or,
    as a plain fork, holds the rank's report file open, which has this name.
    """
    with contextlib.suppress(OSError):
        if os.getsid(pid) == session:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            if set(file.read().split(b"\0")).issuperset(environment):
                return True
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{memfd_name} "):
                    return True
    return False


def is_resource_tracker(pid: int) -> bool:
    """Recognise multiprocessing's resource tracker, which removes semaphores and memory once its pipe is closed."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"multiprocessing.resource_tracker" in file.read()
    return False


# -- ending processes, and waiting for their ends ------------------------------------------------------


def kill(pid: int) -> bool:
    """SIGKILL one process; return False if this process may not signal it, because it belongs to another user."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def send_to_group(leader: int, signum: int) -> None:
    """Signal the process group of ``leader``, or ``leader`` alone while it has none of its own yet.

    SIGKILL is for ``leader`` alone. The caller must not have reaped it: no other process can have its number then.
    """
    try:
        (os.kill if signum == signal.SIGKILL else os.killpg)(leader, signum)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signum)
    except PermissionError:
        pass  # a member of the group runs as another user (sudo, a setuid program); the others have been signalled


def await_ends(handles: Iterable[int], patience_s: float) -> list[int]:
    """Wait until processes have ended, by a pidfd of each, and return the handles of those that have not."""
    from multiprocessing.connection import wait  # takes 20 ms

    left = list(handles)
    until = time.monotonic() + patience_s
    while left and (ended := wait(left, max(0.0, until - time.monotonic()))):
        left = [handle for handle in left if handle not in ended]
    return left


def end_descendants(*, but: Collection[int] = ()) -> None:
    """SIGKILL all descendants of this process until none is left that may be killed.

    A process whose parent is killed becomes a child of this one (:func:`adopt_orphans`), so each round reaches those
    that the round before has orphaned. Python's resource trackers get a moment to end by themselves. Children in
    ``but`` are spared, with all their descendants, and not reaped.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    spared: set[int] = set()
    until = time.monotonic() + _TRACKERS_S
    while True:
        for pid in children_of(os.getpid()):
            if pid not in but:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        children = [pid for pid in children_of(os.getpid()) if pid not in but]
        victims = [pid for pid in [*children, *descendants_of(children)] if pid not in spared]
        if not victims:
            break
        if time.monotonic() < until:
            victims = [pid for pid in victims if not is_resource_tracker(pid)]
        spared.update(pid for pid in victims if not kill(pid))
        # The end of a child wakes this process. The timeout is for the ends of processes that are not its children.
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
