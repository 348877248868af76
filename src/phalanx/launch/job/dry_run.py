"""``--dry-run``: what a job would start, for people or as JSON."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict

import click

from phalanx.launch.job.job import Job
from phalanx.topology.table import format_rank_table
from phalanx.words import printable

__all__ = ["describe"]


def describe(job: Job, *, as_json: bool) -> None:
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
    if not job.quiet:
        for warning in job.warnings():
            click.echo(f"phalanx: note: {warning}", err=True)
