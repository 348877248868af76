"""Draw what the pictures share: boxes and lines of text as SVG, in light and dark, for phones and wide screens.

One unit is a pixel if the picture is as wide as a phone, so no text is smaller than 11 of them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from phalanx.diagnosis.render import shown

__all__ = ["DARK", "FONT", "GAP", "LETTER", "LIGHT", "LINE", "WIDTH", "box", "picture", "style", "text_lines"]

#: The colours of each scheme. Text has a contrast of at least 4.5 with every surface, and lines one of at least 3.
LIGHT = {
    "page": "#ffffff",
    "host": "#eceff2",
    "rank": "#ffffff",
    "line": "#6b7682",
    "text": "#1b1f24",
    "fresh": "#cfe3ff",
}
DARK = {
    "page": "#14171b",
    "host": "#22272e",
    "rank": "#14171b",
    "line": "#87929e",
    "text": "#e4e8ec",
    "fresh": "#1b4069",
}
WIDTH, GAP, LINE, FONT = 360, 5, 14, 11
#: The width of a letter of the widest common font, DejaVu Sans.
LETTER = 6.4
_BOLD_LETTER = 7.2


def text_lines(words: str, left: float, top: float, width: float, *, bold: bool = False) -> tuple[list[str], float]:
    """Write text in as many lines as it needs, and return its elements and where they end."""
    letters = int(width / (_BOLD_LETTER if bold else LETTER))
    lines = textwrap.wrap(words, letters, break_on_hyphens=False) or [""]
    kind = ' class="name"' if bold else ""
    texts = [
        f'<text{kind} x="{left:g}" y="{top + index * LINE + FONT:g}">{shown(line)}</text>'
        for index, line in enumerate(lines)
    ]
    return texts, top + len(lines) * LINE


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    """A box of a kind, which has its colour of the scheme."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'


def style(name: str, kinds: Sequence[str]) -> str:
    """The style of a picture of this class, with boxes of these kinds, which have their colours in the schemes."""
    light, dark = (_colours(name, kinds, scheme) for scheme in (LIGHT, DARK))
    # On a wide screen the picture stops growing where its text is that of a headline. A window that shows the file
    # alone would shrink it to its own height, so the height is set, with the aspect ratio.
    return (
        f".{name} {{ width: 100%; max-width: 720px; height: auto; font: {FONT}px Arial, Helvetica, sans-serif; }}\n"
        f".{name} .name {{ font-weight: bold; }}\n"
        f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
    )


def picture(name: str, title: str, said: str, drawn: Sequence[str], height: float, css: str = "") -> str:
    """The picture as one element, which has its title and description for those who do not see it.

    Args:
        name: its class, and the beginning of its ids.
        title: what it shows.
        said: the same in words; text of a page.
        drawn: its elements.
        height: how high it is; its width is :data:`WIDTH`.
        css: its style; empty if the page around it has that.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" version="1.1" class="{name.split("-")[0]}" width="100%" role="img"',
        f'viewBox="0 0 {WIDTH} {height:g}" style="aspect-ratio: {WIDTH} / {height:g}"',
        f'aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{shown(title)}</title>',
        f'<desc id="{name}-desc">{said}</desc>',
        *([f"<style>\n{css}</style>"] if css else []),
        f'<rect class="page" width="{WIDTH}" height="{height:g}"/>',
    )
    return "\n".join([*head, *drawn, "</svg>\n"])


def _colours(name: str, kinds: Sequence[str], scheme: Mapping[str, str]) -> str:
    """Give the boxes and the text the colours of a scheme; the page's is also that of the window around the picture."""
    boxes = "".join(f".{name} .{kind} {{ fill: {scheme[kind]}; stroke: {scheme['line']}; }}\n" for kind in kinds)
    page = f".{name} {{ background: {scheme['page']}; fill: {scheme['text']}; }}\n"
    return f"{page}.{name} .page {{ fill: {scheme['page']}; }}\n{boxes}"
