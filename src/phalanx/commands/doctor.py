"""``phalanx doctor``: what stands in the way of a job, found before one is lost to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict

import click

from phalanx.doctor.accelerators import devices_as_text
from phalanx.doctor.finding import Finding, Level, as_json, as_text, worst
from phalanx.doctor.host import examine
from phalanx.doctor.hosts import examine_devices, examine_hosts, pairs_as_json, pairs_as_text
from phalanx.launch.job.hosts import HostSlots, chosen_hosts, find_allocation
from phalanx.launch.starters.ssh import parse_starter
from phalanx.words import format_list, tell_progress

_HELP = """Say what stands in the way of a job, here or on several hosts.

\b
  phalanx doctor                  this host, for as many ranks as it has cores
  phalanx doctor -n 8             for eight ranks
  phalanx doctor -H h1:4,h2:4     those hosts, and the way between each two of them
  salloc -N 2 phalanx doctor      the hosts of an allocation (of Slurm, PBS, LSF); -H localhost for this one alone
  srun phalanx doctor             each process of a launcher: what its variables say
  phalanx doctor --gpu            the accelerators, of this host or of those named, measured for two seconds

Each line is ok, a warning (a job runs, but slower or otherwise than one may think) or a failure, and says what to do.

On a host it looks at versions; at cores, memory, limits and folders; at accelerators; at the host's name, addresses
and interface; and at variables of launchers and of torch that contradict each other or change what happens.

With -H a helper is started on each host by ssh, or by --starter, and ends with this command. Versions, directories and
clocks are compared. Each host then connects to each other one, so that names that lead elsewhere, blocked ports,
packets that are too large for the way, and slow links are found. A helper listens on one port of every interface
meanwhile, and answers only callers who know a secret.

\b
The object of --json has worst; findings, each with level (ok, warning, failure), host, subject, said and remedy; and
with -H pairs, each with from, to, error, round_trip_us, bytes_per_s and others, and clocks, the seconds by which each
host is ahead of this one; and with --gpu devices, each with its host and what was measured.

\b
Exit codes: 0 if all is well; 1 if there is a warning; 3 if there is a failure; 2 for a wrong command line.
"""


@click.command(help=_HELP)
@click.option("-n", "ranks", type=click.IntRange(min=1), metavar="N", help="How many ranks are to run on each host.")
@click.option("-H", "--hosts", metavar="HOST[:N],…", help="The hosts, each with the number of its ranks.")
@click.option("--hostfile", metavar="FILE", help="The same in a file, one host a line: h1, h1:4 or h1 slots=4.")
@click.option("--starter", metavar="COMMAND", help="What starts a helper on a host in place of ssh, as of phalanx run.")
@click.option("--no-rates", is_flag=True, help="Do not measure rates, which uses each link for about a second.")
@click.option("--gpu", is_flag=True, help="Look at the accelerators alone, and measure them for two seconds.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object.")
def doctor(
    ranks: int | None,
    hosts: str | None,
    hostfile: str | None,
    starter: str | None,
    no_rates: bool,
    gpu: bool,
    json_wanted: bool,
) -> int:
    """Run the command; ``--help`` prints ``_HELP``."""
    start_by, named = parse_starter(starter), chosen_hosts(hosts, hostfile)
    allocation = find_allocation(os.environ) if not named and not start_by else None
    if allocation is not None:
        named = tuple(HostSlots(one.name, ranks or one.slots) for one in allocation.hosts)
        start_by = list(allocation.starter)
        tell_progress(f"these are the hosts of {allocation.title}")
    if not named and (starter or no_rates):
        option = "--starter" if starter else "--no-rates"
        raise click.UsageError(f"{option} is for other hosts; name them with -H or --hostfile")
    if gpu:
        made = examine_devices([one.name for one in named], start_by)
        records = [{"host": host, **asdict(one)} for host, own in made.devices.items() for one in own]
        if not records and not json_wanted and worst(made.findings) is Level.OK:
            click.echo(f"no accelerator on {format_list(list(filter(None, made.devices))) or 'this machine'}")
            return 0
        return _show(made.findings, {"devices": records}, devices_as_text(made.devices), json_wanted)
    if not named:
        return _show(examine(ranks), {}, "", json_wanted)
    asked = {one.name: one.slots or ranks for one in named}
    made = examine_hosts(asked, start_by, rate=not no_rates, progress=tell_progress)
    more = {"pairs": pairs_as_json(made.reached), "clocks": made.offsets_s}
    return _show(made.findings, more, pairs_as_text([*asked], made.reached), json_wanted)


def _show(findings: list[Finding], more: Mapping[str, object], table: str, json_wanted: bool) -> int:
    tell_progress("")
    if json_wanted:
        click.echo(json.dumps({**as_json(findings), **more}))
    else:
        color = False if "NO_COLOR" in os.environ else None  # None: on a terminal
        click.echo(as_text(findings) + (table and f"\n{table}"), nl=False, color=color)
    return worst(findings).exit_code
