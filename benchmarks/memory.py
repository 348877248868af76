"""``phalanx run --memory huge | keep | return``: what each costs and saves a rank, on two programs.

*Example* is one epoch of examples/text_classification.py, whose gradients keep their sizes. *Shapes* trains a small
transformer whose batches have another number of sequences, and another length, in every step; this is the hardest case
for an allocator that keeps what is freed. The modes take turns in every round, so whatever else the machine does slows
all of them. For each it prints the medians over the rounds of the processor time of all ranks (which a busy machine
changes less than the time on the clock), of the steps' rate, and of the largest resident size and the page faults of a
rank, and their ratios to ``return``:

    python benchmarks/memory.py
    python benchmarks/memory.py --rounds 5 --json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "text_classification.py"
MODES = ("return", "huge", "keep")
PROGRAMS = ("example", "shapes")
STEPS = 25


def train_example(folder: str) -> float:
    """Run the example in this rank; its samples per second."""
    sys.argv = [str(EXAMPLE), "--epochs", "1", "--checkpoint", f"{folder}/model.pt"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = printed.getvalue().splitlines()
    return float(json.loads(lines[-1])["samples_per_s"]) if lines else 0.0


def train_shapes() -> float:
    """Train on batches of changing shapes in this rank; its tokens per second."""
    import torch
    from torch import nn

    import phalanx

    world = phalanx.init()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    layers = nn.Sequential(nn.Embedding(20_000, 256), nn.TransformerEncoder(layer, 3), nn.Linear(256, 20_000))
    model = world.data_parallel(layers)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    generator = torch.Generator().manual_seed(world.rank)
    tokens, start = 0, time.perf_counter()
    for _ in range(STEPS):
        sequences, length = (int(torch.randint(*bounds, (), generator=generator)) for bounds in ((2, 17), (8, 129)))
        batch = torch.randint(0, 20_000, (sequences, length), generator=generator)
        torch.autograd.backward(nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()))
        optimizer.step()
        optimizer.zero_grad()
        tokens += batch.numel()
    rate = tokens / (time.perf_counter() - start)
    phalanx.close()
    return rate


def be_a_rank(program: str, folder: str) -> None:
    """Run the program, and print what this rank used."""
    rate = train_example(folder) if program == "example" else train_shapes()
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/status") as file:
        peak_kib = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    print(
        json.dumps(
            {
                "rate": rate,
                "cpu_s": used.ru_utime + used.ru_stime,
                "peak_mib": peak_kib / 1024,
                "page_faults": used.ru_minflt,
            }
        )
    )


def measure(program: str, mode: str, ranks: int, folder: str) -> dict[str, float]:
    """Run the program once; the sum of the processor times, the largest of the rest."""
    command = [sys.executable, "-m", "phalanx", "run", "-q", "--no-prefix", "--device", "cpu", "--memory", mode]
    ended = subprocess.run(
        [*command, "-n", str(ranks), __file__, "--program", program, "--folder", folder],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"{program} with --memory {mode} ended with {ended.returncode}:\n{ended.stderr}")
    used: list[dict[str, float]] = [json.loads(line) for line in ended.stdout.splitlines()]
    return {name: (sum if name == "cpu_s" else max)(rank[name] for rank in used) for name in used[0]}


def main() -> None:
    """Parse the command line, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample")
    parser.add_argument("--program", choices=PROGRAMS, help="of these, measure only this one")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # given to the ranks that this program starts
    options = parser.parse_args()
    if options.folder is not None:
        be_a_rank(options.program, options.folder)
        return
    programs = PROGRAMS if options.program is None else (options.program,)
    samples: dict[str, dict[str, list[dict[str, float]]]] = {name: {mode: [] for mode in MODES} for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for program in programs:
                for mode in MODES:
                    samples[program][mode].append(measure(program, mode, options.ranks, folder))
    if options.json:
        print(json.dumps(samples))
        return
    heads = ("rate", 8), ("ratio", 7), ("cpu s", 8), ("ratio", 7), ("peak MiB", 10), ("ratio", 7), ("faults", 11)
    print(f"{'program':<10}{'--memory':<10}" + "".join(f"{head:>{width}}" for head, width in heads))
    for program, modes in samples.items():
        plain = medians(modes["return"])
        for mode, taken in modes.items():
            middle = medians(taken)
            print(
                f"{program:<10}{mode:<10}"
                f"{middle['rate']:8.0f}{middle['rate'] / plain['rate']:7.2f}"
                f"{middle['cpu_s']:8.1f}{middle['cpu_s'] / plain['cpu_s']:7.2f}"
                f"{middle['peak_mib']:10.0f}{middle['peak_mib'] / plain['peak_mib']:7.2f}"
                f"{middle['page_faults']:11,.0f}"
            )


def medians(taken: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure over the rounds."""
    return {name: statistics.median(sample[name] for sample in taken) for name in taken[0]}


if __name__ == "__main__":
    main()
