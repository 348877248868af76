"""``phalanx env``: the place that this process would have if it called ``phalanx.init()`` now."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

import click

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.native.core import quick_entry
from phalanx.rendezvous.meeting_point import meeting_point
from phalanx.system.host import this_host
from phalanx.topology.device_files import accelerator_files
from phalanx.topology.environment import Reading, read_environment
from phalanx.topology.launchers import commands_started, launcher_names
from phalanx.topology.table import RankRow

__all__ = ["env"]


_LATER = "found out together, once the ranks have met"

_HELP = f"""Show which launcher started this process, and what its place in the world would be.

Start it in place of your script. It joins no world and opens no port.

\b
{
    textwrap.indent(
        chr(10).join(["phalanx env (in this shell: usually a world of one)", *commands_started("phalanx env")]), "  "
    )
}

Each fact is shown with the variables that say so. If the launcher does not say on which node a rank is (those of MPI
never do), that is open here: the ranks find it out together when phalanx.init() joins them.

\b
{
    textwrap.fill(
        "The object of --json has launcher, rank, world_size, local_rank, local_world_size, node_rank, num_nodes, "
        f"master_addr, master_port, device and backend. launcher is one of {', '.join(launcher_names()[:-1])} and "
        "none. env is RANK and WORLD_SIZE, set by hand; none is a process without a launcher.",
        112,
    )
}

torch is imported only on a machine with an accelerator, to name the device.

\b
Exit codes: 0; 2 if the variables describe no process (half set, not numbers, or two launchers that contradict
each other), with the reason on standard error.
"""


@click.command(help=_HELP, short_help="Show which launcher started this process, and its place.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object; null for what is known only once the ranks have met.",
)
@click.option("--svg", metavar="FILE", help="Draw this rank on its host to this SVG file.")
@click.option(
    "--local_rank",
    "--local-rank",
    "local_rank",
    metavar="N",
    help="The local rank that an older launcher gives a script as an argument; -1 for not distributed.",
)
def env(as_json: bool, svg: str | None, local_rank: str | None) -> None:
    """The command itself; ``--help`` prints ``_HELP``."""
    shown = view(read_environment(arguments=[] if local_rank is None else ["--local_rank", local_rank]))
    if svg is not None:
        _draw(shown, svg)
    if as_json:
        click.echo(json.dumps(shown.values))
        for note in shown.notes:
            click.echo(f"phalanx: note: {note}", err=True)
        return
    click.echo(as_text(shown), nl=False)


def _draw(view: View, path: str) -> None:
    from phalanx.topology.placement import write_placement

    rank, local_rank, device = (view.values[name] for name in ("rank", "local_rank", "device"))
    if rank is None or local_rank is None:
        raise LaunchError("--svg: no variable says the rank and its local rank; phalanx run --svg draws a whole job")
    row = RankRow(int(rank), 0, this_host().name, int(local_rank), str(device or "?"), None, None, None)
    write_placement(path, [row], title=f"rank {rank} of {view.values['world_size'] or '?'}, as phalanx env sees it")


@dataclass(frozen=True)
class View:
    """The answer, before any rank has met another.

    Attributes:
        values: what ``phalanx env --json`` prints; None for what is known only once the ranks have met.
        sources: for each of these values, where it was read.
        notes: what the user should know.
    """

    values: dict[str, int | str | None]
    sources: dict[str, str]
    notes: tuple[str, ...]


def view(reading: Reading) -> View:
    """The facts that are known before this process joins. Imports torch only if there is a device file."""
    values: dict[str, int | str | None] = {"launcher": reading.name}
    sources = {"launcher": "no variable of a launcher is set"}
    if reading.launcher is not None:
        sources["launcher"] = f"{reading.launcher.title}, by {reading.signs}"
    for name in ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"):
        values[name] = reading.number(name)
        sources[name] = reading.said(name) or _LATER
    values["master_addr"], sources["master_addr"] = reading.text("master_addr"), reading.said("master_addr")
    values["master_port"], sources["master_port"] = reading.number("master_port"), reading.said("master_port")
    point = meeting_point(reading.place()) if (values["world_size"] or 1) != 1 else None
    if point is not None:
        values["master_addr"], sources["master_addr"] = point.address, point.source
        values["master_port"], sources["master_port"] = point.ports[0], "" if point.fixed else "the first that is tried"
    values["device"], sources["device"], values["backend"], sources["backend"] = _device(reading)
    notes = list(reading.notes)
    if values["world_size"] is None and reading.launcher is not None:
        notes.append(f"the world size is not in the variables. {reading.launcher.unknown_world}")
    entry = quick_entry()
    if isinstance(entry, str):
        notes.append(f"every call goes by ctypes, which costs small ones some microseconds: {entry}")
    return View(values, sources, tuple(notes))


def _device(reading: Reading) -> tuple[str | None, str, str | None, str]:
    if not accelerator_files():
        return "cpu", "no accelerator on this machine", settings.BACKEND, "the default for the CPU"
    # The device files may be hidden from this process, or belong to a display: only torch knows.
    from phalanx.topology.device import choose_device, default_backend, find_accelerator

    local_rank = reading.number("local_rank")
    if local_rank is None:
        return None, f"needs the local rank, which is {_LATER}", None, "depends on the device"
    neighbours = reading.number("local_world_size") or local_rank + 1
    device = choose_device(reading.number("rank") or 0, local_rank, neighbours, None, find_accelerator())
    return (
        str(device),
        "torch.accelerator and the local rank",
        default_backend(device),
        f"the default for {device.type}",
    )


def as_text(shown: View) -> str:
    """The view as lines for people: the fact, its value, and where it was read."""
    values = {name: "?" if value is None else str(value) for name, value in shown.values.items()}
    lines = [
        ("launcher", values["launcher"], shown.sources["launcher"]),
        ("rank", f"{values['rank']} of {values['world_size']}", _both(shown, "rank", "world_size")),
        (
            "local rank",
            f"{values['local_rank']} of {values['local_world_size']}",
            _both(shown, "local_rank", "local_world_size"),
        ),
        ("node", f"{values['node_rank']} of {values['num_nodes']}", _both(shown, "node_rank", "num_nodes")),
        (
            "master",
            f"{values['master_addr']}:{values['master_port']}" if shown.values["master_addr"] else "?",
            _both(shown, "master_addr", "master_port"),
        ),
        ("device", values["device"], shown.sources["device"]),
        ("backend", values["backend"], shown.sources["backend"]),
    ]
    width = max(len(value) for _, value, _ in lines)
    text = [f"{name:<12}{value:<{width}}  {source}".rstrip() for name, value, source in lines]
    return "\n".join([*text, *(f"note: {note}" for note in shown.notes)]) + "\n"


def _both(shown: View, *names: str) -> str:
    return ", ".join(dict.fromkeys(shown.sources[name] for name in names if shown.sources[name]))
