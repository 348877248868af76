"""Starting the ranks, reading what they measure, and cleaning up however that ends.

Ranks are forked from this process, which has imported torch once, or started by an ``mpiexec`` when MPI is measured
too. Either way rank 0 writes its rows into a named pipe in a temporary folder, where the ranks also meet. The ranks run
in sessions of their own, so a Ctrl-C reaches this process alone; if this process dies, so do they.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.bench.cases import BenchOptions
from phalanx.bench.mpi import Mpi, shared_memory_of
from phalanx.errors import PhalanxError
from phalanx.system.processes import await_ends, descendants_of, die_with_parent, kill, set_name

__all__ = ["RankSet", "RanksFailed", "run_ranks"]

SILENCE_S = 300.0  # for which rank 0 may report nothing
GRACE_S = 5.0  # in which a process that is being ended must end
LOG_LINES = 15
_OTHERS_S = 0.2  # others may have failed at the same time as the first, and be about to write why
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

EventHandler = Callable[[dict[str, Any]], None]


class RanksFailed(PhalanxError):
    """The ranks of a measurement did not finish. The message has what they printed; rows measured before are kept."""


@dataclass(frozen=True)
class RankSet:
    """One world of ranks that measure together.

    Attributes:
        size: the world size.
        mpi: the MPI whose ``mpiexec`` starts them; None if they are forked.
    """

    size: int
    mpi: Mpi | None


def run_ranks(ranks: RankSet, options: BenchOptions, handle: EventHandler) -> None:
    """Start a set of ranks, and return when all have ended.

    Args:
        ranks: which ranks.
        options: what they measure.
        handle: called in this process with every event that rank 0 reports: ``started``, ``case``, ``row``.

    Raises:
        RanksFailed: a rank ended with an error or a signal, or rank 0 reported nothing for five minutes.
    """
    with tempfile.TemporaryDirectory(prefix="phx-bench-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps({"options": asdict(options), "size": ranks.size}))
        os.mkfifo(folder / "events")
        # Opened for writing too: then opening does not wait for a writer, and there is no end of file without one.
        events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        pids: list[int] = []
        shared: set[str] = set()

        # An MPI library that is ended early leaves files in /dev/shm. They exist once its ranks have reported.
        def note_files(event: dict[str, Any]) -> None:
            if event["event"] == "started" and ranks.mpi:
                shared.update(shared_memory_of(pids))
            handle(event)

        try:
            with _signals_blocked():
                _start(ranks, options, folder, events, pids)
            _follow(ranks, pids, folder, events, note_files)
        finally:
            with _signals_blocked():
                _end(ranks, pids)
                os.close(events)
                for path in shared:
                    Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(ranks: RankSet, options: BenchOptions, folder: Path, events: int, pids: list[int]) -> None:
    """Start the ranks, or ``mpiexec``; each process id is added to ``pids`` at once, in case the next start fails."""
    if ranks.mpi is None:
        from phalanx.bench.rank import run_rank  # imports torch, once, before the forks

        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        for rank in range(ranks.size):
            pid = os.fork()
            if not pid:
                _become_rank(rank, parent, folder, events, partial(run_rank, rank, ranks.size, folder, options))
            pids.append(pid)
        return
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            ranks.mpi.command(ranks.size, folder),
            env=ranks.mpi.environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(_become_mpiexec, os.getpid()),
        )
    pids.append(process.pid)
    process.returncode = 0  # _follow and _end wait for the process, so Popen must not


def _become_mpiexec(parent: int) -> None:
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _become_rank(rank: int, parent: int, folder: Path, events: int, body: Callable[[], None]) -> None:
    """Be a rank, in the child of a fork. Never returns."""
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        set_name(f"bench-{rank}")
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.close(events)
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        body()
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _follow(ranks: RankSet, pids: list[int], folder: Path, events: int, handle: EventHandler) -> None:
    """Pass on the events of rank 0 until every process has ended; take each that ends out of ``pids``."""
    handles = {os.pidfd_open(pid): pid for pid in pids}
    rank_of = {pid: rank for rank, pid in enumerate(pids)}
    text = b""
    try:
        while handles:
            ready, _, _ = select.select([events, *handles], [], [], SILENCE_S)
            if not ready:
                raise RanksFailed(f"{_output(folder)}the ranks reported nothing for {SILENCE_S:.0f} s")
            text = _read(events, text, handle)
            for descriptor in set(ready) - {events}:
                pid = handles.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                pids.remove(pid)
                text = _read(events, text, handle)
                if status:
                    name = "mpiexec" if ranks.mpi else f"rank {rank_of[pid]} of {ranks.size}"
                    await_ends(handles, _OTHERS_S)  # not all end when another one has failed
                    raise RanksFailed(f"{_output(folder)}{name} {_ended(status)}")
    finally:
        for descriptor in handles:
            os.close(descriptor)


def _read(events: int, text: bytes, handle: EventHandler) -> bytes:
    """Pass on every whole line that can be read; return the beginning of the next line."""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(events, 1 << 16):
            *lines, text = (text + chunk).split(b"\n")
            for line in lines:
                handle(json.loads(line))
    return text


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"


def _output(folder: Path) -> str:
    """The traceback of the first rank that failed, or else the last lines that the ranks printed."""
    errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        return f"rank {errors[0].name.removeprefix('error-')}:\n{errors[0].read_text()}"
    log = folder / "log"
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    return "".join(f"{line}\n" for line in lines)


def _end(ranks: RankSet, pids: list[int]) -> None:
    """End what still runs. An ``mpiexec`` gets SIGTERM, so that it can end and remove what its library has made."""
    below = _handles(descendants_of(pids)) if ranks.mpi else []
    for pid in pids:
        if ranks.mpi:
            os.kill(pid, signal.SIGTERM)
        else:
            kill(pid)
    for pid in pids:
        handle = os.pidfd_open(pid)
        if await_ends([handle], GRACE_S):
            kill(pid)
        os.close(handle)
        os.waitpid(pid, 0)
    pids.clear()
    for handle in below:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def _handles(pids: list[int]) -> list[int]:
    """Handles of processes; unlike a process id, a handle is never reused for another process."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles
