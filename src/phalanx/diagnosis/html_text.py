"""Text of a job for a page of HTML: whatever a script can choose is foreign, and becomes text and nothing else."""

from __future__ import annotations

import html

__all__ = ["ago", "duration", "shown"]

_LONGEST = 200


def shown(value: object, longest: int = _LONGEST, *, keep_end: bool = False) -> str:
    """A value as text of a page, safe also within the quotes of an attribute.

    Characters that are not visible are replaced: some would change the order in which the rest is shown, and others
    cannot be encoded.

    Args:
        value: whatever it is.
        longest: how many characters of it are kept.
        keep_end: of a longer text its end is kept rather than its beginning, as of a path.
    """
    text = str(value)
    if len(text) > longest:
        text = f"…{text[-longest:]}" if keep_end else f"{text[:longest]}…"
    return html.escape("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))


def duration(nanoseconds: float) -> str:
    """A span of time: ``12.3 µs``, ``4.56 ms``, ``31.2 s``, ``1.5 h``; below zero it is 0."""
    seconds = max(0.0, nanoseconds / 1e9)
    if seconds >= _HOUR_S:
        return f"{seconds / _HOUR_S:.1f} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def ago(nanoseconds: float) -> str:
    """How long before the report something was, so finely that operations after each other can be told apart."""
    return f"{max(0.0, nanoseconds / 1e9):,.4f} s"


_HOUR_S = 3600
