"""Draw run.svg, what ``phalanx run`` prints of two ranks of which one fails, and timeline.svg, of a slow rank."""

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
COMMAND, printed = "phalanx run -n 2 train.py", b""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "train.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()  # for its colours
    own = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm-256color"}
    subprocess.run(COMMAND.split(), cwd=folder, env=own, stdin=-3, stdout=theirs, stderr=theirs, check=False)
    os.close(theirs)
    with contextlib.suppress(OSError):  # how a terminal ends
        while piece := os.read(ours, 1 << 16):
            printed += piece.replace(f"{folder}/".encode(), b"")

console = Console(record=True, width=100, file=io.StringIO())
console.print(Text.from_ansi(f"$ {COMMAND}\n" + printed.decode().replace("\r\n", "\n")))
drawn = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="phalanx", unique_id="run"), flags=re.DOTALL)
Path(__file__).with_name("run.svg").write_text(re.sub(r"[ \t]+$|^\n", "", drawn, flags=re.MULTILINE))

page = Path(__file__).parents[1] / "profiling.md"
found = re.search(r"^```python\n(# train.py\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
assert found, "the page has a program"
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "train.py").write_text(found[1])
    own = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in ("phalanx run -q -n 3 --log-dir logs train.py 6", "phalanx timeline logs --svg timeline.svg"):
        subprocess.run(command.split(), cwd=folder, env=own, stdin=-3, check=True)
    Path(__file__).with_name("timeline.svg").write_text(Path(folder, "timeline.svg").read_text())
