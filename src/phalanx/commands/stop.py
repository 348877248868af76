"""``phalanx stop``: end a running job."""

from __future__ import annotations

import click

from phalanx.words import format_count, tell


@click.command(short_help="End a running job of yours.")
@click.argument("job", metavar="JOB")
@click.option("--kill", "at_once", is_flag=True, help="Give the ranks no time to end by themselves.")
@click.option("--gently", is_flag=True, help="Let ranks that call world.should_stop() stop after the same step.")
def stop(job: str, at_once: bool, gently: bool) -> None:
    """End a job of yours on this host, and wait until nothing of it is left.

    JOB is the id that phalanx list shows, or its beginning, or the process id of phalanx run.

    \b
      phalanx stop 3f2a
      phalanx stop --kill 3f2a
      phalanx stop --gently 3f2a

    It sends the job's launcher SIGTERM, which the launcher passes on to the ranks, also on other hosts. They may write
    a checkpoint, and are killed if they have not ended within the grace of the job (phalanx run --grace, 30 s by
    default). The launcher exits with 143; one that ignores SIGTERM is sent SIGINT or SIGHUP, and exits with 130 or 129.

    If ranks call world.should_stop(), they are not sent SIGTERM: it is True on all of them at the same step, and the
    launcher exits with 0 if they then end well. A second phalanx stop ends the job as above. With --gently they may
    take as long as they want; a job whose ranks do not call it goes on.

    A launcher that is stopped (Ctrl-Z, kill -STOP) is continued first. One that does not end the job half a minute
    after the grace is killed; its helpers then kill the ranks. Ctrl-C here ends only the waiting.

    Exit codes: 0 if the job has ended, also by itself meanwhile; 2 if there is no such job, if JOB fits several, if
    processes of the job could not be ended, or if it goes on in spite of --gently.
    """
    from phalanx.errors import LaunchError
    from phalanx.launch.running.jobs import find_job
    from phalanx.launch.running.stopping import stop as stop_job
    from phalanx.launch.running.stopping import stop_gently

    if at_once and gently:
        raise LaunchError("--kill and --gently contradict each other; leave one of them out")
    found = find_job(job)
    elapsed_s = stop_gently(found, say=tell) if gently else stop_job(found, at_once=at_once, say=tell)
    ranks = format_count(found.ranks, "rank")
    click.echo(f"job {found.id} ({found.target}, {ranks}) has ended, {elapsed_s:.1f} s after it was asked to")
