"""From samples to text: tables, footnotes, and whether to believe them.

Everything here works on the JSON object that ``--json`` prints, so an old file can be shown again. The tables are
Markdown with aligned columns, so they can be read in a terminal and copied into a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx import settings
from phalanx.bench.cases import MEMCPY, MPI
from phalanx.bench.noise import Noise, load_reason, reasons, worst
from phalanx.bench.samples import Summary, ratio
from phalanx.words import format_count, format_size, format_time

__all__ = ["backend_title", "format_noise", "format_report", "format_row", "noise_of"]

_WIRE = (
    " wire: what the busiest link between hosts must carry in one direction, at its rate. MB: what it must carry "
    "(stated), and what it did carry with each backend, with the headers of packets."
)
LEAST_WIRE_US = 100  # of a call that takes less on the wire, other things decide the time
MOST_NAMED = 4  # operations in a footnote; more are counted


def format_report(results: dict[str, Any]) -> str:
    """The whole report: the machine, a table with footnotes for each set of ranks, and how noisy the machine was.

    Args:
        results: what ``--json`` prints.
    """
    parts = [_heading(results)]
    parts += [f"{_job_title(job)}\n\n{_table(job)}{_footnotes(job)}" for job in results["jobs"]]
    parts.append("\n".join(filter(None, (format_noise(results), _clock_and_steal(results)))))
    if not results["complete"]:
        parts.append("The measurement ended early; these are the rows that were measured before.")
    return "\n\n".join(parts) + "\n"


def _heading(results: dict[str, Any]) -> str:
    machine, parameters = results["machine"], results["parameters"]
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    kind = "async_op=True and wait()" if parameters["asynchronous"] else "synchronous"
    return (
        f"phalanx bench, {results['date']}\n"
        f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores usable, "
        f"{', '.join(machine['caches'])}; {machine['system']} {machine['kernel']}\n"
        f"{packages}\n"
        f"µs per {kind} call: median (quartiles) of {parameters['rounds']} interleaved rounds of "
        f"{parameters['round_s'] * 1e3:g} ms, each the mean of the slowest rank. "
        f"memcpy: every rank copies the size once. CPU: µs of CPU time that a call costs the rank that uses most."
        + (_WIRE if any(job.get("hosts", [])[1:] for job in results["jobs"]) else "")
    )


def _clock_and_steal(results: dict[str, Any]) -> str:
    """The clock of the cores before and after the measurement, and what the hypervisor took during it."""
    clocks = [results["machine"].get("clock_mhz", []), results.get("clock_mhz_after", [])]
    named = [f"{min(clock):.0f}–{max(clock):.0f} MHz" for clock in clocks if clock]
    clock = f"CPU clock {' before and '.join(named)}{' after' if len(named) > 1 else ''}" if named else ""
    stolen = results.get("stolen")
    steal = "" if stolen is None else f"the hypervisor took {stolen:.1%} of the CPU time during the whole run"
    text = "; ".join(filter(None, (clock, steal)))
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _job_title(job: dict[str, Any]) -> str:
    title = f"### {format_count(job['size'], 'rank')}"
    if job.get("hosts", [])[1:]:
        hosts = ", ".join(f"{name}: {count}" for name, count in job["hosts"])
        title += f" on {len(job['hosts'])} hosts ({hosts}), links of {job['link_bytes_per_s'] / 1e6:,.1f} MB/s"
    return f"{title}, started by mpiexec of {backend_title(job, MPI)}" if job["mpi"] else title


def noise_of(row: dict[str, Any]) -> Noise:
    """How noisy the machine was while a row was measured."""
    return Noise(**row["noise"])


def _peers(job: dict[str, Any]) -> list[str]:
    """The backends beside Phalanx, in the order they were asked for."""
    found = dict.fromkeys(name for row in job["rows"] for name in (*row["samples_us"], *row["left_out"]))
    return [name for name in found if name not in (settings.BACKEND, MEMCPY)]


def backend_title(job: dict[str, Any], backend: str, *, version: bool = True) -> str:
    """The name of a backend as it is shown: for MPI that of the library, with its version or without."""
    if backend != MPI or not job["mpi"]:
        return backend
    return f"{job['mpi']['name']} {job['mpi']['version']}" if version else str(job["mpi"]["name"])


def _table(job: dict[str, Any]) -> str:
    peers = _peers(job)
    own = settings.BACKEND
    spans = bool(job.get("hosts", [])[1:])
    header = ["", "operation", "dtype", "size", MEMCPY, *(["wire", f"{own}/wire"] if spans else []), own]
    for peer in peers:
        header += [backend_title(job, peer), f"{backend_title(job, peer, version=False)}/{own}"]
    # Results of an earlier version have no CPU times.
    busy = [name for name in (own, *peers) if any(name in row.get("cpu_us", {}) for row in job["rows"])]
    header += [f"{backend_title(job, name, version=False)} CPU" for name in busy]
    crossed = (
        [own, *(peer for peer in peers if any(peer in row["counted_bytes"] for row in job["rows"]))] if spans else []
    )
    header += ["MB stated", *(f"{backend_title(job, name)} MB" for name in crossed)] if spans else []
    lines = []
    for row in job["rows"]:
        summaries = {name: Summary.of(samples) for name, samples in row["samples_us"].items()}
        floor = summaries.get(MEMCPY)
        cells = [
            "~" if noise_of(row).excessive else "",
            row["operation"],
            row["dtype"],
            _size(row),
            format_time(floor.median) if floor else "",
            *(_wire(row, summaries.get(own)) if spans else ()),
            _cell(summaries.get(own), row, own),
        ]
        for peer in peers:
            both = own in summaries and peer in summaries
            cells += [
                _cell(summaries.get(peer), row, peer),
                f"{format_time(ratio(summaries[peer], summaries[own]))}×" if both else "",
            ]
        used = row.get("cpu_us", {})
        cells += [format_time(used[name]) if name in used else "" for name in busy]
        if spans:
            cells.append(_megabytes(row["stated_bytes"]))
            cells += [_megabytes(row["counted_bytes"].get(name)) for name in crossed]
        lines.append(cells)
    return _aligned(header, lines, left=3)


def _wire(row: dict[str, Any], own: Summary | None) -> tuple[str, str]:
    """The least time that the busiest link takes, and how many times as long Phalanx takes."""
    wire_us = row["wire_us"]
    if not wire_us:
        return "", ""
    if own is None or wire_us < LEAST_WIRE_US:
        return format_time(wire_us), ""
    return format_time(wire_us), f"{own.median / wire_us:.2f}×"


def _megabytes(links: Sequence[Sequence[int]] | None) -> str:
    """What the busiest link carries in its busier direction."""
    return "" if not links else f"{max(map(max, links)) / 1e6:,.3f}"


def _size(row: dict[str, Any]) -> str:
    """The size that was asked for, or the size that was used if blocks of one element each are more than that."""
    return format_size(max(row["nbytes"], row["used_nbytes"])) if row["used_nbytes"] else ""


def _cell(summary: Summary | None, row: dict[str, Any], backend: str) -> str:
    """Median and quartiles; without samples ``wrong``, or ``–`` for a backend that was left out."""
    if summary is None:
        return "wrong" if backend in row["wrong"] else "–" if backend in row["left_out"] else ""
    return f"{format_time(summary.median)} ({format_time(summary.q1)}–{format_time(summary.q3)})"


def _aligned(header: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table with aligned columns: the first ``left`` of them to the left, the others to the right."""
    widths = [max(3, *(len(line[i]) for line in [header, *lines])) for i in range(len(header))]

    def joined(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(joined(cells) for cells in [header, rule, *lines])


def _footnotes(job: dict[str, Any]) -> str:
    """The reasons for empty cells, each once, and anything else that a reader of this table must know."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in job["rows"]:
        for backend, why in row["left_out"].items():
            where.setdefault((backend, why), []).append(f"{row['operation']} {row['dtype']}".strip())
    notes = []
    for (backend, why), rows in where.items():
        names = list(dict.fromkeys(rows))
        listed = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} operations"
        notes.append(f"- {backend_title(job, backend)}, {listed}: {why}")
    if not job["shared_memory"]:
        notes.append(
            f"- {settings.BACKEND} went over {job['engine']}"
            if job.get("engine")
            else f"- {settings.BACKEND} did not use shared memory here but {job['transport']}"
        )
    sharing = job.get("ranks_of_machine", job["size"])
    if job["cores"] < sharing:
        notes.append(
            f"- {sharing} ranks share {format_count(job['cores'], 'core')}: waiting ranks take turns with working ones"
        )
    return "\n\n" + "\n".join(notes) if notes else ""


def format_noise(results: dict[str, Any]) -> str:
    """Whether the machine was quiet enough; if not, how many rows are not to be believed, and why."""
    machine = results["machine"]
    rows = [row for job in results["jobs"] for row in job["rows"]]
    noisy = [noise_of(row) for row in rows if noise_of(row).excessive]
    load = load_reason(machine["load_average"][0], machine["usable_cores"])
    if not noisy:
        most = worst(noise_of(row) for row in rows)
        text = (
            f"The machine was quiet: the probe's spread was at most {most.probe_spread:.0%}, and of the CPU time other "
            f"programs took at most {most.others:.0%} and the hypervisor at most {most.stolen:.0%}."
        )
        return text if load is None else f"{text} (But {load}.)"
    why = reasons(worst(noisy)) + ([] if load is None else [load])
    return (
        f"THE MACHINE WAS TOO NOISY TO BELIEVE {len(noisy)} OF {len(rows)} ROWS, which are marked ~ "
        f"(at worst, {'; '.join(why)}). Repeat them when nothing else runs here."
    )


def format_row(row: dict[str, Any], job: dict[str, Any]) -> str:
    """One row in one line: the progress that is printed if standard error is not a terminal."""
    medians = [
        f"{backend_title(job, name)} {format_time(Summary.of(samples).median)}"
        for name, samples in row["samples_us"].items()
        if name != MEMCPY
    ]
    what = " ".join(filter(None, (row["operation"], row["dtype"], _size(row))))
    return f"{format_count(job['size'], 'rank')}, {what}: {', '.join(medians)} µs"
