"""``phalanx stop``: end a running job."""

from __future__ import annotations

import click

from phalanx.words import format_count, tell


@click.command(short_help="End a running job of yours.")
@click.argument("job", metavar="JOB")
@click.option("--kill", "at_once", is_flag=True, help="Give the ranks no time to end by themselves.")
def stop(job: str, at_once: bool) -> None:
    """End a job of yours on this host, and wait until nothing of it is left.

    JOB is the id that phalanx list shows, or its beginning, or the process id of phalanx run.

    \b
      phalanx stop 3f2a
      phalanx stop --kill 3f2a

    It sends the job's launcher SIGTERM, which the launcher passes on to the ranks, also on other hosts. They may write
    a checkpoint, and are killed if they have not ended within the grace of the job (phalanx run --grace, 30 s by
    default). The launcher exits with 143; one that ignores SIGTERM is sent SIGINT or SIGHUP, and exits with 130 or 129.

    A launcher that is stopped (Ctrl-Z, kill -STOP) is continued first. One that does not end the job half a minute
    after the grace is killed; its helpers then kill the ranks. Ctrl-C here ends only the waiting.

    Exit codes: 0 if the job has ended, also by itself meanwhile; 2 if there is no such job, if JOB fits several, or if
    processes of the job could not be ended.
    """
    from phalanx.launch.running.jobs import find_job
    from phalanx.launch.running.stopping import stop as stop_job

    found = find_job(job)
    elapsed_s = stop_job(found, at_once=at_once, say=tell)
    ranks = format_count(found.ranks, "rank")
    click.echo(f"job {found.id} ({found.target}, {ranks}) has ended, {elapsed_s:.1f} s after it was asked to")
