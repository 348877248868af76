"""Draw the pictures of docs/learn from data_parallel.md on, each from a job that this starts: all, or those named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from phalanx.diagnosis.render import shown
from phalanx.topology.placement import DARK, LIGHT

HERE = Path(__file__).parent
# One unit is a pixel on a phone. Each surface bears the text with a contrast of at least 4.5.
WIDTH = 360
SURFACES = {
    "plain": (LIGHT["rank"], DARK["rank"]),
    "grey": (LIGHT["host"], DARK["host"]),
    "blue": ("#cfe2f8", "#17406b"),
    "orange": ("#fbdcb8", "#6a3d0c"),
    "red": ("#f8cfcf", "#742024"),
}


class Picture:
    """Boxes, lines and texts, in light and dark."""

    def __init__(self, title: str, said: str) -> None:
        self._title, self._said, self.bottom = title, said, 20.0
        self._drawn: list[str] = []
        self.text(6, 15, title, bold=True)

    def text(self, x: float, y: float, words: str, *, bold: bool = False, middle: bool = False) -> None:
        """Write a line of text, whose feet are at ``y``."""
        kind = ' class="name"' * bold + ' text-anchor="middle"' * middle
        self._drawn.append(f'<text{kind} x="{x:g}" y="{y:g}">{shown(words)}</text>')
        self.bottom = max(self.bottom, y + 4)

    def box(self, x: float, y: float, width: float, height: float, surface: str, words: str = "") -> None:
        """Draw a box, with text in its middle."""
        place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
        self._drawn.append(f'<rect class="{surface}" {place} rx="2"/>')
        if words:
            self.text(round(x + width / 2, 1), y + height / 2 + 4, words, middle=True)
        self.bottom = max(self.bottom, y + height)

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False) -> None:
        """Draw a line, with an arrow at its end."""
        end = ' marker-end="url(#arrow)"' * arrow
        self._drawn.append(f'<line x1="{x1:.1f}" y1="{y1:g}" x2="{x2:.1f}" y2="{y2:g}"{end}/>')
        self.bottom = max(self.bottom, y1, y2)

    def write(self, name: str) -> None:
        """Write it to the file ``name.svg`` beside this one."""
        height = self.bottom + 6
        box = f'viewBox="0 0 {WIDTH} {height:g}" style="aspect-ratio: {WIDTH} / {height:g}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="lesson" width="100%" role="img" {box} '
            f'aria-labelledby="{name}-title {name}-desc">',
            f'<title id="{name}-title">{shown(self._title)}</title>',
            f'<desc id="{name}-desc">{shown(self._said, 1000)}</desc>',
            "<style>",
            ".lesson { width: 100%; max-width: 720px; height: auto; font: 11px Arial, Helvetica, sans-serif; }",
            f".lesson .name {{ font-weight: bold; }}\n{_colours(0)}",
            f"@media (prefers-color-scheme: dark) {{\n{_colours(1)}\n}}\n</style>",
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            f'<rect class="page" width="{WIDTH}" height="{height:g}"/>',
        )
        (HERE / f"{name}.svg").write_text("\n".join([*head, *self._drawn, "</svg>\n"]))


def _colours(scheme: int) -> str:
    of = (LIGHT, DARK)[scheme]
    boxes = (f".lesson .{name} {{ fill: {both[scheme]}; stroke: {of['line']}; }}\n" for name, both in SURFACES.items())
    return (
        f".lesson {{ background: {of['page']}; fill: {of['text']}; }}\n.lesson .page {{ fill: {of['page']}; }}\n"
        f".lesson line {{ stroke: {of['line']}; stroke-width: 1.5; }}\n.lesson path {{ fill: {of['line']}; }}\n"
        + "".join(boxes)
    ).rstrip()


def of_page(page: str, script: str) -> str:
    """A script that a page shows."""
    found = re.search(rf"```python\n# {script}\n(.*?)```", (HERE.parent / "learn" / page).read_text(), re.DOTALL)
    if found is None:
        raise LookupError(f"{page} has no {script}")
    return found[1]


def run(script: str, *options: str) -> str:
    """Run a script, and return what its ranks print to standard output."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(script)
        own = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        words = ["phalanx", "run", "-q", *options, "script.py"]
        return subprocess.run(words, cwd=folder, env=own, stdin=-3, stdout=-1, stderr=-3, text=True, check=False).stdout


BACKWARD = """
import json, time
import torch, torch.distributed as dist, phalanx

times = []

def average(group, bucket):
    name, began = f"bucket {bucket.index() + 1}", time.monotonic()
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    def over(done):
        times.append((name, began, time.monotonic()))
        return done.value()[0] / group.size()
    return work.get_future().then(over)

with phalanx.init() as world:
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    model = world.data_parallel(torch.nn.Sequential(*layers), comm_hook=average, bucket_cap_mb=4)
    ready, best = [], None
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic()))
    for step in range(8):
        loss = model(torch.randn(512, 1024)).square().mean()
        world.barrier()
        times.clear(), ready.clear()
        began = time.monotonic()
        loss.backward()
        ended = time.monotonic()
        slowest = world.max({"s": ended - began})["s"]
        if best is None or slowest < best[0]:
            best = slowest, [world.rank, began, ended, list(ready), list(times)]
    print(json.dumps(best[1]))
"""


def data_parallel() -> None:
    """When each rank computes the gradients of each layer and averages them, in the quickest of eight passes."""
    ranks = sorted(json.loads(line) for line in run(BACKWARD, "-n", "2", "--no-prefix").splitlines())
    first, last = min(rank[1] for rank in ranks), max(rank[2] for rank in ranks)
    picture = Picture(
        f"One backward pass of two ranks, {1e3 * (last - first):.0f} ms",
        "Lanes of two ranks. Each computes the gradients of layer 4, then 3, 2 and 1. The all_reduce of a layer's "
        "gradients runs while the gradients of the layer before are computed.",
    )

    def bar(y: float, words: str, began: float, ended: float, surface: str) -> None:
        left, right = (58 + (WIDTH - 64) * (moment - first) / (last - first) for moment in (began, ended))
        picture.box(left, y, right - left, 18, surface, words)

    for at, (rank, began, _, ready, times) in enumerate(ranks):
        y = 26 + 84 * at
        picture.text(6, y + 13, f"rank {rank}", bold=True)
        for layer, (since, until) in enumerate(zip([began, *ready], ready, strict=False)):
            bar(y, f"layer {4 - layer}", since, until, "blue")
        picture.text(6, y + 36, "averages")
        for name, since, until in sorted(times):
            bucket = int(name.removeprefix("bucket "))
            bar(y + 22 + 20 * ((bucket + 1) % 2), f"{bucket}", since, until, "orange")
    picture.text(6, picture.bottom + 18, "Blue: gradients are computed. Orange: a bucket is averaged.")
    picture.write("data_parallel")


def data() -> None:
    """List the items that each rank gets from either kind of sharing."""
    printed = run(of_page("data.md", "shares.py"), "-n", "3")
    picture = Picture(
        "Ten items on three ranks",
        "Above, DistributedSampler gives each of three ranks four items, and items 0 and 1 twice. Below, world.loader "
        "gives them three, three and four items, each once.",
    )
    y = 24
    for name in ("DistributedSampler", "world.loader"):
        picture.text(6, y + 12, f"{name}:", bold=True)
        y += 20
        seen: set[str] = set()
        rows = dict(re.findall(rf"\[rank (\d)\] {name} (\[\[.*)", printed))
        items = {rank: re.findall(r"(\d)\.0", row) for rank, row in sorted(rows.items())}
        repeated = set()
        for at in range(4):
            for rank, row in items.items():
                if at < len(row):
                    repeated |= {(rank, at)} if row[at] in seen else set()
                    seen.add(row[at])
        for rank, row in items.items():
            picture.text(6, y + 15, f"rank {rank}")
            for at, item in enumerate(row):
                words = f"{item} again" if (rank, at) in repeated else item
                picture.box(58 + 74 * at, y, 68, 20, "red" if (rank, at) in repeated else "blue", words)
            y += 25
    picture.write("data")


def checkpoints() -> None:
    """The steps of both attempts of a job that fails once, and where it saves and loads."""
    printed = run(of_page("checkpoints.md", "train.py"), "-n", "2", "--restarts", "1")
    one, two = printed.split("loaded step ")
    picture = Picture(
        "A job that fails once, with --restarts 1",
        "Attempt 1 takes steps 1 to 5, saves after steps 2 and 4, and fails after step 5. Attempt 2 loads the "
        "checkpoint of step 4, takes steps 5 to 8, and saves after steps 6 and 8.",
    )
    for y, name, part in ((30, "attempt 1", one), (106, "attempt 2", two)):
        picture.text(6, y + 15, name)
        steps = [int(step) for step in re.findall(r"step (\d+): loss", part)]
        for step in steps:
            x = 58 + 37 * (step - 1)
            picture.box(x, y, 33, 22, "blue", f"{step}")
            if step % 2 == 0:
                picture.line(x + 16, y + 22, x + 16, 68 if y < 60 else 144, arrow=True)
                picture.box(x - 6, 68 if y < 60 else 144, 44, 18, "grey", "save")
        if y < 60:
            picture.box(58 + 37 * steps[-1], y, 62, 22, "red", "rank 1 fails")
    loaded = int(two[0])
    x = 58 + 37 * (loaded - 1) + 16
    picture.line(x + 16, 86, 58 + 37 * loaded + 12, 106, arrow=True)
    picture.text(x + 36, 100, "load")
    picture.write("checkpoints")


TIMED = """
import time
log = []
def timed(name, call, *values):
    result = call(*values)
    log.append((time.monotonic(), name))
    return result
"""


def rpc() -> None:
    """The calls of two trainers to a server, in the order in which they came back."""
    script = TIMED + of_page("rpc.md", "server.py")
    script = script.replace("server.pull()  #", 'timed("pull", server.pull)  #').replace("range(1, 101)", "range(1, 4)")
    script = re.sub(r"server\.push\((.*)\)\n", r'timed("push", server.push, \1)\n', script)
    script = script.replace("    if world.rank > 0:\n", "    world.barrier()\n    if world.rank > 0:\n")
    script = script.replace("            total =", "            time.sleep(0.05)  # computes\n            total =")
    script += "    import json\n    print(json.dumps([world.rank, log]))\n"
    calls = []
    for line in run(script, "-n", "3", "--no-prefix").splitlines():
        if line.startswith("["):
            rank, log = json.loads(line)
            calls += [(moment, rank, name) for moment, name in log]
    picture = Picture(
        "Two trainers and a server",
        "Time goes down. Each trainer in turn pulls the weights from the server and pushes a gradient. The calls of "
        "the two trainers come in any order, and each push is a step of the server.",
    )
    lanes = {1: 50, 0: 180, 2: 310}
    bottom = 56 + 22 * len(calls)
    for rank, x in lanes.items():
        picture.box(x - 44, 26, 88, 20, "grey", f"rank {rank}: " + ("trainer" if rank else "server"))
        picture.line(x, 46, x, bottom)
    steps = 0
    for at, (_, rank, name) in enumerate(sorted(calls)):
        y, x, way = 66 + 22 * at, lanes[rank], 1 if rank == 1 else -1
        ends = (180 - 2 * way, x + 2 * way) if name == "pull" else (x + 2 * way, 180 - 2 * way)
        picture.line(ends[0], y, ends[1], y, arrow=True)
        steps += name == "push"
        words = "pull: weights" if name == "pull" else f"push: step {steps}"
        picture.text((x + 180) / 2, y - 4, words, middle=True)
    picture.write("rpc")


def mistakes() -> None:
    """Pair the calls of two ranks that meet after one of them has left out a call."""
    script = of_page("mistakes.md", "left_out.py").replace("import torch\n", "import torch, sys\n", 1)
    script = script.replace("dist.all_reduce(loss)", 'dist.all_reduce(loss); say("loss", loss)')
    script = script.replace("dist.all_reduce(correct)", 'dist.all_reduce(correct); say("correct", correct)')
    say = '\ndef say(name, value):\n    print(f"call {rank} {name} {value.item():g}", flush=True)\n'
    script = script.replace("\nfor step", say + "\nfor step", 1)
    printed = run(script, "-n", "2", "--replace", "gloo", "--no-prefix")
    calls: dict[str, list[list[str]]] = {"0": [], "1": []}
    for rank, name, value in re.findall(r"call (\d) (\w+) (\d+)", printed):
        calls[rank].append([name, value])
    picture = Picture(
        "Rank 1 leaves out its call #4",
        "The calls of two ranks side by side. The first three meet the same call. From call 4 on, loss meets correct, "
        "and the sums are 101 instead of 2 and 200. The last call of rank 0 meets none.",
    )
    for rank, x in (("0", 40), ("1", 206)):
        picture.text(x, 34, f"rank {rank}", bold=True)
    calls["0"].append(["correct", ""])
    for at, (name, value) in enumerate(calls["0"]):
        y, other = 40 + 24 * at, calls["1"][at] if at < len(calls["1"]) else None
        picture.text(6, y + 14, f"#{at + 1}")
        right = other is not None and other[0] == name
        surface = "blue" if right else "red"
        picture.box(40, y, 148, 19, surface, f"{name}: {value}" if value else f"{name}: waits in vain")
        if other:
            picture.line(188, y + 9, 206, y + 9)
            picture.box(206, y, 148, 19, surface, f"{other[0]}: {other[1]}")
    picture.text(6, picture.bottom + 16, "Each rank adds 1 to loss and 100 to correct.")
    picture.write("mistakes")


PICTURES: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (data_parallel, data, checkpoints, rpc, mistakes)
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
