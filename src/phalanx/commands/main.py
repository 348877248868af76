"""Run the command line ``phalanx``: find a command's file, call the command, and act on what it returns.

A command is a file in this folder with a function of the same name, and its name in ``COMMANDS``. The function returns
an exit code, or None for 0; ``run`` returns a job, which is launched here.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module

import click

from phalanx import settings
from phalanx.errors import ArgumentError, LauncherEnvironmentError, LaunchError
from phalanx.words import did_you_mean, tell

COMMANDS = ("bench", "doctor", "env", "explain", "list", "report", "run", "stop", "timeline", "top")


class _Commands(click.Group):
    """Load a command's file only when it is called, so that ``phalanx run`` does not import what ``bench`` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            meant = did_you_mean(cmd_name, COMMANDS)
            raise ArgumentError(f"no such command {cmd_name}; {meant}phalanx --help lists all")
        if cmd_name != "run" and isinstance(sys.stdout, io.TextIOWrapper):  # that of `run` becomes its ranks' own
            sys.stdout.reconfigure(errors="backslashreplace")
        found: click.Command = getattr(import_module(f"phalanx.commands.{cmd_name}"), cmd_name)
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(settings.VERSION, prog_name="phalanx")
def command() -> None:
    """Run one PyTorch program as many processes.

    \b
      phalanx run -n 4 train.py --lr 0.1      four ranks on this machine
      phalanx doctor                          what stands in the way of a job here
      phalanx list                            your jobs that run on this machine
      phalanx report DIR                      why a job hung that ran with --report-dir or --log-dir DIR
      phalanx timeline DIR                    for which rank the others waited in a job that ran with --log-dir DIR
      phalanx explain all_reduce              how a collective works, step by step
      phalanx explain PeerLost                what an error means, and what to do
    """


def main() -> int | None:
    """Run the command line, and return the exit code; the entry point of ``phalanx``.

    Each rank of a job is a fork of this process. It returns to this function before it runs the user's script, so that
    the script runs at the top of the interpreter, which then finalises as after ``python script``.
    """
    words = sys.argv[1:] or ["--help"]
    own = (*COMMANDS, "-h", "--help", "--version")
    if words[0] not in own and (words[0].startswith("-") or words[0].endswith(".py") or os.sep in words[0]):
        words = ["run", *words]  # users of torchrun leave it out: phalanx -n 4 train.py
    try:
        outcome = command(words, prog_name="phalanx", standalone_mode=False)
        if outcome is None or isinstance(outcome, int):
            return outcome or 0
        # Not imported at the top, because only `run` needs it.
        from phalanx.launch.attempts import launch
        from phalanx.launch.rank.start import become

        started = launch(outcome)
    except (ArgumentError, LaunchError, LauncherEnvironmentError) as error:
        tell(str(error))
        return 2
    except click.ClickException as error:
        tell(_in_one_line(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        tell(f"the output cannot be written: {error.strerror}")
        return os.EX_IOERR
    if isinstance(started, int):
        return started
    become(started)
    return None


def _in_one_line(error: click.ClickException) -> str:
    """Word an error of click's as ours are."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "phalanx"
    if isinstance(error, click.FileError):
        return f"{error.ui_filename} cannot be written: {error.message}"
    if isinstance(error, click.NoSuchOption):
        meant = did_you_mean(error.option_name, error.possibilities or ())
        return f"no such option {error.option_name}; {meant}{path} --help lists all"
    text = error.format_message().rstrip(".")
    return f"{text[:1].lower()}{text[1:]}; {path} --help says more"
