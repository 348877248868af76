"""Format the object of ``--json`` as Markdown tables with footnotes, or draw it."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx import settings
from phalanx.bench.cases import MEMCPY, MPI
from phalanx.bench.machine import Noise, quartiles
from phalanx.system.files import check_creatable
from phalanx.words import format_count, format_size, format_time

_WIRE = (
    " wire: what the busiest link between hosts must carry in one direction, at its rate. MB: what it must carry "
    "(stated), and what it did carry with each backend, with the headers of packets."
)
LEAST_WIRE_US = 100  # below it, other things than the wire decide the time
MOST_NAMED = 4  # operations in a footnote; more are counted

Row = dict[str, Any]


def format_report(results: dict[str, Any]) -> str:
    """Format the machine, a table with footnotes for each set of ranks, and how noisy the machine was."""
    parts = [_heading(results)]
    parts += [f"{_job_title(job)}\n\n{_table(job)}{_footnotes(job)}" for job in results["jobs"]]
    parts.append("\n".join(filter(None, (format_noise(results), _clock_and_steal(results)))))
    if not results["complete"]:
        parts.append("The measurement ended early; these are the rows that were measured before.")
    return "\n\n".join(parts) + "\n"


def _heading(results: dict[str, Any]) -> str:
    machine, parameters = results["machine"], results["parameters"]
    kind = "async_op=True and wait()" if parameters["asynchronous"] else "synchronous"
    return (
        f"phalanx bench, {results['date']}\n"
        f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores usable, "
        f"{', '.join(machine['caches'])}; {machine['system']} {machine['kernel']}\n"
        f"{', '.join(f'{name} {number}' for name, number in results['versions'].items())}\n"
        f"µs per {kind} call: median (quartiles) of {parameters['rounds']} interleaved rounds of "
        f"{parameters['round_s'] * 1e3:g} ms, each the mean of the slowest rank. "
        f"memcpy: every rank copies the size once. CPU: µs of CPU time that a call costs the rank that uses most."
        + (_WIRE if any(map(_spans, results["jobs"])) else "")
    )


def _clock_and_steal(results: dict[str, Any]) -> str:
    """Say the clock of the cores before and after, and what the hypervisor took during the whole run."""
    clocks = [results["machine"].get("clock_mhz"), results.get("clock_mhz_after")]
    named = [f"{min(clock):.0f}–{max(clock):.0f} MHz" for clock in clocks if clock]
    clock = f"CPU clock {' before and '.join(named)}{' after' if len(named) > 1 else ''}; " if named else ""
    stolen = results.get("stolen")
    return "" if stolen is None else f"{clock}the hypervisor took {stolen:.1%} of the CPU time during the whole run."


def _spans(job: dict[str, Any]) -> bool:
    return len(job.get("hosts", ())) > 1


def _job_title(job: dict[str, Any]) -> str:
    title = f"### {format_count(job['size'], 'rank')}"
    if _spans(job):
        hosts = ", ".join(f"{name}: {count}" for name, count in job["hosts"])
        title += f" on {len(job['hosts'])} hosts ({hosts}), links of {job['link_bytes_per_s'] / 1e6:,.1f} MB/s"
    return f"{title}, started by mpiexec of {_title(job, MPI)}" if job["mpi"] else title


def noise_of(row: Row) -> Noise:
    """Return how noisy the machine was while a row was measured."""
    return Noise(**row["noise"])


def _title(job: dict[str, Any], backend: str, *, version: bool = True) -> str:
    """Name a backend: for MPI the library, with its version or without."""
    if backend != MPI or not job["mpi"]:
        return backend
    return f"{job['mpi']['name']} {job['mpi']['version'] if version else ''}".rstrip()


def _table(job: dict[str, Any]) -> str:
    names = dict.fromkeys(name for row in job["rows"] for name in (*row["samples_us"], *row["left_out"]))
    peers = [name for name in names if name not in (settings.BACKEND, MEMCPY)]
    lines = [_cells(job, row, peers) for row in job["rows"]]
    optional = (" CPU", " MB")
    kept = [title for title in lines[0] if not title.endswith(optional) or any(line[title] for line in lines)]
    return _aligned([kept, *([line[title] for title in kept] for line in lines)], left=3)


def _cells(job: dict[str, Any], row: Row, peers: Sequence[str]) -> dict[str, str]:
    """Return the cells of a row by the titles of their columns; empty ones where there is nothing to say."""
    own, medians = settings.BACKEND, _medians(row)
    cells = {
        "": "~" if noise_of(row).excessive else "",
        "operation": row["operation"],
        "dtype": row["dtype"],
        "size": _size(row),
        MEMCPY: format_time(medians[MEMCPY]) if MEMCPY in medians else "",
    }
    if _spans(job):
        wire_us = row["wire_us"] or 0
        cells["wire"] = format_time(wire_us) if wire_us else ""
        is_bound = own in medians and wire_us >= LEAST_WIRE_US
        cells[f"{own}/wire"] = f"{medians[own] / wire_us:.2f}×" if is_bound else ""
    cells[own] = _times(own, row)
    for name in peers:
        cells[_title(job, name)] = _times(name, row)
        ratio = f"{format_time(medians[name] / medians[own])}×" if {name, own} <= medians.keys() else ""
        cells[f"{_title(job, name, version=False)}/{own}"] = ratio
    for name in (own, *peers):
        used_us = row.get("cpu_us", {}).get(name)
        cells[f"{_title(job, name, version=False)} CPU"] = "" if used_us is None else format_time(used_us)
    if _spans(job):
        cells["MB stated"] = _megabytes(row["stated_bytes"])
        for name in (own, *peers):
            cells[f"{_title(job, name)} MB"] = _megabytes(row["counted_bytes"].get(name))
    return cells


def _medians(row: Row) -> dict[str, float]:
    return {name: statistics.median(samples) for name, samples in row["samples_us"].items()}


def _size(row: Row) -> str:
    """Return the size that was asked for, or the one that was used if blocks of one element each are more."""
    return format_size(max(row["nbytes"], row["used_nbytes"])) if row["used_nbytes"] else ""


def _times(backend: str, row: Row) -> str:
    """Return median and quartiles; without samples ``wrong``, or ``–`` for a backend that was left out."""
    if backend not in row["samples_us"]:
        return "wrong" if backend in row["wrong"] else "–" if backend in row["left_out"] else ""
    low, median, high = map(format_time, quartiles(row["samples_us"][backend]))
    return f"{median} ({low}–{high})"


def _megabytes(links: Sequence[Sequence[int]] | None) -> str:
    """Return what the busiest link carries in its busier direction."""
    return "" if not links else f"{max(map(max, links)) / 1e6:,.3f}"


def _aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Format a Markdown table whose first ``left`` columns are aligned to the left, and the others to the right."""
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    padded = (
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in (lines[0], rule, *lines[1:])
    )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def _footnotes(job: dict[str, Any]) -> str:
    """Give the reasons for empty cells, each once, and what else a reader of this table must know."""
    where: dict[tuple[str, str], dict[str, None]] = {}
    for row in job["rows"]:
        for reason in row["left_out"].items():
            where.setdefault(reason, {})[f"{row['operation']} {row['dtype']}".strip()] = None
    notes = []
    for (backend, why), names in where.items():
        listed = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} operations"
        notes.append(f"{_title(job, backend)}, {listed}: {why}")
    if not job["shared_memory"]:
        notes.append(f"{settings.BACKEND} went over {job.get('engine') or job['transport']}")
    sharing = job.get("ranks_of_machine", job["size"])
    if job["cores"] < sharing:
        cores = format_count(job["cores"], "core")
        notes.append(f"{sharing} ranks share {cores}: waiting ranks take turns with working ones")
    return "".join(f"\n{'' if number else chr(10)}- {note}" for number, note in enumerate(notes))


def format_noise(results: dict[str, Any]) -> str:
    """Say whether the machine was quiet enough; if not, how many rows are not to be believed, and why."""
    noises = [noise_of(row) for job in results["jobs"] for row in job["rows"]]
    noisy = [noise for noise in noises if noise.excessive]
    if noisy:
        return (
            f"THE MACHINE WAS TOO NOISY TO BELIEVE {len(noisy)} OF {len(noises)} ROWS, which are marked ~ "
            f"(at worst, {'; '.join(Noise.worst(noisy).reasons())}). Repeat them when nothing else runs here."
        )
    most = Noise.worst(noises)
    return (
        f"The machine was quiet: the probe's spread was at most {most.probe_spread:.0%}, and of the CPU time other "
        f"programs took at most {most.others:.0%} and the hypervisor at most {most.stolen:.0%}."
    )


def format_row(row: Row, job: dict[str, Any]) -> str:
    """Format a row in one line: the progress that is printed if standard error is not a terminal."""
    medians = [f"{_title(job, name)} {format_time(us)}" for name, us in _medians(row).items() if name != MEMCPY]
    what = " ".join(filter(None, (row["operation"], row["dtype"], _size(row))))
    return f"{format_count(job['size'], 'rank')}, {what}: {', '.join(medians)} µs"


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn, before anything is measured; raise ValueError if not."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    try:
        if not path.exists():
            check_creatable(path)
    except OSError as error:
        raise ValueError(f"--plot {path}: cannot be written: {error.strerror}") from error


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw medians and quartiles by size, a panel for each operation and dtype, into a PNG, PDF or SVG file."""
    panels: dict[str, dict[str, list[tuple[int, float, float, float]]]] = {}
    for job in results["jobs"]:
        for row in (row for row in job["rows"] if row["used_nbytes"]):
            curves = panels.setdefault(f"{row['operation']}, {row['dtype']}", {})
            for backend, samples in row["samples_us"].items():
                by = f", by {_title(job, MPI)}" if job["mpi"] and backend != MPI else ""
                label = f"{_title(job, backend)}, {format_count(job['size'], 'rank')}{by}"
                curves.setdefault(label, []).append((row["nbytes"], *quartiles(samples)))
    if not panels:
        raise ValueError("nothing to plot: a barrier has no size")
    # matplotlib's object interface needs no display and keeps no state between calls.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4 * len(panels)), layout="constrained")
    for panel, (title, curves) in zip(
        figure.subplots(len(panels), squeeze=False).flatten(), panels.items(), strict=True
    ):
        for label, points in curves.items():
            sizes, low, medians, high = zip(*points, strict=True)
            (line,) = panel.plot(sizes, medians, marker="o", markersize=3, label=label)
            panel.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        ticks = sorted({point[0] for points in curves.values() for point in points})
        panel.set(xscale="log", yscale="log", title=title, xlabel="size, bytes", ylabel="µs a call")
        panel.set_xticks(ticks, [format_size(tick) for tick in ticks])
        panel.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=7)
    figure.suptitle(f"{results['machine']['cpu']}, {results['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=130, format=path.suffix[1:] if path.suffix in (".pdf", ".svg") else "png")
