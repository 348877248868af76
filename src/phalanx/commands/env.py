"""``phalanx env``: the place that this process would have if it called ``phalanx.init()`` now."""

from __future__ import annotations

import json
from typing import NamedTuple

import click

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.membership.meeting_point import meeting_point
from phalanx.native.core import quick_entry
from phalanx.system.host import this_host
from phalanx.topology.device_files import accelerator_files
from phalanx.topology.environment import Reading, read_environment
from phalanx.topology.launchers import commands_started, launcher_names
from phalanx.topology.table import RankRow
from phalanx.words import tell

_LATER = "found out together, once the ranks have met"
_EXAMPLES = ["phalanx env (in this shell: usually a world of one)", *commands_started("phalanx env")]
_HELP = f"""Show which launcher started this process, and what its place in the world would be.

Start it in place of your script. It joins no world and opens no port.

\b
  {f"{chr(10)}  ".join(_EXAMPLES)}

Each fact is shown with the variables that say so. If the launcher does not say on which node a rank is (those of MPI
never do), that is open here: the ranks find it out together when phalanx.init() joins them.

The object of --json has launcher, rank, world_size, local_rank, local_world_size, node_rank, num_nodes, master_addr,
master_port, device and backend. launcher is one of {", ".join(launcher_names()[:-1])} and none. env is RANK and
WORLD_SIZE, set by hand; none is a process without a launcher. torch is imported only on a machine with an accelerator,
to name the device.

Exit codes: 0; 2 if the variables describe no process (half set, not numbers, or two launchers that contradict each
other), with the reason on standard error.
"""
# The lines of the text: their values, and the facts of which the sources are shown.
_LINES = (
    ("launcher", "{launcher}", ("launcher",)),
    ("rank", "{rank} of {world_size}", ("rank", "world_size")),
    ("local rank", "{local_rank} of {local_world_size}", ("local_rank", "local_world_size")),
    ("node", "{node_rank} of {num_nodes}", ("node_rank", "num_nodes")),
    ("master", "{master_addr}:{master_port}", ("master_addr", "master_port")),
    ("device", "{device}", ("device",)),
    ("backend", "{backend}", ("backend",)),
)


@click.command(help=_HELP, short_help="Show which launcher started this process, and its place.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; null for what only the ranks together know.")
@click.option("--svg", metavar="FILE", help="Draw this rank on its host to this SVG file.")
@click.option("--local_rank", "--local-rank", "local_rank", metavar="N", help="What an older launcher gives a script.")
def env(as_json: bool, svg: str | None, local_rank: str | None) -> None:
    """Print the view; ``--help`` prints ``_HELP``."""
    facts, notes = view(read_environment(arguments=[] if local_rank is None else ["--local_rank", local_rank]))
    values = {name: value for name, (value, _) in facts.items()}
    if svg is not None:
        from phalanx.topology.placement import write_placement

        rank, own = values["rank"], values["local_rank"]
        if rank is None or own is None:
            raise LaunchError("--svg: no variable says the rank and its local rank; phalanx run --svg draws a job")
        row = RankRow(int(rank), 0, this_host().name, int(own), str(values["device"] or "?"), None, None, None)
        write_placement(svg, [row], title=f"rank {rank} of {values['world_size'] or '?'}, as phalanx env sees it")
    if as_json:
        click.echo(json.dumps(values))
        for note in notes:
            tell(f"note: {note}")
        return
    known = {name: "?" if value is None else value for name, value in values.items()}
    texts = [form.format(**known).replace("?:?", "?") for _, form, _ in _LINES]
    width = max(map(len, texts))
    for (title, _, names), text in zip(_LINES, texts, strict=True):
        sources = dict.fromkeys(source for name in names if (source := facts[name][1]))
        click.echo(f"{title:<12}{text:<{width}}  {', '.join(sources)}".rstrip())
    for note in notes:
        click.echo(f"note: {note}")


class View(NamedTuple):
    """Each value that is known before any rank has met another (else None), its source, and notes."""

    facts: dict[str, tuple[int | str | None, str]]
    notes: list[str]


def view(reading: Reading) -> View:
    """Find what is known before this process joins. Imports torch only if there is a device file."""
    launcher = reading.launcher
    said = f"{launcher.title}, by {reading.signs}" if launcher is not None else "no variable of a launcher is set"
    facts: dict[str, tuple[int | str | None, str]] = {"launcher": (reading.name, said)}
    for name in ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"):
        facts[name] = reading.number(name), reading.said(name) or _LATER
    facts["master_addr"] = reading.text("master_addr"), reading.said("master_addr")
    facts["master_port"] = reading.number("master_port"), reading.said("master_port")
    point = meeting_point(reading.place()) if (facts["world_size"][0] or 1) != 1 else None
    if point is not None:
        facts["master_addr"] = point.address, point.source
        facts["master_port"] = point.ports[0], "" if point.fixed else "the first that is tried"
    local_rank = reading.number("local_rank")
    if not accelerator_files():
        facts["device"] = "cpu", "no accelerator on this machine"
        facts["backend"] = settings.BACKEND, "the default for the CPU"
    elif local_rank is None:
        facts["device"] = None, f"needs the local rank, which is {_LATER}"
        facts["backend"] = None, "depends on the device"
    else:
        # The device files may be hidden from this process, or belong to a display: only torch knows.
        from phalanx.topology.device import choose_device, default_backend, find_accelerator

        neighbours = reading.number("local_world_size") or local_rank + 1
        device = choose_device(reading.number("rank") or 0, local_rank, neighbours, None, find_accelerator())
        facts["device"] = str(device), "torch.accelerator and the local rank"
        facts["backend"] = default_backend(device), f"the default for {device.type}"
    notes = list(reading.notes)
    if facts["world_size"][0] is None and launcher is not None:
        notes.append(f"the world size is not in the variables. {launcher.unknown_world}")
    entry = quick_entry()
    if isinstance(entry, str):
        notes.append(f"every call goes by ctypes, which costs small ones some microseconds: {entry}")
    return View(facts, notes)
