"""The table of pairs: from each host to each other one, the rate and the round trip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.doctor.probe import Reach
from phalanx.topology.table import format_table
from phalanx.words import format_time

__all__ = ["pairs_as_json", "pairs_as_text"]


def pairs_as_text(hosts: Sequence[str], reached: Mapping[tuple[str, str], Reach], *, color: bool = False) -> str:
    """A row for each host, and in it how the others are reached from there: ``117 MB/s 210 µs``; empty for one host."""
    there = [host for host in hosts if any(host in pair for pair in reached)]
    if len(there) < 2:
        return ""
    lines = [{"from": host, **{f"to {other}": _cell(reached.get((host, other))) for other in there}} for host in there]
    columns = ("from", *(f"to {host}" for host in there))
    return format_table(lines, title="rate and round trip", text_columns=columns, color=color)


def _cell(reach: Reach | None) -> str:
    if reach is None:
        return "-"
    if reach.error or reach.small_only:
        return "fails"
    rate = f"{reach.bytes_per_s / 1e6:,.0f} MB/s " if reach.bytes_per_s else ""
    return f"{rate}{format_time(reach.round_trip_us)} µs"


def pairs_as_json(reached: Mapping[tuple[str, str], Reach]) -> list[dict[str, Any]]:
    """One object for each ordered pair that was tried."""
    return [
        {
            "from": host,
            "to": other,
            "error": reach.error,
            "small_packets_only": reach.small_only,
            "address": reach.address,
            "source": reach.source,
            "interface": reach.interface,
            "mtu": reach.mtu,
            "round_trip_us": reach.round_trip_us,
            "bytes_per_s": reach.bytes_per_s,
        }
        for (host, other), reach in reached.items()
    ]
