"""The command line: which commands there are, and what becomes of what they return."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from phalanx import settings
from phalanx.errors import ArgumentError, LauncherEnvironmentError, LaunchError
from phalanx.launch.job.job import Job
from phalanx.launch.rank.start import RankStart, become
from phalanx.launch.supervisor import launch

__all__ = ["main"]

# A file beside this one for each, with a function of its name; loaded when the command is called.
COMMANDS = ("bench", "env", "run")


class _Commands(click.Group):
    """Finds a command in the file of its name, so that ``phalanx run`` does not wait for what ``bench`` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"phalanx.commands.{cmd_name}"), cmd_name)
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(settings.VERSION, prog_name="phalanx")
def command() -> None:
    """Run one PyTorch program as many processes.

    \b
      phalanx run -n 4 train.py --lr 0.1      four ranks on this machine
      phalanx run --help                      everything about it
      phalanx env                             what this process would be, and why
      phalanx bench                           how long collectives take here
    """


def main() -> int | None:
    """Run the command line; the entry point of ``phalanx``.

    A rank is a fork of this very process and comes back up to here before it runs the user's script, so the
    script stands at the top of the interpreter, which then finalises as after ``python script``.

    Returns:
        The exit code. In a rank the script decides it, by ending.
    """
    try:
        outcome = command(prog_name="phalanx", standalone_mode=False)
        if isinstance(outcome, Job):
            outcome = launch(outcome)
    except (ArgumentError, LaunchError, LauncherEnvironmentError) as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    if isinstance(outcome, RankStart):
        become(outcome)
        return None
    return outcome if isinstance(outcome, int) else 0
