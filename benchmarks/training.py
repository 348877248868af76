"""The main example end to end: one rank, two ranks, and the same two ranks under torchrun.

It runs examples/text_classification.py for one epoch, with one thread a rank and the same global batch, in four ways.
These take turns in every round, so that whatever else the machine does slows all of them. The figure is the example's
``samples_per_s``, which covers training alone, not start, loading and evaluation. The table shows the median over the
rounds, the least and the most; the ratios are those of the medians. Run it on an otherwise idle machine:

    python benchmarks/training.py
    python benchmarks/training.py --ranks 4 --rounds 5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "text_classification.py"
PHALANX_RUN = ("phalanx", "run", "--no-prefix", "-n")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")


def cases(ranks: int) -> dict[str, tuple[tuple[str, ...], int, str]]:
    """The ways that are compared: by name, the launcher, the number of ranks and the backend."""
    return {
        "phalanx run, 1 rank": (PHALANX_RUN, 1, "phalanx"),
        f"phalanx run, {ranks} ranks": (PHALANX_RUN, ranks, "phalanx"),
        f"torchrun, gloo, {ranks} ranks": (TORCHRUN, ranks, "gloo"),
        f"torchrun, phalanx, {ranks} ranks": (TORCHRUN, ranks, "phalanx"),
    }


def train(launcher: tuple[str, ...], ranks: int, backend: str, folder: str, epochs: int) -> dict[str, Any]:
    """Run the example once, and return the results that it prints in its last line."""
    options = ("--backend", backend, "--epochs", str(epochs), "--checkpoint", f"{folder}/model.pt")
    ended = subprocess.run(
        [sys.executable, "-m", *launcher, str(ranks), str(EXAMPLE), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},  # lo: Gloo's best case
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"{' '.join(launcher)} ended with {ended.returncode}:\n{ended.stderr}")
    results: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return results


def main() -> None:
    """Parse the command line, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1, help="of each run")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample")
    options = parser.parse_args()
    compared = cases(options.ranks)
    samples: dict[str, list[float]] = {name: [] for name in compared}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name, (launcher, ranks, backend) in compared.items():
                results = train(launcher, ranks, backend, folder, options.epochs)
                samples[name].append(results["samples_per_s"])
    medians = {name: statistics.median(values) for name, values in samples.items()}
    one, many, gloo, torchrun = compared
    ratios = {
        f"{options.ranks} ranks / 1 rank": medians[many] / medians[one],
        "phalanx run / torchrun with gloo": medians[many] / medians[gloo],
        "torchrun with phalanx / with gloo": medians[torchrun] / medians[gloo],
    }
    if options.json:
        print(json.dumps({"samples_per_s": samples, "medians": medians, "ratios": ratios}))
        return
    print(f"{'samples per second':<34}{'median':>8}{'least':>8}{'most':>8}")
    for name, values in samples.items():
        print(f"{name:<34}{medians[name]:8.0f}{min(values):8.0f}{max(values):8.0f}")
    print()
    for name, ratio in ratios.items():
        print(f"{name:<34}{ratio:8.2f}")


if __name__ == "__main__":
    main()
