"""What happens in a forked child until the user's script runs, and when it fails.

The script must not notice the launcher: it runs as ``__main__`` at the top of the interpreter, with its own
``sys.argv`` and ``sys.path``, and the interpreter finalises as after ``python script``, so that exit
handlers, daemon threads, exception hooks and exit codes do what they always do. So a rank first *enters*
(right after the fork: descriptors and signals), returns a :class:`RankStart` all the way up to ``main()``, and
only there *becomes* the script.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import importlib
import importlib.machinery
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
import types
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

from phalanx.launch.job.target import Target
from phalanx.launch.rank.descriptors import RankEnds
from phalanx.system.processes import die_with_parent, set_name, skip_library_teardown
from phalanx.topology.frameworks import cpu_settings

__all__ = ["RankStart", "become", "enter_rank", "leave_siblings"]


@dataclass(frozen=True)
class RankStart:
    """A process that is about to become a rank.

    Attributes:
        rank: which one.
        target: what it will run.
        run_id: the job's name.
        environment: what is added to the environment it was started with.
        ends: its ends of the pipes and its report file.
        code: the compiled target; None for a program.
        spec: what ``__main__.__spec__`` will be; None for a plain script.
        parent: the process id of its parent (the zygote, or a keeper), with which this process ends.
        cpus: the logical cores it is bound to; empty for those of its parent.
        pid: the process in which this object was made; a child that the script forks is not the rank.
    """

    rank: int
    target: Target
    run_id: str
    environment: dict[str, str]
    ends: RankEnds
    code: types.CodeType | None
    spec: importlib.machinery.ModuleSpec | None
    parent: int
    cpus: tuple[int, ...] = ()
    pid: int = field(default_factory=os.getpid)


def enter_rank(start: RankStart, handlers: dict[int, Any], file_limit: tuple[int, int]) -> None:
    """Turn the child of a fork into a process of its own. Signals are blocked on entry, and not on return.

    Args:
        start: who this process is.
        handlers: the signal handlers the interpreter started with.
        file_limit: the limits on open files the interpreter started with.
    """
    die_with_parent(start.parent)
    # A session, not only a process group: a background group would be stopped when it touches the terminal,
    # a process without a terminal is not, and everything it starts can be found by its session.
    os.setsid()
    set_name(f"rank-{start.rank}")
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ends = start.ends
    if start.rank != 0 or os.isatty(0):
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    os.dup2(ends.out_write, 1)
    os.dup2(ends.err_write, 2)
    os.close(ends.out_write)
    os.close(ends.err_write)
    # Scripts that call select() cannot use the high descriptors a raised limit hands out.
    resource.setrlimit(resource.RLIMIT_NOFILE, file_limit)
    os.environ.update(start.environment)
    os.environ.update(cpu_settings(os.environ))
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"/proc/{start.pid}/fd/{ends.report}"
    if start.code is None:
        # What the program starts may write the report too, as torch's @record does.
        os.set_inheritable(ends.report, True)
        return
    sys.stdin = _stream(sys.stdin, 0, "r")
    sys.stdout = _stream(sys.stdout, 1, "w")
    sys.stderr = _stream(sys.stderr, 2, "w")
    faulthandler.enable()


def _stream(stream: TextIO | None, descriptor: int, mode: str) -> TextIO:
    """The interpreter's own stream, line buffered; or a new one where the launcher was started without."""
    if stream is None:
        return cast("TextIO", open(descriptor, mode, buffering=1, closefd=False))
    if mode == "w" and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True)
    return stream


def leave_siblings() -> None:
    """In a rank forked from a process that has imported torch: undo what separate processes would not share.

    That is random state and secrets; and libtorch's teardown would copy the pages that the ranks have in common.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    skip_library_teardown()


def become(start: RankStart) -> None:
    """Run the target in this process; call it at the top of the interpreter, which then finalises.

    Raises:
        SystemExit: the script ended by ``sys.exit``, or by an exception that has been reported (code 1).
    """
    target = start.target
    if start.code is None:
        _execute(start)
        return
    sys.argv = list(target.argv)
    _set_search_path(target.search_path)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __builtins__=builtins, __file__=target.path, __cached__=None, __spec__=start.spec, __package__=None
    )
    if start.spec is None:
        main.__dict__["__loader__"] = importlib.machinery.SourceFileLoader("__main__", target.path)
    sys.modules["__main__"] = main
    hook = sys.excepthook = _Hook(start)
    try:
        if start.spec is not None:
            main.__dict__.update(
                __file__=start.spec.origin,
                __cached__=start.spec.cached,
                __loader__=start.spec.loader,
                __package__=start.spec.parent,
            )
            if start.spec.parent:
                importlib.import_module(start.spec.parent)
        exec(start.code, main.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):
            _report(start, error, shown=True)
        raise
    except KeyboardInterrupt as error:
        # The interpreter ends itself by SIGINT, as the shell expects; whether to speak of it is the launcher's.
        _report(start, error, shown=False)
        raise
    except BaseException as error:
        _fail(start, hook, error)
        raise SystemExit(1) from None


def _set_search_path(entry: str) -> None:
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return
    sys.path[0] = entry


class _Hook:
    """The exception hook a script finds: it leaves the traceback to the launcher, which shows it once.

    A hook of the script's own replaces it, and then nothing is left to show. A hook that adds to the one it found
    (torch's, after ``init_process_group``, puts the rank before each line) still comes here in the end.
    """

    def __init__(self, start: RankStart) -> None:
        self.start = start
        self.reached = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if os.getpid() == self.start.pid:
            self.reached = True
        else:
            sys.__excepthook__(kind, error, trace)


def _fail(start: RankStart, hook: _Hook, error: BaseException) -> None:
    """Report an exception that nobody caught, and let the script's exception hook have it."""
    own = traceback_of_script(error)
    error.__traceback__ = own
    # Before the hook: the time of failing is now, not when a slow hook has returned.
    now = time.monotonic()
    written = _report(start, error, shown=True, now=now)
    try:
        sys.excepthook(type(error), error, own)
    except BaseException:
        sys.__excepthook__(type(error), error, own)
    if hook.reached and not (written and _report(start, error, shown=False, now=now)):
        sys.__excepthook__(type(error), error, own)


def traceback_of_script(error: BaseException) -> types.TracebackType | None:
    """The traceback without the launcher's frames and those of the import system above the script's."""
    frames = error.__traceback__
    while frames is not None:
        frame = frames.tb_frame
        name = frame.f_globals.get("__name__", "")
        above = name == "importlib" or name.startswith("phalanx.launch.")
        if not above and not frame.f_code.co_filename.startswith("<frozen "):
            break
        frames = frames.tb_next
    return frames


def _report(start: RankStart, error: BaseException, *, shown: bool, now: float | None = None) -> bool:
    """Write what happened into the report file, in the form of torch's ``@record``, with the clock's time.

    Returns:
        Whether it was written: a script may have closed every descriptor it did not know, and a child that it
        forked must not speak for the rank.
    """
    if os.getpid() != start.pid:
        return False
    own = traceback_of_script(error)
    if isinstance(error, SystemExit):
        code, message = _exit_code(error), "" if isinstance(error.code, int) else str(error.code)
    else:
        code, message = 1, _describe(error)
    text = "" if shown else "".join(traceback.format_exception(type(error), error, own))
    report = {
        "message": {
            "message": f"{type(error).__name__}: {message}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        },
        "phalanx": {
            "type": f"{type(error).__module__}.{type(error).__qualname__}",
            "message": message,
            "traceback": text,
            "shown": shown,
            "time": time.monotonic() if now is None else now,
            "code": code,
        },
    }
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{start.ends.report}").startswith(f"/memfd:{start.run_id}-"):
            data = json.dumps(report).encode()
            os.pwrite(start.ends.report, data, 0)
            os.ftruncate(start.ends.report, len(data))
            # The others may be waiting for this rank, and its end may be far: exit handlers, threads.
            os.kill(start.parent, signal.SIGUSR1)
            return True
    return False


def _describe(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<its __str__ failed>"


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _execute(start: RankStart) -> None:
    """Replace this process with a program that is not Python."""
    # Python ignores these; a program expects what its shell would give it.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    target = start.target
    try:
        os.execv(target.path, target.argv)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"phalanx: {target.name} cannot be executed: {error.strerror}\n".encode())
        os._exit(code)
