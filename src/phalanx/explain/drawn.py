"""Draw the steps of a collective: in each step a row for each rank, with what its tensor holds thereafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.diagnosis.render import shown
from phalanx.explain.ranks import BLOCKWISE, Cell, Kept
from phalanx.explain.steps import Explained, cell_text
from phalanx.explain.text import did, heading, kept_text, legend, sums, title
from phalanx.topology.placement import DARK, FONT, GAP, LETTER, LIGHT, LINE, WIDTH, box, picture, style, text_lines

# A cell is ``fresh`` if it has changed in the step.
_STYLE = style("explain", ("host", "rank", "fresh")) + ".explain .cell { text-anchor: middle; }\n"
_LABEL = 44.0  # the width of "rank 15"
_HIGH = 18.0  # of a cell

_Drawn = tuple[list[str], float]  # elements, and where they end


def explained_svg(explained: Explained) -> str:
    """Draw all steps, one below the other."""
    drawn, y = text_lines(title(explained), GAP, GAP, WIDTH - 2 * GAP, bold=True)
    for line in _legend(explained):
        more, y = text_lines(line, GAP, y, WIDTH - 2 * GAP)
        drawn += more
    for number in range(0 if any(explained.given) else 1, len(explained.steps) + 1):
        more, y = _step(explained, number, y + 2 * GAP)
        drawn += more
    y += 2 * GAP
    for line in sums(explained):
        more, y = text_lines(line, GAP, y, WIDTH - 2 * GAP)
        drawn += more
    said = " ".join(_said(explained, number) for number in range(len(explained.steps) + 1))
    return picture("explain", title(explained), shown(said, 20_000), drawn, y + GAP, _STYLE)


def explained_page(explained: Explained) -> str:
    """Make a page of HTML that needs nothing else: a slider shows one step after the other."""
    import jinja2  # it takes a tenth of a second

    pictures = []
    for number in range(len(explained.steps) + 1):
        drawn, y = _step(explained, number, GAP)
        said = shown(_said(explained, number), 4000)
        pictures.append(picture(f"explain-{number}", _heading(explained, number), said, drawn, y + GAP))
    template = jinja2.Template(Path(__file__).with_name("page.html").read_text(), keep_trailing_newline=True)
    page: str = template.render(
        title=shown(title(explained)),
        legend=shown(" ".join(_legend(explained)), 1000),
        pictures=pictures,
        sums=[shown(line, 1000) for line in sums(explained)],
        style=_STYLE,
        light=LIGHT,
        dark=DARK,
    )
    return page


def _legend(explained: Explained) -> list[str]:
    """Explain the letters, the rows and the colours."""
    lines = legend(explained)
    if explained.plan.operation in BLOCKWISE:
        lines.append("The start has what each rank gives, and each step what it has received.")
    return lines if explained.plan.operation == "barrier" else [*lines, "Blue: new in this step."]


def _heading(explained: Explained, number: int) -> str:
    return f"Step {number}: {heading(explained.steps[number - 1])}" if number else "Start"


def _said(explained: Explained, number: int) -> str:
    kept = _kept(explained, number)
    holds = "; ".join(f"rank {rank} has {kept_text(each)}" for rank, each in enumerate(kept) if kept_text(each))
    return f"{_heading(explained, number)}. {holds}."


def _kept(explained: Explained, number: int) -> Sequence[Kept]:
    return explained.steps[number - 1].kept if number else explained.given


def _step(explained: Explained, number: int, top: float) -> _Drawn:
    """Draw a step: its heading, and a box for each host with a row for each of its ranks."""
    drawn, y = text_lines(_heading(explained, number), GAP, top, WIDTH - 2 * GAP, bold=True)
    plan = explained.plan
    lines: dict[int, list[str]] = {}
    for rank, words in did(explained.steps[number - 1]) if number else ():
        lines.setdefault(rank, []).append(words)
    for host in range(len(plan.hosts)):
        begin, inside = y + GAP, list[str]()
        y = begin + GAP
        if len(plan.hosts) > 1:
            inside, y = text_lines(f"host {host}", 2 * GAP, y, WIDTH - 4 * GAP, bold=True)
        for rank in (rank for rank, its in enumerate(plan.host_of) if its == host):
            more, y = _rank(explained, number, rank, y, lines.get(rank, []))
            inside += more
        drawn += [box("host", GAP, begin, WIDTH - 2 * GAP, y - begin), *inside]
    return drawn, y


def _rank(explained: Explained, number: int, rank: int, top: float, lines: Sequence[str]) -> _Drawn:
    """Draw what a rank has after a step, and write below what it did."""
    kept = _kept(explained, number)[rank]
    before = _kept(explained, number - 1)[rank] if number else kept
    if number == 1 and explained.plan.operation in BLOCKWISE:
        before = ()
    drawn = [f'<text x="{2 * GAP}" y="{top + _HIGH / 2 + 4:g}">rank {rank}</text>']
    width = (WIDTH - 4 * GAP - _LABEL) / explained.plan.ranks
    paths: dict[str, list[str]] = {"rank": [], "fresh": []}
    words = [_words(cells, width) for cells in kept]
    high = _HIGH + LINE * (max(1, *map(len, words), 1) - 1)
    for place, cells in enumerate(kept):
        # A tensor of one block is the rank's own.
        left = 2 * GAP + _LABEL + (place if len(kept) > 1 else rank) * width
        fresh = number > 0 and cells != (before[place] if place < len(before) else ())
        paths["fresh" if fresh else "rank"].append(f"M{left:g} {top:g}h{width:g}v{high:g}h-{width:g}z")
        for line, word in enumerate(words[place]):
            at = f'x="{left + width / 2:g}" y="{top + _HIGH / 2 + 4 + line * LINE:g}"'
            drawn.append(f'<text class="cell" {at}>{word}</text>')
    shapes = [f'<path class="{kind}" d="{"".join(each)}"/>' for kind, each in paths.items() if each]
    y = top + high + GAP / 2
    for its in lines:
        more, y = text_lines(its, 2 * GAP + _LABEL, y, WIDTH - 4 * GAP - _LABEL)
        drawn += more
    return [*shapes, *drawn], y + GAP


def _words(cells: Sequence[Cell], width: float) -> list[str]:
    """Name the block and its ranks in one line or in two; nothing if there is no room."""
    if not cells:
        return []
    text = "+".join(map(cell_text, cells))
    if len(text) * LETTER <= width:
        return [text]
    block, _, ranks = cell_text(cells[0]).rstrip("]").partition("[")
    if len(cells) > 1 or len(ranks) * LETTER > width:
        return ["…"] if width > FONT else []
    return [block, ranks]
