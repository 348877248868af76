"""A plot of the medians: time against size, both on logarithmic axes, one panel for each operation and dtype."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx import settings
from phalanx.bench.cases import MEMCPY, MPI
from phalanx.bench.report import backend_title, noise_of
from phalanx.bench.samples import Summary
from phalanx.system.files import check_creatable
from phalanx.words import format_count, format_size

__all__ = ["PlotError", "check_plot", "draw", "series"]

_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_COLUMNS = 3


class PlotError(ValueError):
    """A plot cannot be drawn: matplotlib or its file's folder is missing, or nothing that has a size was measured."""


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn, before anything is measured.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be made.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install matplotlib")
    try:
        if not path.exists():
            check_creatable(path)
    except OSError as error:
        raise PlotError(f"--plot {path}: cannot be written: {error.strerror}") from error


def series(results: dict[str, Any]) -> dict[str, dict[tuple[str, int, str], list[tuple[int, Summary]]]]:
    """The curves of each panel, by backend, number of ranks and the MPI that started them; a curve is sizes and times.

    Args:
        results: what ``--json`` prints.
    """
    panels: dict[str, dict[tuple[str, int, str], list[tuple[int, Summary]]]] = {}
    for job, row in _rows(results):
        launcher = backend_title(job, MPI) if job["mpi"] else ""
        panel = panels.setdefault(f"{row['operation']}, {row['dtype']}", {})
        for backend, samples in row["samples_us"].items():
            key = (backend, job["size"], launcher)
            panel.setdefault(key, []).append((row["nbytes"], Summary.of(samples)))
    return panels


def _rows(results: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for job in results["jobs"]:
        for row in job["rows"]:
            if row["used_nbytes"]:
                yield job, row


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the medians with their quartiles into a PNG file, or by its suffix into a PDF or SVG.

    Args:
        results: what ``--json`` prints.
        path: the file to write; its parent folder exists.

    Raises:
        PlotError: no operation with a size was measured.
    """
    panels = series(results)
    if not panels:
        raise PlotError("nothing to plot: a barrier has no size")
    # matplotlib's object interface needs no display and keeps no state between calls.
    figure_module = importlib.import_module("matplotlib.figure")
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = figure_module.Figure(figsize=(5.2 * columns, 4.0 * lines + 0.9), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    sizes = sorted({job["size"] for job, _ in _rows(results)})
    launchers = list(dict.fromkeys(key[2] for panel in panels.values() for key in panel))
    backends = list(dict.fromkeys(key[0] for panel in panels.values() for key in panel))
    colours: dict[tuple[str, str], str] = {}
    for panel, (title, curves) in zip(axes, panels.items(), strict=False):
        for (backend, ranks, launcher), points in curves.items():
            # Each MPI has a colour of its own; Phalanx and Gloo have one each, whichever MPI started the ranks.
            identity = (backend, launcher if backend == MPI else "")
            colours.setdefault(identity, "0.6" if backend == MEMCPY else f"C{len(colours)}")
            nbytes = [point[0] for point in points]
            medians = [point[1].median for point in points]
            name = launcher if backend == MPI else backend
            panel.plot(
                nbytes,
                medians,
                _STYLES[sizes.index(ranks) % len(_STYLES)],
                marker=_MARKERS[launchers.index(launcher) % len(_MARKERS)],
                markersize=3.5,
                linewidth=2 if backend == settings.BACKEND else 1.2,
                color=colours[identity],
                label=f"{name}, {format_count(ranks, 'rank')}",
                zorder=len(backends) - backends.index(backend),
            )
            panel.fill_between(
                nbytes,
                [point[1].q1 for point in points],
                [point[1].q3 for point in points],
                color=colours[identity],
                alpha=0.15,
                linewidth=0,
            )
        ticks = sorted({point[0] for points in curves.values() for point in points})
        for _, row in _rows(results):
            if f"{row['operation']}, {row['dtype']}" == title and noise_of(row).excessive:
                panel.annotate("~", (row["nbytes"], 1), xycoords=("data", "axes fraction"), ha="center", va="top")
        panel.set(xscale="log", yscale="log", title=title, xlabel="size, bytes", ylabel="µs a call")
        panel.set_xticks(ticks, [format_size(tick) for tick in ticks])
        panel.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
    within = axes[0].get_ylim()
    for panel in axes[: len(panels)]:
        ends = panel.get_xticks()[[0, -1]]
        for rate in (1, 10):  # a line on which all sizes have this rate
            panel.plot(ends, ends * 1e-3 / rate, color="0.8", linewidth=0.8, zorder=0)
            panel.annotate(f"{rate} GB/s", (ends[1], ends[1] * 1e-3 / rate), color="0.5", fontsize=7, ha="right")
    axes[0].set_ylim(within)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    labels = {label: line for panel in axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    title = f"{machine['cpu']}, {machine['usable_cores']} cores, {results['date'][:10]}\n{versions}; ~: too noisy"
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130, format=path.suffix[1:] if path.suffix in (".pdf", ".svg") else "png")
