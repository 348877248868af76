"""Draw the pictures of the pages: ``python docs/images/draw.py`` draws all, or only those that are named.

``run.svg`` shows what ``phalanx run`` prints on a terminal, of two ranks of which one fails, and ``timeline.svg`` a job
with a slow rank; their times and process ids differ each time. The other pictures come out the same each time;
``tests/pages/test_pictures.py`` compares them.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from phalanx.topology.placement import DARK, LIGHT

FOLDER = Path(__file__).parent
OWN = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm-256color"}
SCRIPT = """import phalanx

with phalanx.init() as world:
    for epoch, shards in enumerate([["a.bin", "b.bin"], ["c.bin"]]):
        print(f"epoch {epoch}: reading {shards[world.rank]}")
        world.barrier()
"""
COMMAND = "phalanx run -n 2 train.py"


def terminal() -> str:
    """Draw what the command prints on a terminal."""
    printed = b""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        ours, theirs = pty.openpty()  # for its colours
        subprocess.run(COMMAND.split(), cwd=folder, env=OWN, stdin=-3, stdout=theirs, stderr=theirs, check=False)
        os.close(theirs)
        with contextlib.suppress(OSError):  # how a terminal ends
            while piece := os.read(ours, 1 << 16):
                printed += piece.replace(f"{folder}/".encode(), b"")
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi(f"$ {COMMAND}\n" + printed.decode().replace("\r\n", "\n")))
    drawn = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="phalanx", unique_id="run"), flags=re.DOTALL)
    return re.sub(r"[ \t]+$|^\n", "", drawn, flags=re.MULTILINE)


def places(*options: str) -> Callable[[], str]:
    """Draw the ranks on their hosts as ``phalanx run --rehearse … --svg`` does."""

    def draw() -> str:
        with tempfile.NamedTemporaryFile(suffix=".svg") as file:
            command = ["phalanx", "run", "-q", "--rehearse", *options, "--svg", file.name, "--dry-run", "true"]
            subprocess.run(command, env=OWN, stdout=-3, check=True)
            return Path(file.name).read_text()

    return draw


def steps(*options: str) -> Callable[[], str]:
    """Draw the steps of a collective as ``phalanx explain … --svg`` does."""

    def draw() -> str:
        with tempfile.NamedTemporaryFile(suffix=".svg") as file:
            subprocess.run(["phalanx", "explain", *options, "--svg", file.name], env=OWN, stdout=-3, check=True)
            return Path(file.name).read_text()

    return draw


# -- diagrams of a lesson --------------------------------------------------------------------------

_STYLE = """.lesson { width: 100%; max-width: 720px; height: auto; font: 11px Arial, Helvetica, sans-serif; }
.lesson .name { font-weight: bold; }
.lesson .ring { fill: none; stroke-width: 1.5; }
.lesson .dashed { stroke-dasharray: 5 3; }
.lesson .way { fill: none; stroke-width: 1.5; }
"""


def _colours(scheme: dict[str, str]) -> str:
    return f""".lesson {{ background: {scheme["page"]}; fill: {scheme["text"]}; }}
.lesson .page, .lesson .rank {{ fill: {scheme["page"]}; }}
.lesson .host {{ fill: {scheme["host"]}; }}
.lesson .host, .lesson .rank, .lesson .ring, .lesson .way {{ stroke: {scheme["line"]}; }}
.lesson .head {{ fill: {scheme["line"]}; }}
"""


def diagram(title: str, said: str, height: int, parts: Sequence[str]) -> str:
    """Put parts into a picture of 360 units in width, in light and dark."""
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" version="1.1" class="lesson" width="100%" role="img"',
        f'viewBox="0 0 360 {height}" style="aspect-ratio: 360 / {height}" aria-labelledby="title desc">',
        f'<title id="title">{title}</title>',
        f'<desc id="desc">{said}</desc>',
        f"<style>\n{_STYLE}{_colours(LIGHT)}@media (prefers-color-scheme: dark) {{\n{_colours(DARK)}}}\n</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
        f'<rect class="page" width="360" height="{height}"/>',
        f'<text class="name" x="5" y="16">{title}</text>',
    )
    return "\n".join([*head, *parts, "</svg>\n"])


def box(kind: str, x: float, y: float, width: float, height: float, *lines: str) -> str:
    """Draw a box with lines of text, the first of them bold."""
    kinds = [' class="name"', *[""] * len(lines)]
    texts = (
        f'<text{kinds[number]} x="{x + 5:g}" y="{y + 16 + 14 * number:g}">{line}</text>'
        for number, line in enumerate(lines)
    )
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>' + "".join(texts)


def arrow(*points: tuple[float, float], dashed: bool = False) -> str:
    """Draw a line along points, with a head at its end."""
    way = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline class="way{" dashed" * dashed}" points="{way}" marker-end="url(#head)"/>'


def text(x: float, y: float, words: str) -> str:
    """Write a line of text."""
    return f'<text x="{x:g}" y="{y:g}">{words}</text>'


def ranks() -> str:
    """Draw one program that runs as four processes."""
    parts = [box("host", 130, 26, 100, 24, "hello.py")]
    for rank in range(4):
        left = 5 + 89 * rank
        parts.append(arrow((180, 50), (180, 60), (left + 41, 60), (left + 41, 74)))
        parts.append(box("rank", left, 76, 83, 66, f"rank {rank}", "of world size 4", "own pid", "own memory"))
    said = (
        "The program hello.py runs as four processes. Their ranks are 0 to 3, and each has a pid and memory of its own."
    )
    return diagram("One program, four processes", said, 148, parts)


def waiting() -> str:
    """Draw three ranks that send before they receive."""
    parts = [
        box("rank", 138, 26, 84, 40, "rank 0", "send to rank 1"),
        box("rank", 246, 106, 84, 40, "rank 1", "send to rank 2"),
        box("rank", 30, 106, 84, 40, "rank 2", "send to rank 0"),
        arrow((222, 46), (288, 46), (288, 105)),
        arrow((246, 126), (116, 126)),
        arrow((72, 106), (72, 46), (136, 46)),
        text(252, 40, "waits for 1"),
        text(150, 120, "waits for 2"),
        text(50, 40, "waits for 0"),
    ]
    said = (
        "Rank 0 waits in send for rank 1, rank 1 in send for rank 2, and rank 2 in send for rank 0. No rank receives."
    )
    return diagram("Three ranks that wait for each other", said, 152, parts)


def groups() -> str:
    """Draw the rows and columns of two hosts with two ranks each."""
    parts = [
        box("host", 5, 42, 250, 84),
        box("host", 5, 134, 250, 84),
        box("ring", 12, 52, 236, 64),
        box("ring", 12, 144, 236, 64),
        box("ring dashed", 18, 30, 106, 194),
        box("ring dashed", 136, 30, 106, 194),
    ]
    for rank in range(4):
        node, local = divmod(rank, 2)
        words = (f"rank {rank}", f"{local} in its row", f"{node} in its column")
        parts.append(box("rank", 24 + 118 * local, 60 + 92 * node, 94, 48, *words))
    for node in range(2):
        words = (f"node{node}", "row: node_group", ("{0, 1}", "{2, 3}")[node])
        parts += [text(262, 72 + 14 * number + 92 * node, line) for number, line in enumerate(words)]
    parts += [text(20, 240, "column: peers_group {0, 2}"), text(180, 240, "peers_group {1, 3}")]
    said = (
        "Ranks 0 and 1 are on node0, ranks 2 and 3 on node1. The rows {0, 1} and {2, 3} are the node groups. "
        "The columns {0, 2} and {1, 3} are the peers groups."
    )
    return diagram("Four ranks, two rows and two columns", said, 250, parts)


def collisions() -> str:
    """Draw which device each rank takes by ``rank % 4``, if ranks are placed in turn on two hosts."""
    parts = []
    for node in range(2):
        left = 5 + 177 * node
        parts.append(box("host", left, 26, 172, 126, f"node{node}"))
        for device in range(4):
            takers = [rank for rank in range(node, 8, 2) if rank % 4 == device]
            words = [f"rank {rank}" for rank in takers] or ["no rank"]
            x, y = left + 5 + 83 * (device % 2), 48 + 51 * (device // 2)
            parts.append(box("rank", x, y, 79, 48, f"cuda:{device}", *words))
    said = (
        "Eight ranks placed in turn on two hosts with four devices each, of which each takes the device rank % 4. "
        "On node0 ranks 0 and 4 take cuda:0, and ranks 2 and 6 cuda:2. On node1 ranks 1 and 5 take cuda:1, and ranks 3 "
        "and 7 cuda:3. The other devices have no rank."
    )
    return diagram("rank % 4 with cyclic placement", said, 158, parts)


def timeline() -> str:
    """Draw the timeline of the program of docs/profiling.md."""
    page = FOLDER.parent / "profiling.md"
    found = re.search(r"^```python\n(# train.py\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found, "the page has a program"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(found[1])
        for command in ("phalanx run -q -n 3 --log-dir logs train.py 6", "phalanx timeline logs --svg timeline.svg"):
            subprocess.run(command.split(), cwd=folder, env=OWN, stdin=-3, check=True)
        return Path(folder, "timeline.svg").read_text()


PICTURES: dict[str, Callable[[], str]] = {
    "places-2x2": places("2x2"),
    "places-2x4": places("2x4"),
    "places-2x4-cyclic": places("2x4", "--placement", "cyclic"),
    "places-1-3-2": places("1,3,2"),
    "ranks": ranks,
    "devices-cyclic": collisions,
    "send-ring": waiting,
    "groups-2x2": groups,
    "explain-all_reduce": steps("all_reduce", "-n", "4"),
    "explain-all_reduce-hosts": steps("all_reduce", "--hosts", "2x2"),
    "explain-broadcast": steps("broadcast", "-n", "4"),
    "explain-all_gather": steps("all_gather", "-n", "4"),
    "explain-reduce_scatter": steps("reduce_scatter", "-n", "4"),
    "explain-all_to_all": steps("all_to_all", "-n", "4"),
}


if __name__ == "__main__":
    drawn = {"run": terminal, "timeline": timeline, **PICTURES}
    for name in sys.argv[1:] or drawn:
        (FOLDER / f"{name}.svg").write_text(drawn[name]())
