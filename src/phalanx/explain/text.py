"""Write the steps of a collective as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from phalanx.explain.ranks import Kept
from phalanx.explain.steps import Explained, Move, Step, cell_text
from phalanx.words import format_bytes, format_count, format_named

# What several ranks do, and what one does.
_HEADINGS = {
    "adds": ("read shared memory and add", "reads shared memory and adds"),
    "combines": ("add what other hosts sent", "adds what other hosts sent"),
    "takes": ("copy out of shared memory", "copies out of shared memory"),
    "puts": ("write into shared memory", "writes into shared memory"),
    "sends": ("send to another host", "sends to another host"),
    "raises": ("raise a counter", "raises a counter"),
    "sees": ("see the counters of the others", "sees the counters of the others"),
}


def as_text(explained: Explained) -> str:
    """Write all of it."""
    starts = [f"  rank {rank} has  {kept_text(kept)}" for rank, kept in enumerate(explained.given) if kept]
    lines = [title(explained), "", *legend(explained), *(["", "start", *starts] if starts else [])]
    before: Sequence[Kept] = explained.given
    for number, step in enumerate(explained.steps, 1):
        lines += ["", f"step {number}: {heading(step)}", *(f"  rank {rank} {words}" for rank, words in did(step))]
        lines += [
            f"  rank {rank} now has  {kept_text(kept)}"
            for rank, kept in enumerate(step.kept)
            if kept and kept != before[rank] and kept_text(kept)
        ]
        before = step.kept
    lines += ["", *_links(explained)]
    return "\n".join(lines) + "\n"


def title(explained: Explained) -> str:
    """Name what is shown: ``all_reduce of 256 KiB on 4 ranks of one host: 3 steps``."""
    plan = explained.plan
    where = "one host" if len(plan.hosts) == 1 else f"{len(plan.hosts)} hosts"
    much = f" of {_size(plan.nbytes)}" if plan.operation != "barrier" else ""
    steps = format_count(len(explained.steps), "step")
    return f"{plan.operation}{much} on {format_count(plan.ranks, 'rank')} of {where}: {steps}"


def legend(explained: Explained) -> list[str]:
    """Explain the letters, and where the ranks are."""
    plan = explained.plan
    lines = []
    if plan.operation != "barrier":
        last = chr(ord("A") + plan.ranks - 1)
        size = _size((plan.edges[1] - plan.edges[0]) * 8)
        lines.append(f"A to {last} are the blocks of the data, {size} each. B[0] is block B of rank 0.")
    if plan.operation in ("all_reduce", "reduce", "reduce_scatter"):
        lines.append(f"B[0-{plan.ranks - 1}] is the sum of block B of all ranks.")
    if len(plan.hosts) > 1:
        hosts = [[rank for rank, host in enumerate(plan.host_of) if host == each] for each in range(len(plan.hosts))]
        lines.append("; ".join(f"host {each}: {format_named('rank', its)}" for each, its in enumerate(hosts)) + ".")
    return lines


def heading(step: Step) -> str:
    """Say what is done in a step, by whom: ``all ranks read shared memory and add``."""
    parts = []
    for kind, (several, one) in _HEADINGS.items():
        ranks = sorted({move.rank for move in step.moves if move.kind == kind})
        if ranks:
            who = "all ranks" if len(ranks) == len(step.kept) else format_named("rank", ranks)
            parts.append(f"{who} {several if len(ranks) > 1 else one}")
    return "; ".join(parts)


def did(step: Step) -> Iterator[tuple[int, str]]:
    """Say each thing that a rank does in a step, with the rank."""
    for (rank, kind), moves in groupby(step.moves, lambda move: (move.rank, move.kind)):
        yield rank, _moved_text(kind, list(moves))


def _moved_text(kind: str, moves: Sequence[Move]) -> str:
    """Say what a rank does, in moves of one kind: ``copies B[0-3] of rank 1, 64 KiB``."""
    others = sorted({move.other for move in moves if move.other >= 0})
    cells = sorted({cell for move in moves for cell in move.cells})
    what = " ".join(map(cell_text, cells)) or "the number of its call"
    sizes = {move.nbytes for move in moves}
    each = len(moves) > 1 and len(sizes) == 1
    size = f"{_size(sizes.pop())} each" if each else _size(sum(move.nbytes for move in moves))
    who = format_named("rank", others) if others else ""
    match kind:
        case "puts":
            return f"writes {what}, {size}"
        case "takes":
            return f"copies {what} of {who}, {size}"
        case "adds":
            return f"adds {what} of {who}, {size}"
        case "combines":
            return f"has the sums {what}, {size}"
        case "sends":
            return f"sends {what} to {who}, {size}"
        case "raises":
            return "raises its counter"
        case _:
            return f"sees the counters of {who}" if len(others) > 1 else f"sees the counter of {who}"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes).replace(".0 ", " ")


def kept_text(kept: Kept) -> str:
    """Name what lies in the blocks of a tensor: ``A[0] B[0-3]``."""
    return " ".join("+".join(cell_text(cell) for cell in block) for block in kept if block)


def _links(explained: Explained) -> Iterator[str]:
    links = explained.links()
    if not links:
        yield "No data goes from one rank to another."
        return
    yield "bytes from one rank (row) to another (column)"
    ranks = range(explained.plan.ranks)
    yield f"{'':>8}" + "".join(f"{f'rank {rank}':>12}" for rank in ranks)
    for one in ranks:
        texts = [f"{links[one, other]:,}" if (one, other) in links else "-" for other in ranks]
        yield f"{f'rank {one}':>8}" + "".join(f"{text:>12}" for text in texts)
    yield from sums(explained)


def sums(explained: Explained) -> list[str]:
    """Sum up what goes through shared memory, and over the network."""
    plan, links, lines = explained.plan, explained.links(), list[str]()
    for host in range(len(plan.hosts) if plan.operation != "barrier" else 0):
        its = [nbytes for (one, other), nbytes in links.items() if plan.host_of[one] == plan.host_of[other] == host]
        where = f" of host {host}" if len(plan.hosts) > 1 else ""
        lines.append(f"through the shared memory{where}: {sum(its):,} bytes")
    for host in range(len(plan.hosts) if len(plan.hosts) > 1 else 0):
        its = [nbytes for (one, other), nbytes in links.items() if plan.host_of[one] == host != plan.host_of[other]]
        lines.append(f"over the network from host {host}: {sum(its):,} bytes")
    if explained.agreement_nbytes:
        beside = f"{explained.agreement_nbytes:,} bytes"
        lines.append(f"beside the data, by which the ranks compare their calls: {beside}")
    return lines
