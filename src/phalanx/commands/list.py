"""``phalanx list``: the jobs of this user that run on this host."""

from __future__ import annotations

import json
import shutil
import sys

import click


@click.command(short_help="Show your jobs that run on this host.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, one for each job.")
def list(as_json: bool) -> None:
    """Show the jobs of phalanx run, and of phalanx.launch(), that you have running on this host.

    Jobs of other users, and jobs whose launcher runs on another host, are not shown.

    \b
      phalanx list
      phalanx top 3f2a           how the ranks of a job are getting on; the beginning of its id is enough
      phalanx stop 3f2a          end it

    The objects of --json have id, run_id (PHALANX_RUN_ID in the ranks), pid, ranks, since, target, arguments,
    directory, host, hosts (those that were asked for), mpi (the MPI launcher's name, or empty), is_python, and pids
    (of the ranks, once they have been started).
    """
    from phalanx.launch.running.jobs import WHERE_LISTED, running_jobs
    from phalanx.launch.running.table import described_job, format_jobs

    jobs = running_jobs()
    if as_json:
        click.echo(json.dumps([described_job(job) for job in jobs], indent=1))
    elif jobs:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo(format_jobs(jobs, width), nl=False)
    else:
        click.echo(f"no job of yours runs on this host. {WHERE_LISTED}")
