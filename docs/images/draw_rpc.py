"""Draw rpc_call.svg and rpc_object.svg: one call between two workers, and who holds a remote object."""

from __future__ import annotations

from pathlib import Path

from phalanx.topology.placement import DARK, LIGHT

# One unit is a pixel on a phone, so no text is smaller than 11 of them.
WIDTH, LINE = 360, 14
STYLE = """.rpc { width: 100%; max-width: 720px; height: auto; font: 11px Arial, Helvetica, sans-serif; }
.rpc .name { font-weight: bold; }
.rpc .code { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.rpc .arrow { fill: none; stroke-width: 1.5; }
"""


def colours(scheme: dict[str, str]) -> str:
    """Give the page, the boxes, the arrows and the text the colours of a scheme."""
    return (
        f".rpc {{ background: {scheme['page']}; fill: {scheme['text']}; }}\n"
        f".rpc .page {{ fill: {scheme['page']}; }}\n"
        f".rpc .process {{ fill: {scheme['host']}; stroke: {scheme['line']}; }}\n"
        f".rpc .inner {{ fill: {scheme['rank']}; stroke: {scheme['line']}; }}\n"
        f".rpc .arrow {{ stroke: {scheme['text']}; }}\n"
    )


def box(kind: str, left: int, top: int, width: int, height: int) -> str:
    """Draw a process, or something in it."""
    return f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="3"/>'


def text(left: int, top: int, *lines: str, kind: str = "", anchor: str = "start") -> str:
    """Write lines of text from a point downwards."""
    return "\n".join(
        f'<text class="{kind}" x="{left}" y="{top + LINE * number + 11}" text-anchor="{anchor}">{line}</text>'
        for number, line in enumerate(lines)
    )


def arrow(*points: tuple[int, int]) -> str:
    """Draw an arrow through points."""
    return f'<path class="arrow" marker-end="url(#head)" d="M{" L".join(f"{x} {y}" for x, y in points)}"/>'


def picture(height: int, title: str, said: str, *parts: str) -> str:
    """Put parts together to a picture in both schemes."""
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" version="1.1" class="rpc" width="100%" role="img"',
            f'viewBox="0 0 {WIDTH} {height}" style="aspect-ratio: {WIDTH} / {height}"',
            'aria-labelledby="title desc">',
            f'<title id="title">{title}</title>\n<desc id="desc">{said}</desc>',
            f"<style>\n{STYLE}{colours(LIGHT)}",
            f"@media (prefers-color-scheme: dark) {{\n{colours(DARK)}}}\n</style>",
            '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
            ' markerUnits="userSpaceOnUse"><path d="M0 0 L8 4 L0 8 z"/></marker>',
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *parts,
            "</svg>\n",
        ]
    )


CALL = picture(
    178,
    "One call",
    "worker0 calls rpc.call. The name of the function and its arguments go to worker1. A thread there runs the "
    "function. The result, or the exception, goes back, and rpc.call returns it.",
    box("process", 5, 5, 136, 168),
    box("process", 231, 5, 124, 168),
    text(12, 10, "worker0", kind="name"),
    text(238, 10, "worker1", kind="name"),
    box("inner", 12, 32, 122, 40),
    text(18, 38, "rpc.call(1, f, x)", kind="code"),
    text(18, 52, "waits"),
    box("inner", 238, 58, 110, 54),
    text(244, 64, "a thread runs"),
    text(244, 78, "f(x)", kind="code"),
    text(244, 92, "others run beside"),
    box("inner", 12, 118, 122, 40),
    text(18, 124, "rpc.call", kind="code"),
    text(18, 138, "returns, or raises"),
    arrow((134, 62), (186, 62), (186, 82), (238, 82)),
    text(186, 30, "name of f,", "value of x", anchor="middle"),
    arrow((238, 102), (186, 102), (186, 138), (134, 138)),
    text(186, 142, "result or", "exception", anchor="middle"),
)

OBJECT = picture(
    262,
    "Who holds a remote object",
    "The object lives on worker1, which owns it. worker0 has made it by rpc.make and holds a reference. worker0 has "
    "sent the reference to worker2, which holds it as well. Method calls of both run on worker1. When no worker holds "
    "it, worker1 frees it.",
    box("process", 5, 5, 140, 66),
    box("process", 215, 5, 140, 66),
    text(12, 10, "worker0", kind="name"),
    text(222, 10, "worker2", kind="name"),
    box("inner", 12, 32, 126, 32),
    text(18, 40, "counter: a reference"),
    box("inner", 222, 32, 126, 32),
    text(228, 40, "counter: a reference"),
    arrow((138, 48), (222, 48)),
    text(180, 14, "sent in", "a call", anchor="middle"),
    arrow((60, 71), (60, 150)),
    text(66, 84, "rpc.make", "counter.add(2)", kind="code"),
    text(66, 114, "I hold it"),
    arrow((300, 71), (300, 150)),
    text(294, 84, "I hold it", anchor="end"),
    text(294, 98, "counter.add(3)", kind="code", anchor="end"),
    box("process", 5, 150, 350, 107),
    text(12, 155, "worker1, the owner", kind="name"),
    box("inner", 12, 176, 336, 74),
    text(18, 182, "the Counter itself; one method at a time"),
    text(18, 200, "held by worker0 and worker2"),
    text(18, 218, "A worker that drops it or ends holds it no more.", "When none holds it, the object is freed."),
)

for name, drawn in (("rpc_call", CALL), ("rpc_object", OBJECT)):
    Path(__file__).with_name(f"{name}.svg").write_text(drawn)
