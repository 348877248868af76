"""``phalanx run``: its options, and the job that they describe."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from phalanx import settings
from phalanx.c10d.replace import names_to_replace
from phalanx.errors import LaunchError
from phalanx.launch.job.allocation import find_allocation
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.host_slots import HostSlots, parse_hosts, read_hostfile
from phalanx.launch.job.job import Job, make_job
from phalanx.launch.job.memory import MODES, Memory
from phalanx.launch.job.rehearsal import Placement, parse_rehearsal
from phalanx.launch.job.spellings import translate
from phalanx.launch.job.target import find_target
from phalanx.system.device_files import accelerator_files
from phalanx.system.limits import check_limits, machine_limits, raise_file_limit, usable_cores
from phalanx.words import format_count, tell

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

__all__ = ["run"]

# The options in the order of --help; those that no group names come first.
_GROUPS = {
    "What each rank gets": (
        "device",
        "bind",
        "memory",
        "variables",
        "replace",
        "interface",
        "no_preload",
        "pass_local_rank",
    ),
    "The terminal": ("reader", "debugged", "quiet", "no_prefix", "grace"),
    "Other hosts": ("hosts", "hostfile", "ppn", "starter", "mpi", "address"),
    "Without running it": ("rehearse", "placement", "dry_run", "as_json"),
}


class _Run(click.Command):
    """Accepts the options of other launchers too, and shows its own in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        ours, ctx.meta["notes"] = translate(args, own)
        return super().parse_args(ctx, ours)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {name for names in _GROUPS.values() for name in names}
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        first = {"Options": [option.name for option in options if option.name not in named]}
        for title, names in {**first, **_GROUPS}.items():
            records = [option.get_help_record(ctx) for option in options if option.name in names]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])


# The target ends the options: all arguments after it are its own, as with python and python -m.
@click.command(cls=_Run, context_settings={"allow_interspersed_args": False})
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
    help="Set a variable for all ranks. All others of this environment they have anyway; on other hosts all but those "
    "of a login or a machine (HOME, TMPDIR, SSH_…), which -x NAME passes on too.",
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
@click.option("-q", "--quiet", is_flag=True, help="Print no rank table and no notes; errors are still printed.")
@click.option("--no-prefix", is_flag=True, help="Do not write '[rank 3]' before each line of output.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0.0),
    metavar="SECONDS",
    help="How long ranks may take to end after they were asked to, before they are killed.  [default: 1 after Ctrl-C, "
    "30 after SIGTERM or SIGHUP, 5 after another rank's failure]",
)
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
    help="The hosts, and how many ranks each takes, in rank order. They are reached by ssh, or by --starter or --mpi.",
)
@click.option("--hostfile", metavar="FILE", help="The hosts from a file, one a line (h1:4, or h1 slots=4).")
@click.option("--ppn", type=int, metavar="N", help="With --hosts or --hostfile: the most ranks a host takes.")
@click.option(
    "--starter",
    metavar="COMMAND",
    help="In place of ssh: start processes on other hosts by this program, called as COMMAND HOST PROGRAM ARGS...; it "
    "hands its standard input on: --starter 'docker exec -i'.",
)
@click.option(
    "--address",
    metavar="ADDR",
    help="With other hosts: this host's address on their network, if phalanx would choose another one.",
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
    grace: float | None,
    mpi: str | None,
    hosts: str | None,
    hostfile: str | None,
    ppn: int | None,
    starter: str | None,
    address: str | None,
    replace: str | None,
    interface: str | None,
    memory: Memory,
    dry_run: bool,
    as_json: bool,
    target: str,
    arguments: tuple[str, ...],
) -> Job | None:
    """Start TARGET as N processes (ranks) that work together, and give each its place among them.

    TARGET is a Python script (or a directory or zip archive with a __main__.py), a module with -m, or any other
    program. Options of the launcher come before TARGET; all arguments after it are its own.

    \b
      phalanx run -n 4 train.py --lr 0.1      four ranks of a script
      phalanx run -n auto train.py            a rank for each accelerator, or core
      phalanx run -n 2 -m package.train       two ranks of a module
      phalanx run -n 2 ./simulate --fast      a program that is not Python
      phalanx run -n 4 --debug 2 train.py     breakpoint() works in rank 2
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

    -H, --hostfile: the ranks are started on these hosts by ssh, which must log in there without a question, or by
    --starter. Everything is as on one host: arguments, environment, working directory, input, output, signals, exit
    codes. Every host needs the same Python, torch and Phalanx in the same place, and the same script in the same
    directory; what differs is said before anything runs. If a host is lost, the ranks of all hosts are ended. Inside an
    allocation of several hosts, of Slurm or PBS, none need be named. docs/clusters.md has examples.

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
    2 for a mistake on the command line; 74 if the output cannot be written; 130 after Ctrl-C.
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
    count = _number_of_ranks(ranks)
    where, start_by = _hosts(hosts, hostfile), _starter(starter)
    if not (where or start_by or launcher is not None or rehearse is not None or debugged is not None):
        where, start_by = _allotted(count, ppn, quiet=quiet)
    job = make_job(
        count,
        find_target(target, arguments, module=module),
        grace_s=grace,
        quiet=quiet,
        prefix=not no_prefix,
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
    )
    if as_json and not dry_run:
        raise LaunchError("--json describes a job that is not started; add --dry-run")
    if not dry_run:
        return job
    raise_file_limit()
    check_limits(job.ranks, machine_limits(python=job.target.is_python, forked=job.is_local))
    _describe(job, as_json)
    return None


def _set(variable: str) -> None:
    name, given, value = variable.partition("=")
    if not name or (not given and name not in os.environ):
        raise LaunchError(f"-x {variable}: is not set here; give it a value: -x {name or 'NAME'}=VALUE")
    if given:
        os.environ[name] = value


def _number_of_ranks(given: str | None) -> int | None:
    if given is None:
        return None
    if given in ("auto", "gpu", "cpu"):
        devices = 0 if given == "cpu" or not accelerator_files() else _accelerators()
        if given == "gpu" and not devices:
            raise LaunchError("-n gpu: torch sees no accelerator on this machine; -n cpu starts a rank for each core")
        return devices or usable_cores()
    try:
        return int(given)
    except ValueError:
        raise LaunchError(f"-n {given}: is not a number of ranks; give one, or auto, gpu or cpu") from None


def _accelerators() -> int:
    """How many accelerators torch sees; asked in another process, because the launcher never imports torch."""
    code = "import torch; print(torch.accelerator.device_count())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 else 0


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


def _starter(command: str | None) -> list[str]:
    if command is None:
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--starter {command!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        named = f"this host has no program {words[0]}" if words else "it names no program"
        raise LaunchError(f"--starter {command!r}: {named}")
    return words


def _describe(job: Job, as_json: bool) -> None:
    if as_json:
        description = {
            "host": job.host,
            "world_size": job.ranks,
            "cores": job.cores,
            "target": {"kind": job.target.kind, "path": job.target.path, "argv": list(job.target.argv)},
            "mpi": job.mpi.command(job.ranks, job.hosts, ["RANK"], "HOSTS") if job.mpi is not None else None,
            "rehearsal": asdict(job.rehearsal) if job.rehearsal is not None else None,
            "memory": dict(job.memory),
            "bind": job.bind,
            "cpus": list(map(list, job.cpus)) if job.cpus else None,
            "hosts": [asdict(host) for host in job.hosts],
            "ranks": [asdict(row) for row in job.rows()],
            "notes": job.warnings(),
        }
        click.echo(json.dumps(description))
        return
    from phalanx.topology.table import format_rank_table

    click.echo(format_rank_table(job.rows(), title=job.title()), nl=False)
    if job.mpi is not None:
        words = job.mpi.command(job.ranks, job.hosts, [job.target.name, *job.target.argv[1:]], "HOSTS")
        click.echo(f"started by {job.mpi.title}: {shlex.join(words)}")
    if not job.quiet:
        for warning in job.warnings():
            click.echo(f"phalanx: note: {warning}", err=True)
