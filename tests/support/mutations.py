"""Changed inputs for parsers of bytes from outside."""

from __future__ import annotations

import random

__all__ = ["changed"]

# What JSON, TOML and people's texts can be changed into.
WORDS = (
    b"null", b"true", b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"9" * 400, b"9" * 5000, b"1.5", b'""', b'"\\ud800"',
    b"[]", b"{}", b"[[]]", b"[" * 3000, b'{"a":' * 1500, b'"' + b"x" * 3000 + b'"', b"\xff\xfe", b"\0",
    b"1000000000000", b"[0, 1000000000000, 1]", b"\n", b'"\n', b"\x1b[2J", b"-9223372036854775809",
    b"18446744073709551615",
)  # fmt: skip
ENDS = (b"\0", b"\xff", b"\x7f", b"\x80")


def changed(chance: random.Random, data: bytes) -> bytes:
    """The same bytes with a few changes: bits, numbers, cuts, repetitions, and whole values."""
    out = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(out)) if out else 0
        how = chance.randrange(8)
        if how == 0 and out:
            out[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            width = chance.choice((1, 2, 4, 8))
            out[at : at + width] = chance.choice(ENDS) * width
        elif how == 2:
            del out[at : at + chance.randrange(1, 9)]
        elif how == 3:
            out[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif how == 4:
            out[at:at] = out[at : at + chance.randrange(1, 17)]
        elif how == 5:
            del out[at:]
        else:
            begin, end = _value_at(out, at)
            out[begin:end] = chance.choice(WORDS)
    return bytes(out)


def _value_at(data: bytearray, at: int) -> tuple[int, int]:
    """Where the value around this place begins and ends, if that is a text with values."""
    ends = b' ,:[]{}=\n"'
    begin = at
    while begin and data[begin - 1] not in ends and at - begin < 40:
        begin -= 1
    end = at
    while end < len(data) and data[end] not in ends and end - at < 40:
        end += 1
    quoted = begin and end < len(data) and data[begin - 1] == data[end] == ord('"')
    return (begin - 1, end + 1) if quoted else (begin, end)
