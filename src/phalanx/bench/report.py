"""From samples to what a person reads: tables, footnotes, and whether to believe them.

Everything here works on the JSON object that ``--json`` prints, so an old file can be shown again. The tables are
aligned Markdown: legible in a terminal, and ready for a page of documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.bench.cases import format_size
from phalanx.bench.noise import Noise, load_reason, reasons, worst
from phalanx.bench.samples import Summary, ratio

__all__ = ["format_report", "format_row", "format_time", "format_verdict", "noise_of"]

OWN = "phalanx"
FLOOR = "memcpy"
NAMED = 4


def format_report(results: dict[str, Any]) -> str:
    """The whole report: machine, one table for each set of ranks, footnotes, verdict.

    Args:
        results: what ``--json`` prints.
    """
    parts = [_heading(results)]
    parts += [f"{_job_title(job)}\n\n{_table(job)}{_footnotes(job)}" for job in results["jobs"]]
    parts.append(format_verdict(results))
    if not results["complete"]:
        parts.append("The measurement did not come to its end; this is what was measured before.")
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
        f"memcpy: every rank copies the size once."
    )


def _job_title(job: dict[str, Any]) -> str:
    if job["mpi"]:
        return f"### {job['size']} ranks, started by mpiexec of {job['mpi']['name']}"
    return f"### {job['size']} ranks"


def noise_of(row: dict[str, Any]) -> Noise:
    """What disturbed a row."""
    return Noise(**row["noise"])


def _peers(job: dict[str, Any]) -> list[str]:
    """The backends beside Phalanx, in the order they were asked for."""
    found = dict.fromkeys(name for row in job["rows"] for name in (*row["samples_us"], *row["left_out"]))
    return [name for name in found if name not in (OWN, FLOOR)]


def _name(job: dict[str, Any], backend: str) -> str:
    return str(job["mpi"]["name"]) if backend == "mpi" and job["mpi"] else backend


def _table(job: dict[str, Any]) -> str:
    peers = _peers(job)
    header = ["", "operation", "dtype", "size", FLOOR, OWN]
    for peer in peers:
        header += [_name(job, peer), f"{_name(job, peer).rsplit(' ', 1)[0]}/{OWN}"]
    lines = []
    for row in job["rows"]:
        summaries = {name: Summary.of(samples) for name, samples in row["samples_us"].items()}
        floor = summaries.get(FLOOR)
        cells = [
            "~" if reasons(noise_of(row)) else "",
            row["operation"],
            row["dtype"],
            _size(row),
            format_time(floor.median) if floor else "",
            _cell(summaries.get(OWN), row, OWN),
        ]
        for peer in peers:
            both = OWN in summaries and peer in summaries
            cells += [
                _cell(summaries.get(peer), row, peer),
                f"{_number(ratio(summaries[peer], summaries[OWN]))}×" if both else "",
            ]
        lines.append(cells)
    return _aligned(header, lines, left=3)


def _size(row: dict[str, Any]) -> str:
    """The size as it was asked for; as it was if even one element a block is more than that."""
    return format_size(max(row["nbytes"], row["used_nbytes"])) if row["used_nbytes"] else ""


def _cell(summary: Summary | None, row: dict[str, Any], backend: str) -> str:
    if summary is None:
        return "wrong" if backend in row["wrong"] else "–" if backend in row["left_out"] else ""
    return f"{format_time(summary.median)} ({format_time(summary.q1)}–{format_time(summary.q3)})"


def _aligned(header: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table with its columns aligned, the first ``left`` of them to the left."""
    widths = [max(3, *(len(line[i]) for line in [header, *lines])) for i in range(len(header))]

    def joined(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(joined(cells) for cells in [header, rule, *lines])


def _footnotes(job: dict[str, Any]) -> str:
    """Why a cell is empty, each reason once."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in job["rows"]:
        for backend, why in row["left_out"].items():
            where.setdefault((backend, why), []).append(f"{row['operation']} {row['dtype']}".strip())
    notes = []
    for (backend, why), rows in where.items():
        names = list(dict.fromkeys(rows))
        listed = ", ".join(names) if len(names) <= NAMED else f"{len(names)} operations"
        notes.append(f"- {_name(job, backend)}, {listed}: {why}")
    if job["transport"] != "SharedMemoryCommunicator":
        notes.append(f"- {OWN} did not go through shared memory here but through {job['transport']}")
    if job["cores"] < job["size"]:
        notes.append(f"- {job['size']} ranks share {job['cores']} cores: waiting ranks take turns with working ones")
    return "\n\n" + "\n".join(notes) if notes else ""


def format_verdict(results: dict[str, Any]) -> str:
    """In words, whether the machine was quiet enough; says which rows not to believe and why."""
    machine = results["machine"]
    rows = [row for job in results["jobs"] for row in job["rows"]]
    noisy = [noise_of(row) for row in rows if reasons(noise_of(row))]
    load = load_reason(machine["load_average"][0], machine["usable_cores"])
    if not noisy:
        calm = worst(noise_of(row) for row in rows)
        text = (
            f"The machine was quiet: the probe's spread was at most {calm.probe_spread:.0%}, others took at most "
            f"{calm.others:.0%} of the CPU time and the hypervisor {calm.stolen:.0%}."
        )
        return f"{text} (But {load}.)" if load else text
    why = reasons(worst(noisy)) + ([load] if load else [])
    return (
        f"THE MACHINE WAS TOO NOISY TO BELIEVE {len(noisy)} OF {len(rows)} ROWS, marked ~ "
        f"(at worst, {'; '.join(why)}). Repeat them when nothing else runs here."
    )


def format_row(row: dict[str, Any], job: dict[str, Any]) -> str:
    """One row in one line, for a log of the progress."""
    medians = [
        f"{_name(job, name)} {format_time(Summary.of(samples).median)}"
        for name, samples in row["samples_us"].items()
        if name != FLOOR
    ]
    what = " ".join(word for word in (row["operation"], row["dtype"], _size(row)) if word)
    return f"{job['size']} ranks, {what}: {', '.join(medians)} µs"


def format_time(microseconds: float) -> str:
    """Three digits: 0.52, 6.04, 61.2, 623, 40,100."""
    return _number(microseconds)


def _number(value: float) -> str:
    if value >= 99.95:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
