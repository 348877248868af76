"""``phalanx report``: what a job was doing when it did not go on."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TextIO

import click

from phalanx.errors import LaunchError
from phalanx.launch.job.options import FAILURE_FILE
from phalanx.words import format_bytes

_FILE = click.File("w", encoding="utf-8")


@click.command(short_help="Print why a job hung: its newest report.")
@click.argument("path", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write it as one page of HTML; - is standard output.")
def report(path: str, as_json: bool, html: TextIO | None) -> None:
    """Print the newest report that phalanx run has written into DIR, its --report-dir or --log-dir, or that of a file.

    Before it stands what was said when a job of that --log-dir failed last. The report's first sentence says who keeps
    the job from going on, and which branch or loop to look at, if that is clear. Then come every rank's state, stack
    and last operations. The page of --html has a timeline of all ranks too. Beside each hang-N.json is a folder
    hang-N-torch, with all recorded operations as torch's flight recorder writes them, for torchfrtrace --prefix rank_.
    """
    from phalanx.diagnosis.report import latest_report, read_report

    if as_json and html is not None:
        raise click.UsageError("--json and --html are two ways to show a report: give one of them")
    found: Path | None = Path(path)
    failed = Path(path, FAILURE_FILE)
    try:
        if Path(path).is_dir():
            found = latest_report(Path(path))
        if failed.is_file() and not as_json and html is None:
            when = datetime.fromtimestamp(failed.stat().st_mtime).astimezone().isoformat(timespec="seconds")
            click.echo(f"{failed}, written {when}:\n{failed.read_text(errors='replace')}", nl=found is not None)
            if found is None:
                return
        if found is None:
            raise LaunchError(
                f"{path} has no report. phalanx run --report-dir {path} (or --log-dir {path}) writes one when no rank "
                f"has gone on for 30 s, but none with --warn-after 0"
            )
        read = read_report(found)
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LaunchError(f"{found} cannot be read: {error}") from None
    from phalanx.diagnosis.render import report_page, report_text

    if html is None:
        click.echo(json.dumps(read.to_json(), indent=1) if as_json else report_text(read), nl=as_json)
        return
    text = report_page(read)
    html.write(text)
    if html.name != "-":
        click.echo(f"phalanx report: wrote {html.name} ({format_bytes(len(text.encode()))})")
