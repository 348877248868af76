"""``phalanx explain``: how a collective works, and what an error means."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TextIO

import click

from phalanx.errors import ArgumentError, LaunchError
from phalanx.words import did_you_mean

if TYPE_CHECKING:
    from phalanx.explain.steps import Explained

_COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    "barrier",
)
_BYTES = "How large the tensor is: 4K, 1M. Where ranks have blocks, as in all_gather, it is all blocks of a rank."
_FILE = click.File("w", encoding="utf-8")
_MOST_RANKS = 16
_MOST_BYTES = 64 << 20


@click.command(short_help="Show how a collective works, or what an error means.")
@click.argument("name", required=False)
@click.option("-n", "ranks", type=click.IntRange(2, _MOST_RANKS), metavar="N", help="How many ranks.  [default: 4]")
@click.option("--hosts", metavar="HxN", help="As if on hosts: 2x2 is two of two ranks; 1,3 one and three ranks.")
@click.option("--bytes", "nbytes", default="256K", show_default=True, metavar="SIZE", help=_BYTES)
@click.option("--svg", type=_FILE, metavar="FILE", help="Draw all steps into a file, one below the other.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write a page on which a slider shows one step at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print the steps as JSON.")
@click.option("--list", "listed", is_flag=True, help="List all names that can be explained.")
def explain(
    name: str | None,
    ranks: int | None,
    hosts: str | None,
    nbytes: str,
    svg: TextIO | None,
    html: TextIO | None,
    as_json: bool,
    listed: bool,
) -> None:
    """Show how a collective works, step by step, or what an error means and what to do.

    NAME is a collective (all_reduce) or an error (PeerLost). Case does not matter.

    \b
      phalanx explain all_reduce                   four ranks of one host
      phalanx explain all_reduce --hosts 2x2       four ranks, as if on two hosts
      phalanx explain all_gather -n 8 --html x.html
      phalanx explain PeerLost                     what the error means, and what to do

    A collective is run once, on ranks that are started for it on this machine. They note what they copy, read, add and
    send, so what is shown is what Phalanx does with this size, on so many ranks. What is done in one step does not wait
    for anything else in that step. Rank 0 is the root.

    \b
    B[0]      block B of the tensor of rank 0
    B[0-3]    the sum of block B of the ranks 0 to 3

    The object of --json has operation, hosts (the ranks of each), bytes, given (what each rank gives), steps, each with
    moves (kind, rank, other, bytes, blocks) and results (what each rank has after it), links (from, to, by, bytes), and
    agreement_bytes (what the ranks move to compare their calls). Of an error it has name, summary and text.

    Exit codes: 0; 1 if FILE cannot be written; 2 for a name that is not known.
    """
    from phalanx.explain.errors import error_as_json, error_as_text, error_classes, summary

    errors = error_classes()
    if listed or name is None:
        if as_json:
            click.echo(json.dumps({"collectives": _COLLECTIVES, "errors": sorted(errors)}))
            return
        click.echo("\n  ".join(["collectives: how they work, step by step", *_COLLECTIVES]))
        lines = (f"{each:<26}{summary(error)}" for each, error in sorted(errors.items()))
        click.echo("\n  ".join(["errors: what they mean, and what to do", *lines]))
        return
    known = {each.lower(): each for each in (*_COLLECTIVES, *errors)}
    found = known.get(name.lower().rpartition(".")[2])
    if found is None:
        raise ArgumentError(
            f"nothing is known about {name}; {did_you_mean(name, known.values())}phalanx explain --list has all names"
        )
    if found in errors:
        for option, value in {"-n": ranks, "--hosts": hosts, "--svg": svg, "--html": html}.items():
            if value is not None:
                raise ArgumentError(f"{option} belongs to a collective, and {name} is an error; leave it out")
        click.echo(json.dumps(error_as_json(found)) if as_json else error_as_text(found), nl=as_json)
        return
    explained = _explained(found, ranks, hosts, nbytes)
    if svg is not None:
        from phalanx.explain.drawn import explained_svg

        svg.write(explained_svg(explained))
    if html is not None:
        from phalanx.explain.drawn import explained_page

        html.write(explained_page(explained))
    if as_json:
        click.echo(json.dumps(explained.to_json()))
    elif svg is None and html is None:
        from phalanx.explain.text import as_text

        click.echo(as_text(explained), nl=False)


def _explained(operation: str, ranks: int | None, hosts: str | None, nbytes: str) -> Explained:
    from phalanx.bench.cases import parse_sizes
    from phalanx.explain.ranks import Plan
    from phalanx.explain.steps import explain_collective
    from phalanx.launch.job.hosts import parse_rehearsal

    counts: tuple[int, ...] = (ranks or 4,)
    try:
        if hosts is not None:
            counts = parse_rehearsal(hosts).hosts
        size, *more = parse_sizes(nbytes)
    except LaunchError as error:
        raise ArgumentError(str(error).replace("--rehearse", "--hosts")) from None
    except ValueError as error:
        raise ArgumentError(f"--bytes {nbytes}: {error}") from None
    total = sum(counts)
    if not 2 <= total <= _MOST_RANKS:
        raise ArgumentError(f"--hosts {hosts}: is {total} ranks; from 2 to {_MOST_RANKS} can be shown")
    if ranks not in (None, total):
        raise ArgumentError(f"-n {ranks} contradicts --hosts {hosts}, which is {total} ranks; leave -n out")
    if more or not 8 * total <= size <= _MOST_BYTES:
        raise ArgumentError(f"--bytes {nbytes}: give from {8 * total} bytes, 8 for each rank, to 64M")
    return explain_collective(Plan(operation, counts, size // 8 * 8))
