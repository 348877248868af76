"""``phalanx.launch()``: ranks for a function of a running interpreter, in a notebook above all.

The ranks are those of ``phalanx run``: one process supervises them (``supervise.py``), and this one only shows what it
writes, hands Ctrl-C on, and reads the results. That process is a fork of this interpreter, or a fresh one.

A fork has one thread, and what other threads were doing is never finished there. So an accelerator must not have been
opened, no process group joined, and MPI not started (:func:`_why_not_fork`). That torch has computed does no harm:
OpenMP's pool of threads belongs to the thread that used it first, so a thread of its own forks here, which has no pool.
Prior art: Accelerate's ``notebook_launcher``, torch's elastic ``start_processes`` (docs/design/launching.md).
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, NoReturn, TextIO, TypeVar

from phalanx import settings
from phalanx.errors import (
    OUT_OF_MEMORY_HINT,
    PROCESS_LIMIT_HINT,
    ArgumentError,
    InitializationError,
    LaunchError,
    RankFailed,
)
from phalanx.launch.function.supervise import forget_interpreter, supervise
from phalanx.launch.job.job import Job, make_job
from phalanx.launch.job.options import COUNTED_HERE, LaunchOptions, count_ranks
from phalanx.launch.job.target import Target
from phalanx.launch.output.failure import describe_status
from phalanx.launch.rank.preload import import_for_ranks
from phalanx.topology.environment import read_environment
from phalanx.wrong_arguments import explained, require

__all__ = ["StartMethod", "launch"]

StartMethod = Literal["fork", "spawn"]
T = TypeVar("T")
_Function = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]  # with its arguments, and those by name

_BLOCK = 1 << 16
# While pipes are made and a process is started that inherits them: one of another call must not inherit them too.
_starting = threading.Lock()
# What a fresh interpreter runs; its arguments are this one's sys.path, and a file with a pickle for ``begin``.
_PROGRAM = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would answer Ctrl-C with a traceback of imports
sys.path[:] = json.loads(sys.argv[1])  # Phalanx may be found only there
from phalanx.launch.function.supervise import begin
begin(int(sys.argv[2]))
"""


@explained
def launch(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    n: int | str = "auto",
    device: str | None = None,
    variables: Mapping[str, str] | None = None,
    start_method: StartMethod | None = None,
    quiet: bool = True,
    prefix: bool = True,
) -> list[T]:
    """Call a function on n ranks, which are new processes of this machine, and return what each of them returns.

    For notebooks and prompts; a script is started by ``phalanx run``. The ranks join each other by ``phalanx.init()``
    or ``torch.distributed.init_process_group()`` in the function. What they print appears here line by line, each with
    its rank. Ctrl-C, or a notebook's interrupt, ends all of them. May be called any number of times.

    By default the ranks are forks of this interpreter, so functions and data of a notebook need no module and no
    pickle; the first call imports torch here, if nobody has. If a fork could not work (this process has used an
    accelerator, or is in a process group), a fresh interpreter starts them, to which the function is sent.

    Args:
        function: what each rank calls, as ``function(*args, **kwargs)``. Its rank is ``phalanx.init().rank``, or RANK
            in the environment.
        args, kwargs: its arguments, the same on all ranks. Tensors are copies: what a rank changes in them, it alone
            sees.
        n: how many ranks: a number; ``gpu``, one for each accelerator; ``cpu``, one for each core; ``auto``, as
            ``gpu``, or as ``cpu`` without one.
        device: where ranks compute: ``cpu``, ``cuda``, …; by default the accelerator of each local rank, or the CPU.
        variables: variables of the environment that all ranks get beside those of this process.
        start_method: ``fork``; ``spawn``, a fresh interpreter, for which the function must be defined in a module or
            cloudpickle be installed; by default the first of them that can work.
        quiet: print neither the rank table nor notes.
        prefix: write ``[rank 3]`` before each line of output.

    Returns:
        The results, by rank. They have been pickled, so they are copies, too; None where the function called
        ``sys.exit()``.

    Raises:
        RankFailed: a rank raised an exception, exited with another code than 0, was killed, or returned something that
            cannot be pickled. The message says which rank was the first, and has its traceback.
        ArgumentError: an argument cannot be right.
        LaunchError: the ranks cannot be started; the message says what to change.
        KeyboardInterrupt: Ctrl-C; all ranks have been ended.
    """
    require(launch, function, args, kwargs)
    if start_method not in (None, "fork", "spawn"):
        raise ArgumentError(f"start_method={start_method!r} is neither 'fork' nor 'spawn'; leave it out for the best")
    _refuse_in_rank()
    name = getattr(function, "__qualname__", type(function).__qualname__)
    options = LaunchOptions(ranks=_count(n), quiet=quiet, prefix=prefix, device=device)
    job = make_job(options, Target("function", name, "", (name,)))
    call = (function, tuple(args), dict(kwargs or {}))
    reason = _why_not_fork() if start_method != "spawn" else "a fresh interpreter was asked for"
    if reason and start_method == "fork":
        raise LaunchError(f"the ranks cannot be forked: {reason}")
    pickled = b""
    if reason:
        try:
            pickled = _pickled(call)
        except LaunchError as error:
            raise error if start_method else LaunchError(f"the ranks cannot be forked: {reason}; and {error}") from None
    return _Call(job, call, pickled, dict(variables or {})).run()


def _count(n: int | str) -> int:
    if isinstance(n, str) and n in COUNTED_HERE:
        return count_ranks(n)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ArgumentError(f"n={n!r} is not a number of ranks; give one from 1 on, or 'auto', 'gpu' or 'cpu'")
    return n


def _refuse_in_rank() -> None:
    """Refuse to start ranks in a process that is one of several, or that a launcher of ours has started."""
    try:
        others = read_environment().place().world_size > 1
    except InitializationError:
        others = False  # variables that are left over from something
    if others or settings.RUN_ID in os.environ:
        raise LaunchError(
            "phalanx.launch() was called in a process that is a rank itself; call the function there, and let "
            "phalanx.init() join the ranks, or start this program without a launcher"
        )


def _why_not_fork() -> str:
    """Say why ranks cannot be forked from this process, with what the user can do; empty if they can."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "this process is in a process group, which a fork would share; leave it before, with phalanx.close()"
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return "this process has started MPI, which does not work in a fork; restart the interpreter"
    if device := _opened(torch):
        return (
            f"this process has used {device} already, and a fork cannot; restart the interpreter, and touch the device "
            "in the function alone (torch.cuda.is_available() counts, too)"
        )
    return ""


def _opened(torch: Any) -> str:
    """Name the accelerator that this process has opened so that no fork can use it; empty if it has opened none."""
    accelerator = torch.accelerator.current_accelerator()
    in_bad_fork = getattr(torch.get_device_module(accelerator), "_is_in_bad_fork", None) if accelerator else None
    if in_bad_fork is None:
        return ""
    with _unwarned():
        pid = os.fork()  # torch knows it only in a fork
    if pid == 0:
        bad = True
        try:
            bad = bool(in_bad_fork())
        finally:
            os._exit(bad)
    _, status = os.waitpid(pid, 0)
    return str(accelerator.type) if status != 0 else ""


def _fork_apart(child: Callable[[int], NoReturn]) -> tuple[int, Callable[[], None]]:
    """Fork from a thread of its own, with all signals blocked in the child, which gets its parent's process id.

    Returns:
        The child's process id, and a function to be called when the child has ended: its forking thread lives until
        then, because the kernel takes the end of that thread for the end of the parent (PR_SET_PDEATHSIG).

    Raises:
        LaunchError: the system refuses another process.
    """
    parent = os.getpid()
    forked, ended = threading.Event(), threading.Event()
    outcome: list[int | OSError] = []

    def fork() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with _unwarned():
                outcome.append(os.fork())
        except OSError as error:
            outcome.append(error)
        if outcome == [0]:
            try:
                child(parent)
            except BaseException:
                os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
            finally:
                os._exit(70)
        forked.set()
        ended.wait()

    def end() -> None:
        ended.set()
        thread.join()

    thread = threading.Thread(target=fork, name="phalanx-fork", daemon=True)
    thread.start()
    forked.wait()
    if isinstance(outcome[0], OSError):
        end()
        raise LaunchError(
            f"the ranks cannot be started: {outcome[0].strerror}; {PROCESS_LIMIT_HINT}, or free memory"
        ) from outcome[0]
    return outcome[0], end


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Leave out the warning of Python 3.12 that a process with threads forks; the top of this file says why it may."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _pickled(call: _Function) -> bytes:
    """Pickle a function with its arguments so that a fresh interpreter can unpickle them.

    Raises:
        LaunchError: something in them cannot be pickled, or cloudpickle would be needed and is not installed.
    """
    try:
        try:
            import cloudpickle
        except ImportError:
            if getattr(call[0], "__module__", "") == "__main__":
                raise pickle.PicklingError(f"{call[0].__qualname__} is defined in __main__") from None
            return pickle.dumps(call, protocol=5)
        pickled: bytes = cloudpickle.dumps(call, protocol=5)
        return pickled
    except Exception as error:
        raise LaunchError(
            f"the function and its arguments cannot be sent to a fresh interpreter: {error}; define it in a module, or "
            f"install cloudpickle"
        ) from error


class _Call:
    """One call of :func:`launch`: the supervisor, its output, the results.

    ``pickled`` is the call for a fresh interpreter; empty to fork. ``variables`` are set for all ranks.
    """

    def __init__(self, job: Job, call: _Function, pickled: bytes, variables: Mapping[str, str]) -> None:
        self._job, self._call, self._pickled, self._variables = job, call, pickled, variables
        self._pid = 0
        self._has_ended: Callable[[], None] = lambda: None
        self._interrupts = 0
        self._results: list[int] = []  # files in memory, one for each rank
        self._reason = -1  # and one for why the job failed
        self._outputs: dict[int, _Output] = {}

    def run(self) -> list[Any]:
        """Start the ranks, show their output until all have ended, return the results."""
        if not self._pickled:
            import_for_ranks()  # torch above all: once here, and not in each call, or in each rank
        with self._interrupts_handed_on():
            try:
                try:
                    self._start()
                except OSError as error:
                    raise LaunchError(
                        f"the ranks cannot be started: {error.strerror}; if it is the limit on open files, raise it "
                        "(ulimit -n), or start fewer ranks"
                    ) from error
                if self._interrupts:
                    os.kill(self._pid, signal.SIGINT)  # it came before there was a process to hand it on to
                while self._outputs:
                    self._show()
                return self._conclude(self._wait())
            finally:
                self._tidy_up()

    @contextlib.contextmanager
    def _interrupts_handed_on(self) -> Iterator[None]:
        """Hand Ctrl-C on to the ranks, and have it raise nothing here. The first one ends them, the second kills."""

        def hand_on(signum: int, frame: FrameType | None) -> None:
            self._interrupts += 1
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
            yield
            return
        signal.signal(signal.SIGINT, hand_on)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _start(self) -> None:
        self._reason = os.memfd_create("phalanx-reason")
        for rank in range(self._job.ranks):
            self._results.append(os.memfd_create(f"phalanx-result-{rank}"))
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):
                # What is still in its buffer would be copied by a fork, and would come after the ranks' lines.
                stream.flush()  # type: ignore[union-attr]
        with _starting:
            (out_read, out), (err_read, err) = os.pipe(), os.pipe()
            self._outputs = {out_read: _Output(sys.stdout), err_read: _Output(sys.stderr)}
            try:
                if self._pickled:
                    self._pid = self._spawn(out, err)
                else:
                    self._pid, self._has_ended = _fork_apart(lambda parent: self._be_supervisor(parent, out, err))
            finally:
                os.close(out)
                os.close(err)

    def _be_supervisor(self, parent: int, out: int, err: int) -> NoReturn:
        """In the fork: become the supervisor of the ranks."""
        # Out of the notebook's process group, to which its interrupt is sent: it is handed on, once.
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        for descriptor in (out, err, *self._outputs):
            os.close(descriptor)
        forget_interpreter()
        os.environ.update(self._variables)
        function, arguments, named = self._call
        supervise(self._job, lambda: function(*arguments, **named), self._results, self._reason, parent)

    def _spawn(self, out: int, err: int) -> int:
        """Start a fresh interpreter that becomes the supervisor; return its process id."""
        with open(os.memfd_create("phalanx-start"), "w+b") as file:
            pickle.dump((self._job, self._pickled, self._variables, self._results, self._reason, os.getpid()), file)
            file.flush()
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(file.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    pass_fds=(file.fileno(), self._reason, *self._results),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise LaunchError(f"a fresh interpreter ({sys.executable!r}) cannot be started: {error}") from error
        process.returncode = 0  # its end is awaited by its process id, and not by this object
        return process.pid

    def _show(self) -> None:
        """Wait for output, and show it. It ends when the supervisor and all of its helpers have ended."""
        poll = select.poll()
        for descriptor in self._outputs:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            data = os.read(descriptor, _BLOCK)
            self._outputs[descriptor].show(data)
            if not data:
                del self._outputs[descriptor]
                os.close(descriptor)

    def _wait(self) -> int:
        """Reap the supervisor; return its exit code, or minus the signal that ended it."""
        pid, self._pid = self._pid, 0
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:
            return 0  # somebody has reaped it: what it has left says how it ended

    def _conclude(self, status: int) -> list[Any]:
        if self._interrupts:
            raise KeyboardInterrupt
        with open(self._reason, "rb", closefd=False) as file:
            said = file.read()
        if said:
            reason = json.loads(said)
            text = reason["text"].removeprefix("phalanx: ").rstrip("\n")
            if reason["rank"] < 0:
                raise LaunchError(text)
            raise RankFailed(text, rank=reason["rank"], exit_code=reason["code"])
        if status != 0:
            raise LaunchError(
                f"the process that supervises the ranks has ended, and they with it: {describe_status(status)}. If "
                f"nobody killed it, {OUT_OF_MEMORY_HINT}"
            )
        return [self._result(rank) for rank in range(self._job.ranks)]

    def _result(self, rank: int) -> Any:
        who = f"rank {rank} of {self._job.ranks}"
        with open(self._results[rank], "rb", closefd=False) as file:
            if file.seek(0, os.SEEK_END) == 0:
                text = f"{who} ended without a result: has something called os._exit()?"
                raise RankFailed(text, rank=rank, exit_code=0)
            file.seek(0)
            try:
                return pickle.load(file)
            except Exception as error:
                text = (
                    f"the result of {who} cannot be rebuilt here: {type(error).__name__}: {error}; return tensors, "
                    "numbers, lists or dictionaries"
                )
                raise RankFailed(text, rank=rank, exit_code=0) from error

    def _tidy_up(self) -> None:
        """End what still runs, after an error in this process, and close everything."""
        if self._pid:
            # Its helpers notice its end, and end the ranks and themselves.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            for descriptor in self._outputs:
                while os.read(descriptor, _BLOCK):
                    pass
            self._wait()
        self._has_ended()
        for descriptor in (*self._outputs, *self._results, *([self._reason] if self._reason >= 0 else [])):
            os.close(descriptor)


class _Output:
    """One of the supervisor's two streams, on its way to the stream of this interpreter, if that has one."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._text = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""

    def show(self, data: bytes) -> None:
        """Show all lines that are complete with this block; at the end, for an empty block, the rest."""
        text = self._rest + self._text.decode(data, final=not data)
        end = text.rfind("\n") + 1 if data else len(text)
        lines, self._rest = text[:end], text[end:]
        if lines and self._stream is not None:
            self._stream.write(lines)
            self._stream.flush()
