"""``phalanx.launch()``: ranks for a function of a running interpreter, in a notebook above all.

Prior art: Accelerate's ``notebook_launcher`` and torch's elastic ``start_processes``; docs/design/launching.md compares
them. The ranks are those of ``phalanx run``: one process supervises them (``supervise.py``), and this one only shows
what it writes, hands Ctrl-C on, and reads the results.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, NoReturn, TextIO, TypeVar

from phalanx import settings
from phalanx.errors import OUT_OF_MEMORY_HINT, ArgumentError, InitializationError, LaunchError, RankFailed
from phalanx.launch.function.starting import fork_apart, pickle_call, spawn, why_not
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

    For notebooks and prompts; a script is started by ``phalanx run``. The ranks join each other as those of ``phalanx
    run`` do, by ``phalanx.init()`` or ``torch.distributed.init_process_group()`` in the function. What they print
    appears here line by line, each with its rank. Ctrl-C, or a notebook's interrupt, ends all of them. May be called
    any number of times; nothing is left behind.

    By default the ranks are forks of this interpreter, with all that is defined in it, so functions and data of a
    notebook need no module and no pickle; the first call imports torch here, if nobody has. If a fork could not work
    (this process has used an accelerator, or is in a process group), a fresh interpreter starts them, to which the
    function and its arguments are sent.

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
            cannot be pickled. The message says which rank was the first, and has its traceback; the others have been
            ended.
        ArgumentError: an argument cannot be right.
        LaunchError: the ranks cannot be started: there is no room for so many, this process is a rank itself, or
            neither start method works. The message says what to change.
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
    reason = why_not() if start_method != "spawn" else "a fresh interpreter was asked for"
    if reason and start_method == "fork":
        raise LaunchError(f"the ranks cannot be forked: {reason}")
    pickled = b""
    if reason:
        try:
            pickled = pickle_call(call)
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


class _Call:
    """One call of :func:`launch`: the supervisor, its output, the results.

    ``pickled`` is the call for a fresh interpreter; empty to fork. ``variables`` are set for all ranks.
    """

    def __init__(self, job: Job, call: _Function, pickled: bytes, variables: Mapping[str, str]) -> None:
        self._job, self._call, self._pickled, self._variables = job, call, pickled, variables
        self._pid = 0
        self._has_ended: Callable[[], None] | None = None
        self._interrupts = 0
        self._results: list[int] = []
        self._reason = -1
        self._outputs: dict[int, _Output] = {}

    def run(self) -> list[Any]:
        """Start the ranks, show their output until all have ended, return the results."""
        if not self._pickled:
            import_for_ranks()  # torch above all: once here, and not in each call, or in each rank
        before = self._take_interrupts()
        try:
            try:
                self._reason = os.memfd_create("phalanx-reason")
                for rank in range(self._job.ranks):
                    self._results.append(os.memfd_create(f"phalanx-result-{rank}"))
                with _starting:
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
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def _take_interrupts(self) -> Any:
        """Hand Ctrl-C on to the ranks while they run, and have it raise nothing here; return the handler of before."""
        if threading.current_thread() is not threading.main_thread():
            return None

        def hand_on(signum: int, frame: FrameType | None) -> None:
            # The first one asks the ranks to end, the second kills them; the supervisor counts.
            self._interrupts += 1
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)
        if before in (None, signal.SIG_IGN):
            return None
        signal.signal(signal.SIGINT, hand_on)
        return before

    def _start(self) -> None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):
                # What is still in its buffer would be copied by a fork, and would come after the ranks' lines.
                stream.flush()  # type: ignore[union-attr]
        (out_read, out), (err_read, err) = os.pipe(), os.pipe()
        self._outputs = {out_read: _Output(sys.stdout), err_read: _Output(sys.stderr)}
        try:
            if self._pickled:
                self._pid = spawn(self._job, self._pickled, self._variables, self._results, self._reason, out, err)
            else:
                self._pid, self._has_ended = fork_apart(lambda parent: self._be_supervisor(parent, out, err))
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
        if self._has_ended is not None:
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
