"""``phalanx timeline``: when each rank of a job that has ended computed, communicated and waited for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from phalanx.errors import LaunchError
from phalanx.words import format_named

if TYPE_CHECKING:
    from phalanx.diagnosis.timeline import Timeline

_SHOWN = 5
_FILE = click.File("w", encoding="utf-8")


@click.command(short_help="For which rank the others waited in a job that has ended.")
@click.argument("path", metavar="DIR")
@click.option("--html", type=_FILE, metavar="FILE", help="Write it as one page of HTML that needs no other file.")
@click.option("--svg", type=_FILE, metavar="FILE", help="Draw a lane for each rank, as SVG for light and dark screens.")
@click.option("--trace", type=_FILE, metavar="FILE", help="Write JSON for ui.perfetto.dev or chrome://tracing.")
@click.option("--json", "as_json", is_flag=True, help="Print the shares and the waits as JSON.")
def timeline(path: str, html: TextIO | None, svg: TextIO | None, trace: TextIO | None, as_json: bool) -> None:
    """Show when each rank of a job computed, communicated and waited for others. This finds a slow rank.

    DIR is the --log-dir or --report-dir of phalanx run. A job leaves its ranks' last operations there when it ends,
    also when it ends well. Of a job that hangs now, the newest report is read.

    \b
      phalanx timeline logs                     the shares of each rank, and the longest waits
      phalanx timeline logs --html page.html    with a lane for each rank
      phalanx timeline logs --trace trace.json  for Perfetto

    \b
      computes      in no operation
      waits         in one to which another rank has not come yet
      communicates  in one to which all have come
      waited for    how long others waited for this rank: of each operation the longest wait, added up

    An operation that runs beside computation, as those of DDP do, counts as communication or waiting. All ranks
    together leave 16,384 operations, a rank at most 4,096, and each rank of another host 128. Of torch's own backends
    those are there that Python calls, so not the gradients of DDP over gloo.

    The objects of --json have job, when, seconds, ranks, and waits, the longest first. FILE may be - for standard
    output; then nothing else is printed. Exit codes: 0; 1 if FILE cannot be written; 2 if DIR has no operations.
    """
    from phalanx.diagnosis.render import timeline_page, timeline_svg
    from phalanx.diagnosis.report import read_operations
    from phalanx.diagnosis.timeline import chrome_trace, make_timeline

    try:
        left = read_operations(Path(path))
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = make_timeline(left) if left is not None else None
    if found is None:
        how = "leaves them there when the job ends, if its ranks have called any"
        raise LaunchError(f"{path} has no operations. phalanx run --log-dir {path} {how}")
    if html is not None:
        html.write(timeline_page(found))
    if svg is not None:
        svg.write(timeline_svg(found))
    if trace is not None:
        json.dump(chrome_trace(found), trace)
    if not any(file is not None and file.name == "-" for file in (html, svg, trace)):
        click.echo(json.dumps(found.to_json()) if as_json else "\n".join(_summary(found)))


def _summary(found: Timeline) -> list[str]:
    from phalanx.diagnosis.render import duration, printable_line
    from phalanx.diagnosis.timeline import COMMUNICATES, COMPUTES, WAITS
    from phalanx.topology.table import format_table

    rows = []
    for lane in found.lanes:
        row = {"rank": str(lane.seen.rank)} | ({"host": lane.seen.host} if found.lanes[0].seen.host else {})
        row |= {kind: f"{100 * lane.share(kind):.1f} %" for kind in (COMPUTES, COMMUNICATES, WAITS)}
        row["waited for"] = duration(awaited) if (awaited := found.awaited_ns(lane.seen.rank)) else "-"
        rows.append({**row, "operations": f"{len(lane.spans):,}"})
    whole = duration(found.end_ns - found.begin_ns)
    title = f"{found.report.job.partition(';')[0]}, the last {whole}, ended {found.report.when}"
    lines = [format_table(rows, title=title, text_columns=("host",)).rstrip("\n"), f"{found.verdict}; the longest:"]
    lines += [f"  {wait.text()}, by {format_named('rank', wait.waiting)}" for wait in found.waits[:_SHOWN]]
    return [printable_line(line) for text in lines for line in text.splitlines()]
