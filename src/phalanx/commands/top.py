"""``phalanx top``: how the ranks of a running job are getting on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import click

from phalanx.commands import Seconds

if TYPE_CHECKING:
    from phalanx.launch.running.watching import Look, Watcher

_INTERVAL = "The time between two looks. It grows if looking would need more than 0.25 % of a host's cores."
# The first table comes after so long, if the interval is longer.
_FIRST_S = 0.5


@click.command()
@click.argument("job", metavar="[JOB]", required=False)
@click.option(
    "--interval", "interval_s", type=Seconds(0.05), default=1.0, show_default=True, metavar="S", help=_INTERVAL
)
@click.option("--once", is_flag=True, help="Look for one interval, print that, and end.")
@click.option("-H", "--host", metavar="HOST", help="The host on which phalanx run was called, if that is not this one.")
@click.option("--starter", metavar="COMMAND", help="With -H, in place of ssh, as of phalanx run.")
@click.option("--json", "as_json", is_flag=True, help="Print each look as a JSON object on a line of its own.")
def top(job: str | None, interval_s: float, once: bool, host: str | None, starter: str | None, as_json: bool) -> None:
    """Show live how each rank of a running job is getting on. Ctrl-C ends this, and not the job.

    JOB is the id that phalanx list shows, or its beginning, or the process id of phalanx run; by default the only job.

    \b
      phalanx top                the only job of yours on this host
      phalanx top 3f2a --interval 5
      phalanx top --once         one table, as for a log
      phalanx top --json         for programs
      phalanx top -H login1      a job that was started on another host

    \b
      state       waits: in an operation, or for the answer to a call by RPC. computes, sleeps: in none, on a core or
                  not. stopped: by a signal, as of kill -STOP. in a debugger, waits for disk, ended
      step        what the script says: world.step(number), phalanx.label("evaluation")
      steps/s     the mean over the last 20 steps
      data/s      the bytes of the operations that have ended, of this rank's tensors
      comm        the share of the time in operations. A rank that waits for a slow one has much, the slow one little
      lag         how many collectives the rank is behind the first of its group's ranks that are shown
      memory      in RAM, with what it shares with other ranks
      cores       how many it has kept busy; waiting for others keeps one busy for a while, too
      operation   which it is in, where the script calls it, which rank it waits for there, and since when; or the last
                  one (after ...)

    It asks the job's launcher, and that the agents of all hosts. They read /proc and the ranks' flight recorders, the
    memory in which the ranks note their operations anyway: these do nothing for it. Of torch's own backends, such as
    gloo and nccl, they have what Python calls, and of what C++ does, such as DDP's gradients, what has lasted for two
    seconds. Hosts that do not answer within a second are named.

    With -H the command runs on that host, by ssh or by --starter; JOB is its id there.

    The objects of --json have job (as of phalanx list --json), at, interval_s, ranks, elsewhere (ranks on other hosts
    that are not shown, by host), and notes. Each of ranks has rank, pid, host, state (waits, computes, sleeps, disk,
    stopped, debugged, ended), operation (null if it is in none), last (the last one to begin), operations (how many
    have begun), operations_per_s, bytes_per_s, steps_per_s, step, label, communication (from 0 to 1), lag,
    resident_bytes, cores, and asked (what it waits for by RPC). What is not known is null.

    It ends when the job does. Exit codes: 0; 2 if there is no such job, or JOB fits several.
    """
    if starter is not None and host is None:
        raise click.UsageError("--starter says how another host is reached; name that with -H")
    with contextlib.suppress(OSError):
        os.nice(10)  # where cores are scarce they are the ranks'
    with contextlib.suppress(KeyboardInterrupt):
        if host is None:
            _look_here(job, interval_s, once, as_json)
        else:
            words = ["--interval", str(interval_s), *["--once"] * once, *["--json"] * as_json, *([job] if job else [])]
            raise SystemExit(_look_there(host, starter, words))


def _look_here(job: str | None, interval_s: float, once: bool, as_json: bool) -> None:
    from phalanx.launch.running.jobs import find_job
    from phalanx.launch.running.watching import Watcher

    watcher = Watcher(find_job(job))
    try:
        if _watch(watcher, interval_s, as_json, once):
            return
        click.echo(f"job {watcher.job.id} has ended", err=as_json)
    except BrokenPipeError:  # nobody reads any more, as behind head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter writes when it ends


def _look_there(host: str, starter: str | None, words: list[str]) -> int:
    """Run this command on another host; ssh hands it this terminal. Its exit code."""
    from phalanx.launch.starters.ssh import command_for, parse_starter

    command = command_for(host, parse_starter(starter), (sys.executable, "-m", "phalanx", "top", *words))
    screen = command[0] == "ssh" and sys.stdin.isatty() and sys.stdout.isatty()
    if screen:
        command.insert(1, "-t")
    return subprocess.run(command, stdin=None if screen else subprocess.DEVNULL, check=False).returncode


def _watch(watcher: Watcher, interval_s: float, as_json: bool, once: bool) -> bool:
    """Print looks at a job, on the terminal's other page if there is one; return whether it may still run."""
    from phalanx.launch.running.rank_look import pause_after_s

    screen = sys.stdout.isatty() and not as_json and not once and os.environ.get("TERM", "dumb") != "dumb"
    pause_s = interval_s if once else min(interval_s, _FIRST_S)
    last: Look | None = None
    watcher.look()
    if screen:
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        while True:
            time.sleep(pause_s)
            used_s = time.process_time()
            look = watcher.look()
            if look is None:
                return False
            last = look
            _print(as_json, look, screen=screen)
            if once:
                return True
            used_s = time.process_time() - used_s
            pause_s = max(interval_s, pause_after_s(used_s), look.pause_s)
    finally:
        if screen:
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            if last is not None:
                _print(as_json, last)


def _print(as_json: bool, look: Look, *, screen: bool = False) -> None:
    from phalanx.launch.running.table import format_look, look_values

    size = shutil.get_terminal_size()
    if as_json:
        click.echo(json.dumps(look_values(look)))
    elif screen:
        text = format_look(look, width=size.columns, height=size.lines, color="NO_COLOR" not in os.environ)
        # Each line is cleared behind its end, and the page below the last one.
        sys.stdout.write("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J")
        sys.stdout.flush()
    else:
        click.echo(format_look(look, width=size.columns if sys.stdout.isatty() else None), nl=False)
