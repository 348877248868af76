"""The options of ``phalanx run`` about ranks that hang, and about mistakes that do not stop them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from phalanx.errors import LaunchError
from phalanx.launch.job.diagnosis import Diagnosis
from phalanx.launch.job.seconds import Seconds

__all__ = ["KEPT", "chosen_diagnosis", "diagnosis_options"]

#: Where a click context's ``meta`` has the values of these options, by name; the command's function does not get them.
KEPT = "phalanx.diagnosis"

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEFAULT = Diagnosis()


def diagnosis_options(command: _Command) -> _Command:
    """Give a command these options; :func:`chosen_diagnosis` says what was chosen."""
    for option in reversed(
        (
            click.option(
                "--warn-after",
                type=Seconds(),
                default=_DEFAULT.warn_after_s,
                show_default=True,
                metavar="SECONDS",
                expose_value=False,
                callback=_keep,
                help="Say which rank the others wait for, and where it is, once one has waited for so long; a rank "
                "that is stopped is named sooner. No report is written earlier. 0: say and report nothing.",
            ),
            click.option(
                "--report-dir",
                metavar="DIR",
                expose_value=False,
                callback=_keep,
                help="If the job stands still, write a report with every rank's stack and operations into this "
                "directory; phalanx report DIR prints it.  [default: that of --log-dir]",
            ),
            click.option(
                "--report-after",
                type=Seconds(0.1),
                default=_DEFAULT.report_after_s,
                show_default=True,
                metavar="SECONDS",
                expose_value=False,
                callback=_keep,
                help="Write the report, into --report-dir or --log-dir, after no rank has begun or ended an operation "
                "for so long.",
            ),
            click.option(
                "--strict",
                is_flag=True,
                expose_value=False,
                callback=_keep,
                help="Make it an error, and not a warning, if two ranks call the same lines in different "
                "orders: PHALANX_CALL_SITES=error. Over torch's own backends have torch compare the calls, which slows "
                "them: TORCH_DISTRIBUTED_DEBUG=DETAIL.",
            ),
        )
    ):
        command = option(command)
    return command


def _keep(context: click.Context, option: click.Parameter, value: Any) -> Any:
    context.meta.setdefault(KEPT, {})[option.name] = value
    return value


def chosen_diagnosis(log_dir: str, *, is_python: bool, ranks: int) -> tuple[Diagnosis, str]:
    """What the user of the running command has chosen. Makes the folder for reports, if one can be written.

    Args:
        log_dir: the folder of the ranks' files, where reports go if no other is named; empty for none.
        is_python, ranks: see :meth:`Diagnosis.why_unwatched`.

    Returns:
        The choice, and a note for the user who has asked for a report that cannot be written; else empty.

    Raises:
        LaunchError: the directory for reports cannot be made.
    """
    context = click.get_current_context()
    chosen = context.meta[KEPT]
    folder = chosen["report_dir"] or log_dir
    typed = click.core.ParameterSource.COMMANDLINE
    # A rank at a breakpoint waits for a person, and lines about that would come between prompt and answer.
    quiet = context.params.get("debugged") is not None and context.get_parameter_source("warn_after") is not typed
    diagnosis = Diagnosis(
        0.0 if quiet else chosen["warn_after"],
        chosen["report_after"],
        str(Path(folder).absolute()) if folder else "",
        strict=chosen["strict"],
    )
    why = "--debug turns off --warn-after" if quiet else diagnosis.why_unwatched(is_python=is_python, ranks=ranks)
    if not folder:
        why = "it has no folder; add --report-dir DIR"
    asked = [
        f"--{name.replace('_', '-')}"
        for name in ("report_dir", "report_after")
        if context.get_parameter_source(name) is typed
    ]
    if why:
        return diagnosis, f"{' and '.join(asked)}: no report will be written: {why}" if asked else ""
    if chosen["report_dir"]:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--report-dir {folder}: cannot be made: {error.strerror}") from None
    return diagnosis, ""
