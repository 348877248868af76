"""``phalanx run``: its options, and the job that they describe."""

from __future__ import annotations

import os
from dataclasses import replace as replace_in
from typing import TYPE_CHECKING

import click

from phalanx import settings
from phalanx.c10d.replace import names_to_replace
from phalanx.errors import LaunchError
from phalanx.launch.job.allocation import find_allocation
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.hang_options import chosen_diagnosis, diagnosis_options
from phalanx.launch.job.host_slots import HostSlots, parse_hosts, read_hostfile
from phalanx.launch.job.job import Job, make_job
from phalanx.launch.job.memory import MODES, Memory
from phalanx.launch.job.output_options import decide_output
from phalanx.launch.job.rank_count import COUNTED_HERE, count_ranks
from phalanx.launch.job.rehearsal import Placement, parse_rehearsal
from phalanx.launch.job.run_words import RunCommand
from phalanx.launch.job.seconds import Seconds
from phalanx.launch.job.target import find_target
from phalanx.launch.starters.ssh import parse_starter
from phalanx.system.limits import check_limits, machine_limits, raise_file_limit
from phalanx.topology.environment import note_ignored
from phalanx.words import format_count, tell

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

__all__ = ["run"]


# The target ends the options: all arguments after it are its own, as with python and python -m.
@click.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Start a program as ranks that work together.",
)
@click.option(
    "-n",
    "--ranks",
    metavar="N",
    help="How many ranks (processes) to start: a number, or gpu (one for each accelerator), cpu (one for each core), "
    "auto (gpu, or cpu without one).  [default: 1, or as many as the hosts take]",
)
@click.option("-m", "module", is_flag=True, help="TARGET is a module, as with python -m.")
@click.option(
    "--rehearse",
    metavar="NODESxRANKS",
    help="Run all ranks here, on the CPU, as if on that many hosts with that many ranks each (2x4), or on hosts with "
    "1,3,2 ranks.",
)
@click.option(
    "--placement",
    type=click.Choice(["block", "cyclic"]),
    help="With --rehearse: fill one host after the other (block), or give each host one rank in turn (cyclic).  "
    "[default: block]",
)
@click.option(
    "--bind",
    type=click.Choice(["none", "core", "numa"]),
    default="none",
    show_default=True,
    help="Bind each rank to its own share of the cores (core), or to the cores of one NUMA node (numa). Use it only if "
    "this job has the machine to itself: two jobs that bind crowd onto the same cores. The workers of a data loader "
    "stay on the cores of their rank.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Where ranks compute: cpu, cuda, xpu, npu, … (PHALANX_DEVICE); phalanx.init(device=...) overrides it.  "
    "[default: the accelerator of each local rank, or cpu]",
)
@click.option(
    "--pass-local-rank",
    is_flag=True,
    help="Give TARGET --local_rank=R before its arguments, as torch.distributed.launch did.",
)
@click.option(
    "-x",
    "variables",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Set a variable for all ranks. Ranks get all other variables of this shell anyway; ranks on other hosts do "
    "not get those of a login or a machine (HOME, TMPDIR, SSH_…) unless you name them: -x NAME.",
)
@click.option(
    "--no-preload",
    is_flag=True,
    help="Let each rank import torch for itself, a second or two later, in place of once for all. Needed by a script "
    "that sets variables which torch reads only while it is imported; a note names them.",
)
@click.option(
    "--stdin",
    "reader",
    type=int,
    metavar="RANK",
    help="The rank that reads standard input, also from a terminal.  [default: 0 reads a pipe or a file; a terminal is "
    "read only with -n 1]",
)
@click.option(
    "--debug",
    "debugged",
    type=int,
    metavar="RANK",
    help="Hand the terminal to this rank, for breakpoint(), pdb or input(). With -n 1 it has it anyway.",
)
@click.option(
    "-q",
    "--quiet",
    is_flag=True,
    help="Print no rank table, no notes, and at Ctrl-C not where the ranks were; errors are still printed.",
)
@click.option("--no-prefix", is_flag=True, help="Do not write '[rank 3]' before each line of output.")
@click.option(
    "--only",
    metavar="RANKS",
    help="Show only these ranks: 0,2-3. The others' output is in --log-dir, or dropped.",
)
@click.option(
    "--log-dir",
    metavar="DIR",
    help="Write all output of each rank to a file DIR/rank-0.log, DIR/rank-1.log, …, each line with its time, in place "
    "of showing it. When the job ends, phalanx timeline DIR reads there what each rank did when.",
)
@click.option("--tee", is_flag=True, help="With --log-dir: show the output as well.")
@click.option(
    "--grace",
    type=Seconds(),
    metavar="SECONDS",
    help="How long ranks may take to end after they were asked to, before they are killed.  [default: 1 after Ctrl-C, "
    "30 after SIGTERM or SIGHUP, 5 after another rank's failure]",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="K",
    help="After the failure of a rank, end all and start all again, up to K times; world.attempt counts them. The "
    "script goes on from a checkpoint of its own.",
)
@diagnosis_options
@click.option(
    "--config",
    metavar="FILE",
    help="Read options from this TOML file, by their long names (ranks = 4), and TARGET; an option that is typed "
    "overrides the file.",
)
@click.option("--save-config", metavar="FILE", help="Write the options of this call, and TARGET, for --config.")
@click.option(
    "--mpi",
    metavar="COMMAND",
    help="Let this MPI launcher start the ranks: mpiexec, mpirun, srun, or a path to one; with its own options in "
    "quotes: --mpi 'mpiexec -iface ib0'.",
)
@click.option(
    "-H",
    "--hosts",
    metavar="HOST:N,...",
    help="The hosts, and how many ranks each takes (without N: 1, or --ppn), in rank order. They are reached by ssh, "
    "or by --starter or --mpi.",
)
@click.option("--hostfile", metavar="FILE", help="The hosts from a file, one a line (h1:4, or h1 slots=4).")
@click.option(
    "--ppn",
    type=int,
    metavar="N",
    help="With --hosts or --hostfile, or in an allocation: the most ranks a host takes.",
)
@click.option(
    "--starter",
    metavar="COMMAND",
    help="In place of ssh: start processes on other hosts by this program, called as COMMAND HOST PROGRAM ARGS...; it "
    "hands its standard input on: --starter 'docker exec -i'.",
)
@click.option(
    "--address",
    metavar="ADDR",
    help="With other hosts: the address by which they reach this one.  [default: its first that answers them]",
)
@click.option(
    "--replace",
    metavar="NAME,...",
    envvar=settings.REPLACE,
    help="Give scripts that ask for this backend (gloo, mpi) the backend phalanx in its place; rpc: torch's RPC.",
)
@click.option(
    "--interface",
    metavar="NAME",
    help="The network interface, on every host, over which ranks talk (ib0), if phalanx would choose another one.",
)
@click.option(
    "--memory",
    type=click.Choice(MODES),
    default="huge",
    show_default=True,
    help="On the CPU: large tensors in huge pages (huge), freed memory kept for the next step as well (keep), or "
    "neither (return).",
)
@click.option(
    "--svg", metavar="FILE", help="Draw where the ranks run (hosts, ranks, local ranks, devices) to this SVG file."
)
@click.option("--dry-run", is_flag=True, help="Print the rank table, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object in place of the table.")
@click.argument("target", metavar="TARGET")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def run(
    ranks: str | None,
    module: bool,
    rehearse: str | None,
    placement: Placement | None,
    bind: Bind,
    device: str | None,
    pass_local_rank: bool,
    variables: tuple[str, ...],
    no_preload: bool,
    reader: int | None,
    debugged: int | None,
    quiet: bool,
    no_prefix: bool,
    only: str | None,
    log_dir: str | None,
    tee: bool,
    grace: float | None,
    restarts: int,
    config: str | None,
    save_config: str | None,
    mpi: str | None,
    hosts: str | None,
    hostfile: str | None,
    ppn: int | None,
    starter: str | None,
    address: str | None,
    replace: str | None,
    interface: str | None,
    memory: Memory,
    svg: str | None,
    dry_run: bool,
    as_json: bool,
    target: str,
    arguments: tuple[str, ...],
) -> Job | None:
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
      phalanx run -n 4 --mpi mpiexec mpi.py   four ranks that can use MPI
      phalanx run --mpi mpiexec -H h1:4,h2:4 mpi.py

    A script joins the others with phalanx.init(), or with torch.distributed.init_process_group(), which needs no
    arguments: each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the other variables that torchrun sets. So
    scripts written for torchrun run unchanged. Options of torchrun, mpiexec, accelerate launch and horovodrun that mean
    the same as one of these are understood. Python scripts are forked from one process that has imported torch:
    starting many takes little longer than starting one.

    Every line of output is marked with its rank. If a rank fails, one block says which, why and where, and the others
    are ended. Ctrl-C ends the job and says where each rank was; a second one kills at once. Ctrl-\\ only prints the
    ranks' stacks. SIGUSR1 and SIGUSR2 are passed on to the ranks.

    --log-dir: a file for each rank has all that it wrote, with times, and why it failed; files of earlier jobs are
    continued. The terminal shows the rank table, notes and a failure, and with --only 0 rank 0's lines, or with --tee
    all. It works with all ranks on this host and with other hosts, whose ranks' files are here.

    --restarts K: if a rank fails, all are ended and started again at once, up to K times. Every attempt has a port, a
    key and a store of its own, its number in world.attempt and in TORCHELASTIC_RESTART_COUNT, and its files in a folder
    of its own (DIR/attempt-1 of --log-dir). The exit code is that of the last attempt. Ctrl-C ends the job for good,
    and so does an error before any rank runs.

    -H, --hostfile: the ranks are started on these hosts by ssh, which must log in there without a question, or by
    --starter. Everything is as on one host: arguments, environment, working directory, input, output, signals, exit
    codes. Every host needs the same Python, torch and Phalanx in the same place, and the same script in the same
    directory; what differs is said before anything runs. If a host is lost, the ranks of all hosts are ended. Inside an
    allocation of several hosts, of Slurm, PBS or LSF, none need be named. docs/clusters.md has examples.

    --mpi: the ranks are started by the mpiexec of MPICH, Intel MPI or Open MPI, or by srun, on this machine or on
    others that it can reach and that see the same files; all else is as without --mpi. Such ranks can use MPI
    (init_process_group("mpi"), mpi4py). Each of them imports torch for itself. If root starts the job, Open MPI gets
    the settings that allow it.

    --rehearse: ranks have the node ranks, local ranks, hosts and groups that they would have on such hosts. They
    compute on the CPU, talk through shared memory, and share this machine's cores. A program that would fail on those
    hosts because of its size or its placement fails here; its speed here says nothing about them.

    --replace gloo: every program that asks torch for gloo gets Phalanx's shared memory, without a change of the
    program: init_process_group("gloo") or "cpu:gloo,cuda:nccl", torch's own default for the CPU,
    new_group(backend="gloo"), Hugging Face Trainer, Accelerate, Lightning. torch.distributed.get_backend() still says
    gloo. PHALANX_REPLACE=gloo in the environment does the same, also under torchrun and other launchers. nccl cannot
    be replaced. --replace rpc: torch.distributed.rpc runs over Phalanx (docs/rpc.md); --replace gloo,rpc does both.

    OMP_NUM_THREADS is each rank's share of the cores unless you set it.

    Exit codes: 0 if every rank ends well; otherwise that of the rank that failed first (128 + signal if it was killed);
    1 if --strict ended the job, or a host is lost or cannot be reached; 2 for a mistake on the command line; 74 if
    the output cannot be written; 126 if the program that starts Phalanx on other hosts (ssh) cannot be run; 128 + the
    signal if Ctrl-C (130), SIGTERM (143) or SIGHUP (129) ended the job.
    """
    if placement is not None and rehearse is None:
        raise LaunchError(
            f"--placement {placement}: places ranks on rehearsed hosts; add --rehearse 2x4, or leave --placement out"
        )
    for variable in variables:
        _set(variable)
    for note in click.get_current_context().meta["notes"]:
        if not quiet:
            tell(f"note: {note}")
    launcher = _mpi_launcher(mpi)
    count = count_ranks(ranks) if ranks is not None else None
    where, start_by = _hosts(hosts, hostfile), parse_starter(starter)
    if where and ranks in COUNTED_HERE:
        raise LaunchError(
            f"-n {ranks}: counts what this host has; say how many ranks each host takes: -H h1:4,h2:4, or --ppn 4"
        )
    if not (where or start_by or launcher is not None or rehearse is not None or debugged is not None):
        where, start_by = _allotted(None if ranks in COUNTED_HERE else count, ppn, quiet=quiet)
        if where and ranks in COUNTED_HERE:
            count = None  # as many as the batch system has allotted
    started_here = not (where or start_by or launcher is not None or rehearse is not None)
    if started_here and not quiet and (ignored := note_ignored(os.environ, count)):
        tell(f"note: {ignored}")
    job = make_job(
        count,
        find_target(target, arguments, module=module),
        grace_s=grace,
        quiet=quiet,
        prefix=not no_prefix,
        output=decide_output(log_dir, tee=tee, only=only),
        mpi=launcher,
        hosts=where,
        ppn=ppn,
        starter=start_by,
        named=[variable.partition("=")[0] for variable in variables],
        address=address,
        rehearsal=parse_rehearsal(rehearse, placement or "block") if rehearse is not None else None,
        bind=bind,
        device=device,
        pass_local_rank=pass_local_rank,
        replace=names_to_replace(replace, source="--replace") if replace else (),
        interface=interface,
        preload=not no_preload,
        reader=reader,
        debugged=debugged,
        memory=memory,
        restarts=restarts,
    )
    if as_json and not dry_run:
        raise LaunchError("--json describes a job that is not started; add --dry-run")
    if save_config is not None:
        _save_config(save_config, click.get_current_context())
    if not dry_run:
        diagnosis, note = chosen_diagnosis(job.output.log_dir, is_python=job.target.is_python, ranks=job.ranks)
        if note and not quiet:
            tell(f"note: {note}")
        return replace_in(job, diagnosis=diagnosis, svg=svg or "")
    raise_file_limit()
    check_limits(job.ranks, machine_limits(python=job.target.is_python, forked=job.is_local))
    # Not imported at the top, because a job that is started needs none of it.
    from phalanx.launch.job.dry_run import describe

    describe(job, as_json=as_json)
    if svg is not None:
        from phalanx.topology.placement import write_placement

        write_placement(svg, job.rows())
    return None


def _set(variable: str) -> None:
    name, given, value = variable.partition("=")
    if not name or (not given and name not in os.environ):
        raise LaunchError(f"-x {variable}: is not set here; give it a value: -x {name or 'NAME'}=VALUE")
    if given:
        os.environ[name] = value


def _mpi_launcher(command: str | None) -> MpiLauncher | None:
    if command is None:
        return None
    if command.startswith("-"):
        raise LaunchError(f"--mpi {command}: needs the name of the MPI launcher first, as in --mpi mpiexec {command}")
    # Imported here, because it brings the rows of all launchers, which would take a quarter of the command's start.
    from phalanx.launch.job.mpi_launcher import find_mpi_launcher

    return find_mpi_launcher(command)


def _hosts(hosts: str | None, hostfile: str | None) -> list[HostSlots]:
    if hosts is not None and hostfile is not None:
        raise LaunchError("--hosts and --hostfile both say where the ranks run; give one of them")
    if hosts is not None:
        return parse_hosts(hosts)
    return read_hostfile(hostfile) if hostfile is not None else []


def _allotted(ranks: int | None, ppn: int | None, *, quiet: bool) -> tuple[list[HostSlots], list[str]]:
    """The hosts of a batch system's allocation, and how they are reached; none outside of one."""
    allocation = find_allocation(os.environ)
    if allocation is None:
        return [], []
    hosts = list(allocation.hosts)
    slots = sum(host.slots or 1 for host in hosts)
    if ppn is not None:
        hosts = [HostSlots(host.name) for host in hosts]
    elif ranks is not None and ranks > slots:
        # The batch system was asked for hosts, and phalanx run for ranks on them.
        hosts = [HostSlots(host.name, -(-ranks // len(hosts))) for host in hosts]
    if not quiet:
        where = f"{format_count(len(hosts), 'host')} of {allocation.title}"
        tell(f"note: ranks run on {where}; with -H localhost:N on this one alone")
    return hosts, list(allocation.starter)


def _save_config(path: str, ctx: click.Context) -> None:
    from phalanx.launch.job.config_file import format_config

    content = format_config(ctx)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise LaunchError(f"--save-config {path}: cannot be written: {error.strerror}") from error
