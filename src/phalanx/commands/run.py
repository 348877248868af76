"""``phalanx run``: its options, and the job that they describe."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from phalanx import settings
from phalanx.c10d.replace import names_to_replace
from phalanx.errors import LaunchError
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.host_slots import HostSlots, parse_hosts, read_hostfile
from phalanx.launch.job.job import Job, make_job
from phalanx.launch.job.memory import MODES, Memory
from phalanx.launch.job.rehearsal import Placement, parse_rehearsal
from phalanx.launch.job.target import find_target
from phalanx.system.limits import check_limits, machine_limits, raise_file_limit

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

__all__ = ["run"]

# The target ends the options: all arguments after it are its own, as with python and python -m.
_RUN_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(context_settings=_RUN_SETTINGS)
@click.option(
    "-n",
    "--ranks",
    type=int,
    metavar="N",
    help="How many ranks (processes) to start.  [default: 1, or as many as the hosts take]",
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
    "-H", "--hosts", metavar="HOST:N,...", help="With --mpi: the hosts, and how many ranks each takes, in rank order."
)
@click.option("--hostfile", metavar="FILE", help="With --mpi: the hosts from a file, one a line (h1:4, or h1 slots=4).")
@click.option("--ppn", type=int, metavar="N", help="With --hosts or --hostfile: the most ranks a host takes.")
@click.option(
    "--address",
    metavar="ADDR",
    help="With --mpi: this host's address on the network of the ranks, if phalanx finds another one.",
)
@click.option(
    "--replace",
    metavar="NAME,...",
    envvar=settings.REPLACE,
    help="Give scripts that ask for this backend (gloo, mpi) the backend phalanx in its place.",
)
@click.option(
    "--interface",
    metavar="NAME",
    help="The network interface, on every host, over which ranks talk (ib0), if phalanx finds another one.",
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
    ranks: int | None,
    module: bool,
    rehearse: str | None,
    placement: Placement | None,
    bind: Bind,
    device: str | None,
    pass_local_rank: bool,
    quiet: bool,
    no_prefix: bool,
    grace: float | None,
    mpi: str | None,
    hosts: str | None,
    hostfile: str | None,
    ppn: int | None,
    address: str | None,
    replace: str | None,
    interface: str | None,
    memory: Memory,
    dry_run: bool,
    as_json: bool,
    target: str,
    arguments: tuple[str, ...],
) -> Job | None:
    """Start TARGET as N processes, and give each its place among them.

    TARGET is a Python script (or a directory or zip archive with a __main__.py), a module with -m, or any
    other program. Options of the launcher come before TARGET; all arguments after it are its own.

    \b
      phalanx run -n 4 train.py --lr 0.1      four ranks of a script
      phalanx run -n 2 -m package.train       two ranks of a module
      phalanx run -n 8 --dry-run train.py     which rank would run where
      phalanx run --rehearse 32x8 train.py    256 ranks, as if on 32 hosts
      phalanx run -n 2 ./simulate --fast      a program that is not Python
      phalanx run -n 4 --mpi mpiexec mpi.py   four ranks that can use MPI
      phalanx run --mpi mpiexec -H h1:4,h2:4 mpi.py
      phalanx run -n 4 --replace gloo ddp.py  the faster backend for a script that asks for gloo

    In its environment each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the other variables that
    torchrun sets, so scripts written for torchrun run unchanged. Python scripts are forked from one process
    that has imported torch, so starting many ranks takes little longer than starting one.

    With --mpi the ranks are started by the mpiexec of MPICH, Intel MPI or Open MPI, or by srun, on this machine or
    on others that it can reach and that see the same files; all else is as without --mpi. Such ranks can use MPI
    (init_process_group("mpi"), mpi4py). Each of them imports torch for itself. If root starts the job, Open MPI gets
    the settings that allow it.

    With --rehearse ranks have the node ranks, local ranks, hosts and groups that they would have on such hosts. They
    compute on the CPU, talk through shared memory, and share this machine's cores. A program that would fail on those
    hosts because of its size or its placement fails here; its speed here says nothing about them.

    With --replace gloo, every program that asks torch for gloo gets Phalanx's shared memory, without a change of the
    program: init_process_group("gloo") or "cpu:gloo,cuda:nccl", torch's own default for the CPU,
    new_group(backend="gloo"), Hugging Face Trainer, Accelerate, Lightning. torch.distributed.get_backend() then says
    phalanx. PHALANX_REPLACE=gloo in the environment does the same, also under torchrun and other launchers. nccl cannot
    be replaced.

    OMP_NUM_THREADS is each rank's share of the cores unless you set it. Rank 0 reads the launcher's standard
    input, unless that is a terminal; the others read nothing.

    Exit codes: 0 if every rank ends well; otherwise that of the rank that failed first (128 + signal if it
    was killed); 2 for a mistake on the command line; 130 after Ctrl-C. A second Ctrl-C kills at once.
    """
    if placement is not None and rehearse is None:
        raise LaunchError(
            f"--placement {placement}: places ranks on rehearsed hosts; add --rehearse 2x4, or leave --placement out"
        )
    job = make_job(
        ranks,
        find_target(target, arguments, module=module),
        grace_s=grace,
        quiet=quiet,
        prefix=not no_prefix,
        mpi=_mpi_launcher(mpi),
        hosts=_hosts(hosts, hostfile),
        ppn=ppn,
        address=address,
        rehearsal=parse_rehearsal(rehearse, placement or "block") if rehearse is not None else None,
        bind=bind,
        device=device,
        pass_local_rank=pass_local_rank,
        replace=names_to_replace(replace, source="--replace") if replace else (),
        interface=interface,
        memory=memory,
    )
    if as_json and not dry_run:
        raise LaunchError("--json describes a job that is not started; add --dry-run")
    if not dry_run:
        return job
    raise_file_limit()
    check_limits(job.ranks, machine_limits(python=job.target.is_python, forked=job.mpi is None))
    _describe(job, as_json)
    return None


def _mpi_launcher(command: str | None) -> MpiLauncher | None:
    if command is None:
        return None
    # Imported here, because it brings the rows of all launchers, which would take a quarter of the command's start.
    from phalanx.launch.job.mpi_launcher import find_mpi_launcher

    return find_mpi_launcher(command)


def _hosts(hosts: str | None, hostfile: str | None) -> list[HostSlots]:
    if hosts is not None and hostfile is not None:
        raise LaunchError("--hosts and --hostfile both say where the ranks run; give one of them")
    if hosts is not None:
        return parse_hosts(hosts)
    return read_hostfile(hostfile) if hostfile is not None else []


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
