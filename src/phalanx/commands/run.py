"""``phalanx run``: its options, and the job that they describe."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from phalanx import settings
from phalanx.c10d.register import names_to_replace
from phalanx.commands import Seconds
from phalanx.errors import LaunchError
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.hosts import (
    Placement,
    chosen_hosts,
    find_allocation,
    note_ignored,
    parse_address,
    parse_rehearsal,
    share_allocation,
)
from phalanx.launch.job.job import Job, make_job
from phalanx.launch.job.memory import Mode
from phalanx.launch.job.nodes import read_nodes
from phalanx.launch.job.options import (
    COUNTED_HERE,
    Attempt,
    Diagnosis,
    LaunchOptions,
    count_ranks,
    decide_output,
    read_stop_signals,
)
from phalanx.launch.job.platforms import PlatformNodes, find_platform
from phalanx.launch.job.spellings import translate
from phalanx.launch.job.target import find_target
from phalanx.system.limits import check_limits, machine_limits, raise_file_limit
from phalanx.topology.table import format_rank_table
from phalanx.words import format_count, printable, tell

_Command = TypeVar("_Command", bound=Callable[..., Any])

# The options of each section of --help, in its order.
_HELP = {
    "Options": {
        "-n": "How many ranks (processes): a number, gpu (one for each accelerator), cpu (one for each core), or auto "
        "(gpu, or cpu without one).  [default: 1, or as many as the hosts take]",
        "-m": "TARGET is a module, as with python -m.",
    },
    "What each rank gets": {
        "--device": "Where ranks compute: cpu, cuda, xpu, npu, … (PHALANX_DEVICE); phalanx.init(device=...) overrides "
        "it.  [default: the accelerator of each local rank, or cpu]",
        "--bind": "Bind each rank to its own share of the cores (core), or to those of one NUMA node (numa). Only for "
        "a job that has the machine to itself: two jobs that bind crowd onto the same cores.",
        "--memory": "On the CPU: large tensors in huge pages (huge), freed memory kept for the next step as well "
        "(keep), or neither (return).",
        "-x": "Set a variable for all ranks. They get all others of this shell anyway; on other hosts not those of a "
        "login or a machine (HOME, TMPDIR, SSH_…) unless you name them: -x NAME.",
        "--replace": "Give programs that ask torch for this backend (gloo, mpi) Phalanx's, as by PHALANX_REPLACE=gloo; "
        "nccl cannot be replaced. rpc: torch.distributed.rpc over Phalanx.",
        "--interface": "The network interface over which ranks talk, on every host (ib0).  [default: phalanx chooses]",
        "--no-preload": "Let each rank import torch for itself, a second or two later. Needed by a script that sets "
        "variables which torch reads only while it is imported; a note names them.",
        "--pass-local-rank": "Give TARGET --local_rank=R before its arguments, as torch.distributed.launch did.",
    },
    "The terminal, and files": {
        "--stdin": "The rank that reads standard input, also from a terminal.  [default: 0 reads a pipe or a file; a "
        "terminal is read only with -n 1]",
        "--debug": "Hand the terminal to this rank, for breakpoint(), pdb or input(). With -n 1 it has it anyway.",
        "-q": "Print no rank table, no notes, and at Ctrl-C not where the ranks were; errors are still printed.",
        "--no-prefix": "Do not write '[rank 3]' before each line of output.",
        "--only": "Show only these ranks: 0,2-3. The others' output is in --log-dir, or dropped.",
        "--log-dir": "Write the output of each rank to a file DIR/rank-0.log, …, each line with its time, in place of "
        "showing it. When the job has ended, phalanx timeline DIR reads there what each rank did.",
        "--tee": "With --log-dir: show the output as well.",
        "--grace": "How long ranks may take to end after they were asked to, before they are killed.  [default: 1 "
        "after Ctrl-C, 30 after SIGTERM or SIGHUP, 5 after another rank's failure]",
        "--restarts": "After the failure of a rank, end all and start all again, up to K times; world.attempt counts "
        "them. The script goes on from a checkpoint of its own. --log-dir has a folder for each attempt.",
        "--stop-on": "The signals, to phalanx run or a rank, at which world.should_stop() is True on all ranks after "
        "the same step.",
        "--stop-before": "In Slurm: stop in step so many seconds before the time limit; ranks have these seconds.",
        "--max-hours": "Let it be True after so many hours, however often ranks were started again.",
        "--requeue": "In Slurm: queue the job again (scontrol requeue) once all ranks have stopped after the same "
        "step and ended well.",
        "--config": "Read options from this TOML file, by their long names (ranks = 4), and TARGET; an option that is "
        "typed overrides the file.",
        "--save-config": "Write the options of this call, and TARGET, for --config.",
        "--svg": "Draw where the ranks run (hosts, ranks, local ranks, devices) to this SVG file.",
    },
    "When ranks hang": {
        "--warn-after": "Say which rank the others wait for, and where it is, once one has waited for so long; a rank "
        "that is stopped is named sooner. No report is written earlier. 0: say and report nothing.",
        "--report-dir": "If the job stands still, write a report with every rank's stack and operations into this "
        "directory; phalanx report DIR prints it.  [default: that of --log-dir]",
        "--report-after": "Write the report after no rank has begun or ended an operation for so long.",
        "--strict": "Make it an error, and not a warning, if two ranks call the same lines in different orders: "
        "PHALANX_CALL_SITES=error. It holds for Phalanx's own backends (--replace gloo).",
    },
    "Other hosts": {
        "-H": "The hosts, and how many ranks each takes (without N: 1, or --ppn), in rank order. They are reached by "
        "ssh, or by --starter or --mpi.",
        "--hostfile": "The hosts from a file, one a line (h1:4, or h1 slots=4).",
        "--ppn": "With --hosts or --hostfile, or in an allocation: the most ranks a host takes.",
        "--starter": "In place of ssh: start processes on other hosts by this program, called as COMMAND HOST PROGRAM "
        "ARGS..., or with HOST in place of {host}; it hands its standard input on: --starter 'docker exec -i'. kubectl "
        "alone: by kubectl exec -i {host} --.",
        "--mpi": "Let this MPI launcher start the ranks: mpiexec, mpirun, srun, or a path to one; with its own options "
        "in quotes: --mpi 'mpiexec -iface ib0'.",
        "--address": "The address, IPv4 or IPv6, by which other hosts reach this one.  [default: the first that "
        "answers them]",
    },
    "The same command on every node": {
        "--nnodes": "How many nodes run this command, each with -n ranks; 2:4: at least 2, begun once no more come. "
        "Kubeflow, JobSet, SkyPilot, dstack and others say it by their variables.",
        "--node-rank": "This node's number, from 0. Node 0 prints the table and the output of all.  "
        "[default: 0 where --master-addr is, elsewhere as they come]",
        "--master-addr": "Node 0, by a name or an address that the others reach.",
        "--master-port": "The port on which node 0 listens.  [default: 29500]",
        "--join-within": "How long nodes are waited for.  [default: 600; with a range, 30 for one more once there are "
        "enough]",
        "--rejoin-within": "With --restarts: how long a node that is lost, or replaced, is waited for. 0: not at all.",
    },
    "Without running it": {
        "--rehearse": "Run all ranks here, on the CPU, as if on that many hosts with that many ranks each (2x4), or on "
        "hosts with 1,3,2 ranks.",
        "--placement": "With --rehearse: fill one host after the other (block), or give each host one rank in turn "
        "(cyclic).  [default: block]",
        "--dry-run": "Print the rank table, and start nothing.",
        "--json": "With --dry-run: print one JSON object in place of the table.",
    },
}


def _option(*names: str, **how: Any) -> Callable[[_Command], _Command]:
    helps = {option: text for section in _HELP.values() for option, text in section.items()}
    return click.option(*names, help=next(helps[name] for name in names if name in helps), **how)


class _Run(click.Command):
    """Take options of other launchers and of a file too, and show ours in sections."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parameters = self.get_params(ctx)
        options = [option for option in parameters if isinstance(option, click.Option)]
        own = {name: not option.is_flag for option in options for name in option.opts}
        words, ctx.meta["notes"] = translate(args, own)
        parsed, _, _ = self.make_parser(ctx).parse_args(list(words))
        # click has marked what was not typed in several ways over the years, but never by one of these.
        typed = {name for name, value in parsed.items() if isinstance(value, (str, bool, list, tuple)) and value}
        if "config" in typed:
            # Not imported at the top, because most calls need no reader of TOML.
            from phalanx.launch.job.config_file import as_defaults, read_config

            defaults = as_defaults(read_config(parsed["config"], parameters), parameters, typed)
            variables = [word for variable in defaults.pop("variables", ()) for word in ("-x", variable)]
            target = ["--", str(defaults.pop("target"))] if "target" in defaults else []
            words = [*variables, *words, *target, *defaults.pop("arguments", ())]
            ctx.default_map = defaults
        return super().parse_args(ctx, words)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {option: each.get_help_record(ctx) for each in self.get_params(ctx) for option in each.opts}
        for title, names in {**_HELP, "Help": ["--help"]}.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records[name]) is not None])


# The target ends the options: all arguments after it are its own, as with python and python -m.
@click.command(
    cls=_Run,
    context_settings={"allow_interspersed_args": False},
    short_help="Start a program as ranks that work together.",
)
@_option("-n", "--ranks", metavar="N")
@_option("-m", "module", is_flag=True)
@_option("--device", metavar="DEVICE")
@_option("--bind", type=click.Choice(get_args(Bind)), default="none", show_default=True)
@_option("--memory", "memory_mode", type=click.Choice(get_args(Mode)), default="huge", show_default=True)
@_option("-x", "variables", metavar="NAME[=VALUE]", multiple=True)
@_option("--replace", metavar="NAME,...", default=lambda: os.environ.get(settings.REPLACE))
@_option("--interface", metavar="NAME", default="")
@_option("--no-preload", is_flag=True)
@_option("--pass-local-rank", is_flag=True)
@_option("--stdin", "reader", metavar="RANK", type=int)
@_option("--debug", "debugged", metavar="RANK", type=int)
@_option("-q", "--quiet", is_flag=True)
@_option("--no-prefix", is_flag=True)
@_option("--only", metavar="RANKS")
@_option("--log-dir", metavar="DIR")
@_option("--tee", is_flag=True)
@_option("--grace", "grace_s", metavar="SECONDS", type=Seconds())
@_option("--restarts", metavar="K", type=click.IntRange(min=0), default=0, show_default=True)
@_option("--stop-on", metavar="SIGNALS", default="TERM,USR1", show_default=True)
@_option("--stop-before", "stop_before_s", metavar="SECONDS", type=Seconds())
@_option("--max-hours", metavar="HOURS", type=Seconds())
@_option("--requeue", is_flag=True)
@_option("--config", metavar="FILE")
@_option("--save-config", metavar="FILE")
@_option("--svg", metavar="FILE", default="")
@_option("--warn-after", metavar="SECONDS", type=Seconds(), default=Diagnosis().warn_after_s, show_default=True)
@_option("--report-dir", metavar="DIR", default="")
@_option("--report-after", metavar="SECONDS", type=Seconds(0.1), default=Diagnosis().report_after_s, show_default=True)
@_option("--strict", is_flag=True)
@_option("-H", "--hosts", metavar="HOST:N,...")
@_option("--hostfile", metavar="FILE")
@_option("--ppn", metavar="N", type=int)
@_option("--nnodes", metavar="N|MIN:MAX")
@_option("--node-rank", metavar="R", type=int)
@_option("--master-addr", metavar="HOST[:PORT]")
@_option("--master-port", metavar="PORT", type=click.IntRange(0, 65535))
@_option("--join-within", "join_within_s", metavar="SECONDS", type=Seconds())
@_option("--rejoin-within", "rejoin_within_s", metavar="SECONDS", type=Seconds(), default=600.0, show_default=True)
@_option("--starter", metavar="COMMAND")
@_option("--mpi", metavar="COMMAND")
@_option("--address", metavar="ADDR")
@_option("--rehearse", metavar="NODESxRANKS")
@_option("--placement", type=click.Choice(get_args(Placement)))
@_option("--dry-run", is_flag=True)
@_option("--json", "as_json", is_flag=True)
@click.argument("target", metavar="TARGET")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def run(target: str, arguments: tuple[str, ...], module: bool, **given: Any) -> Job | None:
    """Start TARGET as N processes (ranks) that work together, and give each its place among them.

    TARGET is a Python script (or a directory or zip archive with a __main__.py), a module with -m, or any other
    program; python train.py means train.py. Options of the launcher come before TARGET; all after it is its own.

    \b
      phalanx run -n 4 train.py --lr 0.1      four ranks of a script
      phalanx run -n auto train.py            a rank for each accelerator, or core
      phalanx run -n 2 -m package.train       two ranks of a module
      phalanx run -n 2 ./simulate --fast      a program that is not Python
      phalanx run -n 4 --debug 2 train.py     breakpoint() works in rank 2
      phalanx run -n 4 --log-dir logs train.py
      phalanx run -n 4 --restarts 3 train.py  started again after a failure
      phalanx run --config job.toml           options from a file
      phalanx run -n 4 --replace gloo ddp.py  the faster backend for a script that asks for gloo
      phalanx run --rehearse 32x8 train.py    256 ranks, as if on 32 hosts
      phalanx run -H h1:4,h2:4 train.py       eight ranks on two hosts, started by ssh
      phalanx run -n 4 --nnodes 2 --node-rank 1 --master-addr h0 train.py   on h1, the second of two nodes
      phalanx run -n 4 --mpi mpiexec mpi.py   four ranks that can use MPI

    A script joins the others with phalanx.init(), or with torch.distributed.init_process_group(), which needs no
    arguments: each rank has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the other variables that torchrun sets, so
    scripts for torchrun run unchanged. Options of torchrun, mpiexec, accelerate launch and horovodrun that mean the
    same as one of these are understood. OMP_NUM_THREADS is each rank's share of the cores unless you set it.

    Every line of output is marked with its rank. If a rank fails, one block says which, why and where, and the others
    are ended. Ctrl-C ends the job and says where each rank was; a second one kills at once. Ctrl-\\ only prints the
    ranks' stacks. SIGUSR1 and SIGUSR2 are passed on to the ranks. If these call world.should_stop(), it is True on all
    at the same call after SIGTERM or SIGUSR1, and the exit code is 0 if they then end well.

    On other hosts (-H, --hostfile, or an allocation of Slurm, PBS or LSF) ssh must log in without a question, and
    Python, torch, Phalanx and the script must be the same, in the same place: docs/clusters.md. Ranks that an MPI
    launcher starts (--mpi) can use MPI, as by init_process_group("mpi") or mpi4py, and import torch each for itself.

    Exit codes: 0 if every rank ends well; otherwise that of the rank that failed first (128 + signal if it was killed);
    1 if --strict ended the job, or a host is lost or cannot be reached; 2 for a mistake on the command line; 74 if
    the output cannot be written; 126 if the program that starts Phalanx on other hosts (ssh) cannot be run; 128 + the
    signal if Ctrl-C (130), SIGTERM (143) or SIGHUP (129) ended the job.
    """
    ctx = click.get_current_context()
    dry_run, notes = given["dry_run"], ctx.meta["notes"]
    if given["as_json"] and not dry_run:
        raise LaunchError("--json describes a job that is not started; add --dry-run")
    for variable in given["variables"]:
        name, typed, value = variable.partition("=")
        if not name or (not typed and name not in os.environ):
            raise LaunchError(f"-x {variable}: is not set here; give it a value: -x {name or 'NAME'}=VALUE")
        if typed:
            os.environ[name] = value
    job = make_job(_read_options(ctx, given, notes), find_target(target, arguments, module=module))
    if given["save_config"] is not None:
        from phalanx.launch.job.config_file import save_config

        save_config(given["save_config"], ctx)
    if not dry_run:
        notes += _prepare_reports(ctx, job)
    for note in [] if job.quiet else notes:
        tell(f"note: {note}")
    if not dry_run:
        return job
    raise_file_limit()
    check_limits(job.ranks, machine_limits(python=job.target.is_python, forked=job.is_local))
    _describe(job, as_json=given["as_json"])
    if job.svg:
        from phalanx.topology.placement import write_placement

        write_placement(job.svg, job.rows())
    return None


def _read_options(ctx: click.Context, given: Mapping[str, Any], notes: list[str]) -> LaunchOptions:
    """Read what has a form of its own; an option whose name is a field's, and its type too, is taken as it is."""
    read: dict[str, Any] = {field.name: given[field.name] for field in fields(LaunchOptions) if field.name in given}
    counted_here = given["ranks"] in COUNTED_HERE
    read |= {
        "ranks": count_ranks(given["ranks"]) if given["ranks"] is not None else None,
        "hosts": chosen_hosts(given["hosts"], given["hostfile"]),
        "addresses": () if given["address"] is None else (parse_address(given["address"]),),
        "named": tuple(variable.partition("=")[0] for variable in given["variables"]),
        "replace": names_to_replace(given["replace"] or "", source="--replace"),
        "preload": not given["no_preload"],
        "prefix": not given["no_prefix"],
        "output": decide_output(given["log_dir"], tee=given["tee"], only=given["only"]),
        "attempt": Attempt(restarts=given["restarts"]),
        "starter": (),
        "stop_on": read_stop_signals(given["stop_on"]),
    }
    placement = given["placement"]
    if given["rehearse"] is not None:
        read["rehearsal"] = parse_rehearsal(given["rehearse"], placement or "block")
    elif placement is not None:
        how = "places ranks on rehearsed hosts; add --rehearse 2x4, or leave --placement out"
        raise LaunchError(f"--placement {placement}: {how}")
    # Not imported at the top, because the rows of all launchers would take a quarter of the command's start.
    if given["starter"] is not None:
        from phalanx.launch.starters.ssh import parse_starter

        read["starter"] = tuple(parse_starter(given["starter"]))
    if given["mpi"] is not None:
        from phalanx.launch.job.mpi_launcher import find_mpi_launcher

        read["mpi"] = find_mpi_launcher(given["mpi"])
    if read["hosts"] and counted_here:
        how = "say how many ranks each host takes: -H h1:4,h2:4, or --ppn 4"
        raise LaunchError(f"-n {given['ranks']}: counts what this host has; {how}")
    elsewhere = bool(read["hosts"] or read["starter"] or given["mpi"] or given["rehearse"])
    platform = _find_platform(notes, elsewhere=elsewhere, counted=given["nnodes"] is not None)
    named = ("nnodes", "node_rank", "master_addr", "master_port", "join_within_s", "rejoin_within_s")
    nodes = read_nodes(**{name: given[name] for name in named}, platform=platform)
    if read["ranks"] is None and platform is not None and platform.ranks is not None:
        read["ranks"] = count_ranks(platform.ranks)
    if nodes is not None:
        if elsewhere:
            raise LaunchError(
                f"--nnodes {given['nnodes']}: is for a command that every node starts; leave it out, and phalanx run "
                "starts the ranks of all hosts"
            )
        read["nodes"] = nodes
    elif not elsewhere:
        allocation = find_allocation(os.environ) if given["debugged"] is None else None
        if allocation is not None:
            asked = None if counted_here else read["ranks"]
            hosts = share_allocation(allocation.hosts, asked, given["ppn"])
            read |= {"hosts": hosts, "starter": allocation.starter, "ranks": asked}
            where = f"{format_count(len(hosts), 'host')} of {allocation.title}"
            notes.append(f"ranks run on {where}; with -H localhost:N on this one alone")
        elif ignored := note_ignored(os.environ, read["ranks"]):
            notes.append(ignored)
    # A rank at a breakpoint waits for a person, and lines about that would come between prompt and answer.
    silent = given["debugged"] is not None and not _is_given(ctx, "warn_after")
    folder = given["report_dir"] or given["log_dir"]
    read["diagnosis"] = Diagnosis(
        0.0 if silent else given["warn_after"],
        given["report_after"],
        os.path.abspath(folder) if folder else "",
        given["strict"],
    )
    return LaunchOptions(**read)


def _find_platform(notes: list[str], *, elsewhere: bool, counted: bool) -> PlatformNodes | None:
    """Find the platform that starts this command on every node; note that it is ignored if options say otherwise."""
    try:
        platform = find_platform(os.environ)
    except LaunchError:
        if elsewhere or counted:
            return None
        raise
    if platform is not None and elsewhere:
        said = ", ".join(f"{name}={os.environ[name]}" for name in platform.variables)
        why = "because -H, --starter, --mpi or --rehearse say where ranks run"
        notes.append(f"{said}: ignored ({platform.title}), {why}")
    return None if elsewhere else platform


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT


def _prepare_reports(ctx: click.Context, job: Job) -> list[str]:
    """Make the folder for reports, or note that one that was asked for cannot be written."""
    folder, report_dir = job.diagnosis.report_dir, ctx.params["report_dir"]
    why = job.diagnosis.why_unwatched(is_python=job.target.is_python, ranks=job.ranks)
    if job.debugged is not None and not _is_given(ctx, "warn_after"):
        why = "--debug turns off --warn-after"
    if not folder:
        why = "it has no folder; add --report-dir DIR"
    if why:
        asked = [f"--{name.replace('_', '-')}" for name in ("report_dir", "report_after") if _is_given(ctx, name)]
        return [f"{' and '.join(asked)}: no report will be written: {why}"] if asked else []
    if report_dir:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--report-dir {report_dir}: cannot be made: {error.strerror}") from None
    return []


def _describe(job: Job, *, as_json: bool) -> None:
    """Print what would be started: the rank table and notes, or one JSON object."""
    if as_json:
        description = {
            "host": job.host,
            "world_size": job.ranks,
            "cores": job.cores,
            "target": {"kind": job.target.kind, "path": job.target.path, "argv": list(job.target.argv)},
            "mpi": job.mpi.command(job.ranks, job.hosts, ["RANK"], "HOSTS") if job.mpi is not None else None,
            "rehearsal": asdict(job.rehearsal) if job.rehearsal is not None else None,
            "memory": dict(job.memory),
            "nodes": asdict(job.nodes) if job.nodes is not None else None,
            "restarts": job.attempt.restarts,
            "bind": job.bind,
            "cpus": list(map(list, job.cpus)) if job.cpus else None,
            "hosts": [asdict(host) for host in job.hosts],
            "ranks": [asdict(row) for row in job.rows()],
            "notes": job.warnings(),
        }
        click.echo(json.dumps(description))
        return
    click.echo(printable(format_rank_table(job.rows(), title=job.title())), nl=False)
    if job.mpi is not None:
        words = job.mpi.command(job.ranks, job.hosts, [job.target.name, *job.target.argv[1:]], "HOSTS")
        click.echo(f"started by {job.mpi.title}: {printable(shlex.join(words))}")
    for warning in [] if job.quiet else job.warnings():
        tell(f"note: {warning}")
