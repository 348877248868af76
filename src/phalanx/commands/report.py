"""``phalanx report``: what a job was doing when it did not go on."""

from __future__ import annotations

import json
from pathlib import Path

import click

from phalanx.errors import LaunchError

__all__ = ["report"]


@click.command()
@click.argument("path", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(path: str, as_json: bool) -> None:
    """Print the newest report that phalanx run has written into DIR, its --report-dir or --log-dir, or that of a file.

    Its first sentence says who keeps the job from going on. Then come every rank's state, stack and last operations.
    Beside each hang-N.json is a folder hang-N-torch, with all recorded operations as torch's flight recorder writes
    them, for torchfrtrace --prefix rank_.
    """
    from phalanx.watch.hang_report import latest_report, read_report

    found: Path | None = Path(path)
    try:
        if found is not None and found.is_dir():
            found = latest_report(found)
        if found is None:
            raise LaunchError(f"{path} has no report: phalanx run --report-dir {path} writes one when ranks hang")
        read = read_report(found)
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LaunchError(f"{found} cannot be read: {error}") from None
    click.echo(json.dumps(read.to_json(), indent=1) if as_json else read.text(), nl=as_json)
