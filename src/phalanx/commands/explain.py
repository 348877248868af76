"""``phalanx explain``: how a collective works, and what an error means."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.errors import ArgumentError, LaunchError
from phalanx.words import did_you_mean

if TYPE_CHECKING:
    from phalanx.explain.ranks import Plan

__all__ = ["explain"]

_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
_MOST_RANKS = 16
_MOST_BYTES = 64 << 20


@click.command(short_help="Show how a collective works, or what an error means.")
@click.argument("name", required=False)
@click.option(
    "-n", "ranks", type=click.IntRange(2, _MOST_RANKS), metavar="N", help="How many ranks: 2 to 16; 4 by default."
)
@click.option(
    "--hosts", metavar="HxN", help="As if on several hosts: 2x2 is two hosts of two ranks; 1,3 is one and three ranks."
)
@click.option(
    "--bytes",
    "nbytes",
    default="256K",
    show_default=True,
    metavar="SIZE",
    help="How large the tensor is: 4K, 1M. Where ranks have blocks, as in all_gather, it is all blocks of a rank.",
)
@click.option("--svg", "svg_file", metavar="FILE", help="Draw all steps into a file, one below the other.")
@click.option("--html", "html_file", metavar="FILE", help="Write a page on which a slider shows one step at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print the steps as JSON.")
@click.option("--list", "listed", is_flag=True, help="List all names that can be explained.")
def explain(
    name: str | None,
    ranks: int | None,
    hosts: str | None,
    nbytes: str,
    svg_file: str | None,
    html_file: str | None,
    as_json: bool,
    listed: bool,
) -> None:
    """Show how a collective works, step by step, or what an error means and what to do.

    NAME is a collective (all_reduce) or an error (PeerLost). Case does not matter.

    \b
      phalanx explain all_reduce                   four ranks of one host
      phalanx explain all_reduce --hosts 2x2       four ranks, as if on two hosts
      phalanx explain all_gather -n 8 --html x.html
      phalanx explain broadcast --svg broadcast.svg
      phalanx explain PeerLost                     what the error means, and what to do
      phalanx explain --list                       all names

    A collective is run once, on ranks that are started for it. They note what they copy, read, add and send, and the
    steps are made from these notes. So what is shown is what Phalanx does with this size, on so many ranks. What is
    done in one step does not wait for anything else in that step. Rank 0 is the root.

    With --hosts the ranks of one host share memory, and ranks of different hosts send each other messages, as on a
    cluster. All of them run on this machine.

    \b
    B[0]      block B of the tensor of rank 0
    B[0-3]    the sum of block B of the ranks 0 to 3

    The object of --json has operation, hosts (the ranks of each), bytes, given (what each rank gives), steps, each with
    moves (kind, rank, other, bytes, blocks) and results (what each rank has after it), links (from, to, by, bytes), and
    agreement_bytes (what the ranks move to compare their calls). Of an error it has name, summary and text.

    Exit codes: 0; 2 for a name that is not known.
    """
    from phalanx.explain.errors import error_as_json, error_as_text, error_classes

    errors = error_classes()
    if listed or name is None:
        _list(as_json, errors)
        return
    known = {each.lower(): each for each in (*_COLLECTIVES, *errors)}
    found = known.get(name.lower().rpartition(".")[2])
    if found is None:
        raise ArgumentError(
            f"nothing is known about {name}; {did_you_mean(name, known.values())}phalanx explain --list has all names"
        )
    if found in errors:
        _refuse_for_error(name, ranks, hosts, svg_file, html_file)
        click.echo(json.dumps(error_as_json(found)) if as_json else error_as_text(found), nl=as_json)
        return
    _collective(_plan(found, ranks, hosts, nbytes), svg_file, html_file, as_json)


def _list(as_json: bool, errors: dict[str, type[BaseException]]) -> None:
    from phalanx.explain.errors import summary

    if as_json:
        click.echo(json.dumps({"collectives": _COLLECTIVES, "errors": sorted(errors)}))
        return
    click.echo("collectives: how they work, step by step")
    for name in _COLLECTIVES:
        click.echo(f"  {name}")
    click.echo("errors: what they mean, and what to do")
    for name, error in sorted(errors.items()):
        click.echo(f"  {name:<26}{summary(error)}")


def _refuse_for_error(name: str, *options: object) -> None:
    for option, value in zip(("-n", "--hosts", "--svg", "--html"), options, strict=True):
        if value is not None:
            raise ArgumentError(f"{option} belongs to a collective, and {name} is an error; leave it out")


def _plan(operation: str, ranks: int | None, hosts: str | None, nbytes: str) -> Plan:
    from phalanx.bench.cases import parse_sizes
    from phalanx.explain.ranks import Plan
    from phalanx.launch.job.rehearsal import parse_rehearsal

    counts: tuple[int, ...] = (ranks or 4,)
    if hosts is not None:
        try:
            counts = parse_rehearsal(hosts).hosts
        except LaunchError as error:
            raise ArgumentError(str(error).replace("--rehearse", "--hosts")) from None
    total = sum(counts)
    if not 2 <= total <= _MOST_RANKS:
        raise ArgumentError(f"--hosts {hosts}: is {total} ranks; from 2 to {_MOST_RANKS} can be shown")
    if ranks not in (None, total):
        raise ArgumentError(f"-n {ranks} contradicts --hosts {hosts}, which is {total} ranks; leave -n out")
    try:
        size, *more = parse_sizes(nbytes)
    except ValueError as error:
        raise ArgumentError(f"--bytes {nbytes}: {error}") from None
    if more or not 8 * total <= size <= _MOST_BYTES:
        raise ArgumentError(f"--bytes {nbytes}: give from {8 * total} bytes, 8 for each rank, to 64M")
    return Plan(operation, counts, size // 8 * 8)


def _collective(plan: Plan, svg_file: str | None, html_file: str | None, as_json: bool) -> None:
    from phalanx.explain.steps import explain_collective
    from phalanx.explain.text import as_text

    explained = explain_collective(plan)
    for option, file in (("--svg", svg_file), ("--html", html_file)):
        if file is None:
            continue
        if option == "--svg":
            from phalanx.explain.drawn import explained_svg as drawn
        else:
            from phalanx.explain.page import explained_page as drawn
        try:
            Path(file).write_text(drawn(explained), encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"{option} {file}: cannot be written: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps(explained.to_json()))
    elif svg_file is None and html_file is None:
        sys.stdout.write(as_text(explained))
