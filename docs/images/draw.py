"""Draw the pictures of the documents: ``python docs/images/draw.py`` draws all, and with names of files only those.

``run.svg`` is what ``phalanx run`` prints on a terminal, of two ranks of which one fails. The others are the steps of
collectives, as ``phalanx explain`` draws them.
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
from pathlib import Path

from rich.console import Console
from rich.text import Text

SCRIPT = """import phalanx

with phalanx.init() as world:
    for epoch, shards in enumerate([["a.bin", "b.bin"], ["c.bin"]]):
        print(f"epoch {epoch}: reading {shards[world.rank]}")
        world.barrier()
"""
COMMAND = "phalanx run -n 2 train.py"
EXPLAINED = {
    "explain-all_reduce.svg": "all_reduce -n 4",
    "explain-all_reduce-hosts.svg": "all_reduce --hosts 2x2",
    "explain-broadcast.svg": "broadcast -n 4",
    "explain-all_gather.svg": "all_gather -n 4",
    "explain-reduce_scatter.svg": "reduce_scatter -n 4",
    "explain-all_to_all.svg": "all_to_all -n 4",
}
HERE = Path(__file__).parent
OWN = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm-256color"}


def draw_run() -> None:
    """Run the script on a terminal of this program, and draw what it shows."""
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
    (HERE / "run.svg").write_text(re.sub(r"[ \t]+$|^\n", "", drawn, flags=re.MULTILINE))


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["run.svg", *EXPLAINED]
    if "run.svg" in wanted:
        draw_run()
    for name, words in EXPLAINED.items():
        if name in wanted:
            subprocess.run(["phalanx", "explain", *words.split(), "--svg", str(HERE / name)], env=OWN, check=True)
