"""The steps of a forked child until the user's script runs, and its report when the script fails.

The script must not notice the launcher: it runs as ``__main__`` at the top of the interpreter, which finalises as after
``python script``. So a rank first *enters* its process (:func:`enter_rank`, right after the fork), then returns a
:class:`RankStart` all the way up to ``phalanx.commands.main.main``, and only there *becomes* the script
(:func:`become`).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import importlib
import importlib.machinery
import io
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

from phalanx.diagnosis.ends import tell_of_exit
from phalanx.diagnosis.recorder import keep_in
from phalanx.diagnosis.stacks import publish_by
from phalanx.errors import PhalanxError
from phalanx.launch.job.memory import apply_to_this_process
from phalanx.launch.job.target import Target
from phalanx.launch.output.failure import Report
from phalanx.launch.protocol import RankPlan
from phalanx.launch.rank.preload import apply_threads, hide_torch
from phalanx.launch.rank.trace import (
    Stage,
    advance,
    note_asked,
    open_own,
    place_of_recorder,
)
from phalanx.system import processes
from phalanx.system.threads import renew_engine
from phalanx.topology.frameworks import cpu_settings
from phalanx.training.should_stop import arm

__all__ = ["RankStart", "become", "enter_rank", "leave_siblings", "report_name", "reported"]

_GLOO_IS_LEFT = re.compile(r"gloo/transport/.*\bConnection (?:reset|closed) by peer")
# The functions through which every operation of torch goes; below the script's call they say nothing to a user.
_WAYS_INTO_TORCH = (
    "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d",
    "phalanx.c10d.register",
    "phalanx.c10d.torch_backends",
)


def report_name(run_id: str, rank: int) -> str:
    """The name of a rank's report file, as ``/proc/<pid>/fd`` shows it."""
    return f"{run_id}-rank-{rank}"


@dataclass(frozen=True)
class RankStart:
    """A process that is about to become a rank."""

    plan: RankPlan
    target: Target
    run_id: str
    environment: dict[str, str]  # what is added to the environment it was started with
    code: types.CodeType | None  # the compiled target; None for a program or a function
    spec: importlib.machinery.ModuleSpec | None  # the future ``__main__.__spec__``; None for a plain script
    parent: int  # the process id of the agent, with which this process ends
    part: int  # its part of the trace
    quiet: bool  # whether it prints no notes
    # stop_cell, stop_on: the words by which it and its agent agree on a stop, and the signals that ask for one
    stop_cell: memoryview
    stop_on: Sequence[int]
    outputs: tuple[int, int]  # the writing ends of its output and error
    # report, trace: the memfds for its report, and of its agent's ranks together
    report: int
    trace: int
    # the process in which this object was made; a child that the script forks is not the rank
    pid: int = field(default_factory=os.getpid)


def enter_rank(start: RankStart, handlers: dict[int, Any], file_limit: tuple[int, int]) -> None:
    """Turn the child of a fork into a process of its own, with the handlers and limits that the interpreter began with.

    Signals are blocked on entry, and not on return.
    """
    processes.die_with_parent(start.parent)
    # A session of its own: the terminal cannot stop it, and all processes that the rank starts can be found by it.
    os.setsid()
    processes.set_name(f"rank-{start.plan.rank}")
    if start.plan.cpus:
        os.sched_setaffinity(0, start.plan.cpus)
        processes.take_memory_nearby()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if not start.plan.reads:
        processes.release_input()
    for descriptor, output in enumerate(start.outputs, 1):
        if not start.plan.terminal:
            os.dup2(output, descriptor)
        os.close(output)
    # With the launcher's raised limit a script would get descriptors too high for select().
    resource.setrlimit(resource.RLIMIT_NOFILE, file_limit)
    os.environ.update(start.environment)
    os.environ.update(cpu_settings(os.environ))
    time.tzset()  # Python does not look at TZ again by itself
    apply_to_this_process(os.environ)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"/proc/{start.pid}/fd/{start.report}"
    if not start.target.is_python:
        # The program's own children may write the report too, as torch's @record does.
        os.set_inheritable(start.report, True)
        os.close(start.trace)
        return
    sys.stdin = _stream(sys.stdin, 0, "r")
    sys.stdout = _stream(sys.stdout, 1, "w")
    sys.stderr = _stream(sys.stderr, 2, "w")
    faulthandler.enable()
    renew_engine()
    open_own(start.trace, start.part)
    publish_by(note_asked)
    keep_in(place_of_recorder)
    arm(start.stop_cell, start.parent, start.stop_on)


def _stream(stream: TextIO | None, descriptor: int, mode: str) -> TextIO:
    """The interpreter's own stream, line buffered; a new one if the launcher was started without that stream."""
    if stream is None:
        return cast("TextIO", open(descriptor, mode, buffering=1, closefd=False))
    if mode == "w" and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True)
    return stream


def leave_siblings(start: RankStart) -> None:
    """Renew what a fresh process would have of its own, in a rank that was forked from a process with torch.

    docs/design/launching.md lists what ranks share. A function may use a torch that was imported before the fork, so
    torch is not hidden from it, and is told how many threads the rank has.
    """
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    processes.skip_library_teardown()  # it would copy the pages that the ranks have in common
    if start.target.kind == "function":
        apply_threads()
        _record_other_backends()
        return

    def imported() -> None:
        advance(Stage.IMPORTED)
        _record_other_backends()

    hide_torch(start.quiet or start.plan.rank != 0, imported)


def _record_other_backends() -> None:
    """Where torch was imported before the fork. Where it is imported later, it calls the same function itself."""
    if register := sys.modules.get("phalanx.c10d.register"):
        register.record_other_backends()


def become(start: RankStart) -> None:
    """Run the target in this process; call it at the top of the interpreter, which then finalises.

    Raises:
        SystemExit: the script called ``sys.exit``, or an exception ended it that has been reported (code 1).
        KeyboardInterrupt: it was interrupted.
    """
    target, spec = start.target, start.spec
    if start.code is None:
        _execute(start)
        return
    sys.argv = list(target.argv)
    # A program that starts itself again goes by this, and must not start the launcher again.
    named = ("-m", target.name) if target.kind == "module" else target.argv[:1]
    sys.orig_argv = [sys.executable, *named, *target.argv[1:]]
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path[0] = target.search_path
    main = types.ModuleType("__main__")
    known: dict[str, Any] = {"__builtins__": builtins, "__spec__": spec}
    if spec is None:
        loader = importlib.machinery.SourceFileLoader("__main__", target.path)
        known |= {"__file__": target.path, "__cached__": None, "__loader__": loader, "__package__": None}
    else:
        known |= {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader}
        known["__package__"] = spec.parent
    main.__dict__.update(known)
    # multiprocessing's children name the script's classes by the second name, and their parent looks them up by it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    # Exit handlers run in reverse order, so the script's own run first, and may join yet.
    atexit.register(_note_end, start)
    with reported(start):
        if spec is not None and spec.parent:
            importlib.import_module(spec.parent)
        exec(start.code, main.__dict__)


@contextlib.contextmanager
def reported(start: RankStart) -> Iterator[None]:
    """Report the exception that ends the body, which runs as this rank's script, as :func:`become` says."""
    hook = sys.excepthook = _Hook(start)
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            _report(start, error, shown=True)
            if (code := _code_of(error)) and os.getpid() == start.pid:
                tell_of_exit(error, code)
        raise
    except KeyboardInterrupt as error:
        # The interpreter then ends itself by SIGINT, as the shell expects. The launcher decides whether to show it.
        _report(start, error, shown=False)
        raise
    except BaseException as error:
        _fail(start, hook, error)
        raise SystemExit(1) from None


def _code_of(error: SystemExit) -> int:
    # The interpreter exits with 1 after sys.exit("a text"), and prints the text.
    return error.code & 0xFF if isinstance(error.code, int) else 0 if error.code is None else 1


def _note_end(start: RankStart) -> None:
    """Note that the script has come to its end, if this rank had met the others."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    has_met = getattr(sys.modules.get("phalanx.c10d.register"), "has_met", False)
    has_world = getattr(sys.modules.get("phalanx.world"), "_openings", 0)
    if has_met or has_world or (c10d is not None and c10d.is_initialized()):
        advance(Stage.ENDED)


class _Hook:
    """The exception hook that a script finds: it leaves the traceback to the launcher, which shows it once.

    If the script installs a hook of its own, that hook prints the exception and the launcher does not. A hook that
    calls the one it found still gets here: so does torch's after ``init_process_group``, which prefixes the rank.
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
    # As the interpreter does before it calls the hook: by it a hook knows that the script has ended.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, own
    # Reported before the hook runs: the script failed now, and not when a slow hook has returned.
    now = time.monotonic()
    written = _report(start, error, shown=True, now=now)
    try:
        sys.excepthook(type(error), error, own)
    except BaseException:
        sys.__excepthook__(type(error), error, own)
    if hook.reached and not (written and _report(start, error, shown=False, now=now)):
        sys.__excepthook__(type(error), error, own)


def traceback_of_script(error: BaseException) -> types.TracebackType | None:
    """Cut the frames above the script's: those of the launcher and of the import system."""
    frames = error.__traceback__
    while frames is not None:
        name = frames.tb_frame.f_globals.get("__name__", "")
        is_launcher = name == "importlib" or name.startswith("phalanx.launch.")
        if not is_launcher and not frames.tb_frame.f_code.co_filename.startswith("<frozen "):
            break
        frames = frames.tb_next
    return frames


def _format_traceback(error: BaseException, own: types.TracebackType | None) -> str:
    """The traceback as text; for an error of an operation down to the script's own call, whose line says it all."""
    told = traceback.TracebackException(type(error), error, own)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(own)]
    if isinstance(error, PhalanxError):
        inside = [name.partition(".")[0] in ("torch", "phalanx") for name in modules]
    else:
        inside = [name in _WAYS_INTO_TORCH for name in modules]
    length = max((at for at, is_inside in enumerate(inside, 1) if not is_inside), default=len(modules))
    told.stack = traceback.StackSummary.from_list(told.stack[:length])
    return "".join(told.format())


def _is_consequence(error: BaseException) -> bool:
    """Return whether an error always comes of another rank's end."""
    if isinstance(error, PhalanxError):
        return error.is_consequence
    # Gloo raises a plain RuntimeError when another process has ended, or has closed the connection to this one.
    return isinstance(error, RuntimeError) and _GLOO_IS_LEFT.search(str(error)) is not None


def _report(start: RankStart, error: BaseException, *, shown: bool, now: float | None = None) -> bool:
    """Write the error into the report file; return whether that is there, and not closed by the script."""
    if os.getpid() != start.pid:
        return False  # a child that the script has forked
    if isinstance(error, SystemExit):
        code, message = _code_of(error), "" if isinstance(error.code, int) else str(error.code)
    else:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        try:
            message = str(error)
        except Exception:
            message = "<its __str__ failed>"
    report = Report(
        type=f"{type(error).__module__}.{type(error).__qualname__}",
        message=message,
        traceback="" if shown else _format_traceback(error, traceback_of_script(error)),
        shown=shown,
        exited=isinstance(error, SystemExit),
        consequence=_is_consequence(error),
        time=time.monotonic() if now is None else now,
        code=code,
        hint=_hint(start, error),
    )
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{start.report}").startswith(f"/memfd:{start.run_id}-"):
            data = json.dumps(report.to_record()).encode()
            os.pwrite(start.report, data, 0)
            os.ftruncate(start.report, len(data))
            # Other ranks may be waiting for this one, and its exit handlers and threads may delay its end for long.
            os.kill(start.parent, signal.SIGUSR1)
            return True
    return False


def _hint(start: RankStart, error: BaseException) -> str:
    """Return what is known of the cause beyond the exception's own text."""
    if start.target.kind == "function":
        return ""  # the remedies are options of the command
    if type(error).__name__ == "BdbQuit" and type(error).__module__ == "bdb" and not start.plan.reads:
        return f"a debugger needs the terminal: phalanx run --debug {start.plan.rank} …"
    if isinstance(error, EOFError) and not start.plan.reads:
        return f"if it wanted to read the terminal or a pipe: phalanx run --stdin {start.plan.rank} …"
    return ""


def _execute(start: RankStart) -> None:
    """Replace this process with a program that is not Python."""
    # Python ignores these signals; a program expects the defaults, as a shell leaves them.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    target = start.target
    try:
        os.execv(target.path, target.argv)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"phalanx: {target.name} cannot be executed: {error.strerror}\n".encode(errors="backslashreplace"))
        os._exit(code)
