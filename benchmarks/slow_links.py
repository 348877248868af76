"""What each way to send less costs and saves: the text example between two hosts, one rank on each.

    python benchmarks/slow_links.py                               two hosts made on this machine (needs root)
    python benchmarks/slow_links.py --rates 10mbit 100mbit --rounds 5 --json
    python benchmarks/slow_links.py --epochs 3 --ways none int8   trains to the end with each as well, for the accuracy
    MASTER_ADDR=h1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
        python benchmarks/slow_links.py --measure                 on real hosts: on h1, and on the other with RANK=1

For each rate the ranks take ``--steps`` steps in each way, in turn, ``--rounds`` times, and count the bytes that leave
each rank's host by the counters of its network interfaces (headers of IP and Ethernet are in them, and all that Phalanx
itself sends). "local" takes steps and sends nothing: what computation alone costs. A step in which what has to be sent
is sent after the computation takes the time of both; "of predicted" is that time, with the bytes at the rate of a large
all_reduce, over the measured one: 1.0 is as quick as that, and more is quicker, because some is sent meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"compress": "bf16"},
    "fp16": {"compress": "fp16"},
    "int8": {"compress": "int8"},
    "powersgd": {"compress": "powersgd"},
    "sync_every=16": {"sync_every": 16},
    "diloco, 16": {"sync_every": 16, "outer": "diloco"},
    "diloco, 16, int8": {"sync_every": 16, "outer": "diloco", "compress": "int8"},
    "auto": {"compress": "auto"},
}
LOCAL: dict[str, Any] = {"sync_every": 1 << 30}
WARM_UP = 16  # PowerSGD compresses after ten
LARGE = 4 << 20  # elements of the all_reduce that measures the link


def sent_bytes() -> int:
    """What the network interfaces of this host have sent, but for loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    columns = {name.strip(): counts.split() for name, _, counts in (line.partition(":") for line in lines)}
    return sum(int(counts[8]) for name, counts in columns.items() if name != "lo")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One rank: all ways in turn; the results, which rank 0 prints."""
    import torch

    import phalanx

    example = importlib.import_module("text_classification")

    with phalanx.init(quiet=True) as world:
        vocabulary, train_set, _ = example.load_datasets(options.limit)
        loader = world.loader(train_set, options.batch_size // world.size, shuffle=True, drop_last=True)

        def batches() -> Iterator[Any]:
            while True:
                yield from loader

        source = batches()

        class Way:
            def __init__(self, given: dict[str, Any]) -> None:
                torch.manual_seed(0)
                self.model = world.data_parallel(example.Classifier(len(vocabulary), 0.5), **given)
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
                self.times: list[float] = []
                self.bytes: list[float] = []

            def steps(self, count: int) -> None:
                for _ in range(count):
                    tokens, labels = next(source)
                    self.optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(self.model(tokens), labels)
                    torch.autograd.backward(loss)
                    self.optimizer.step()

            def timed(self, count: int) -> None:
                world.barrier()
                sent, began = sent_bytes(), time.perf_counter()
                self.steps(count)
                world.barrier()
                self.times.append((time.perf_counter() - began) / count)
                self.bytes.append((sent_bytes() - sent) / count)

        ways = {name: Way(WAYS[name]) for name in options.ways} | {"local": Way(LOCAL)}
        for way in ways.values():
            way.steps(WARM_UP)
        rates = []
        for _ in range(options.rounds):
            for way in ways.values():
                way.timed(options.steps)
            large = torch.ones(options.large)
            world.barrier()
            sent, began = sent_bytes(), time.perf_counter()
            world.all_reduce(large)
            rates.append((sent_bytes() - sent) / (time.perf_counter() - began))
        results = {
            name: {
                "seconds": statistics.median(way.times),
                "bytes": statistics.median(way.bytes),
                "chosen": way.model.compress,
            }
            for name, way in ways.items()
        }
        parameters = sum(parameter.numel() for parameter in ways["local"].model.parameters())
        return {"rank": world.rank, "rate": statistics.median(rates), "parameters": parameters, "ways": results}


def on_two_hosts(folder: Path, rates: list[str], arguments: list[str]) -> list[dict[str, Any]]:
    """The results of rank 0 for each rate, on hosts that are made for this."""
    from tests.support.hosts import running_hosts, why_no_hosts

    if why := why_no_hosts():
        sys.exit(f"No hosts can be made here ({why}); start this on two hosts with --measure")
    found = []
    with running_hosts(2, folder) as hosts:
        for number, rate in enumerate(rates):
            for host in range(2):
                shape = f"tbf rate {rate} burst 128kb latency 50ms" if rate != "unshaped" else "pfifo"
                command = ["tc", "qdisc", "replace", "dev", "eth0", "root", *shape.split()]
                hosts.start(host, command, {}).wait()
            meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(29500 + number), "WORLD_SIZE": "2"}
            settings = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "PHALANX_INTERFACE": "eth0"}
            command = [sys.executable, __file__, "--measure", "--json", *arguments]
            ranks = [
                hosts.start(rank, command, {**meeting, **settings, "RANK": str(rank)}, stdout=subprocess.PIPE)
                for rank in range(2)
            ]
            outputs = [rank.communicate()[0] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                sys.exit(f"at {rate} a rank has failed, see above")
            found.append({"link": rate, **json.loads(outputs[0].splitlines()[-1])})
            if "--json" not in sys.argv:
                print(table(found[-1]), flush=True)
    return found


def table(result: dict[str, Any]) -> str:
    """The results of one rate for people."""
    ways, rate = result["ways"], result["rate"]
    plain, local = ways.get("none"), ways["local"]["seconds"]
    lines = [
        f"{result.get('link', 'this link')}: {8e-6 * rate:.1f} Mbit/s measured; {result['parameters']:,} parameters; "
        f"computation {1e3 * local:.1f} ms a step",
        f"{'way':<18}{'KB/step':>10}{'fewer':>8}{'ms/step':>10}{'steps/s':>9}{'quicker':>9}"
        f"{'of predicted':>14}  chosen",
    ]
    for name, way in ways.items():
        if name == "local":
            continue
        predicted = local + way["bytes"] / rate
        fewer = f"{plain['bytes'] / way['bytes']:.2f}" if plain else ""
        quicker = f"{plain['seconds'] / way['seconds']:.2f}" if plain else ""
        lines.append(
            f"{name:<18}{way['bytes'] / 1e3:>10.1f}{fewer:>8}{1e3 * way['seconds']:>10.1f}{1 / way['seconds']:>9.2f}"
            f"{quicker:>9}{predicted / way['seconds']:>14.2f}  {way['chosen']}"
        )
    return "\n".join(lines) + "\n"


def accuracies(names: list[str], epochs: int) -> dict[str, float]:
    """The held-out accuracy of the example on two ranks of this machine: what is exchanged is the same on any link."""
    found = {}
    for name in names:
        given = {"compress": "--compress", "sync_every": "--sync-every", "outer": "--outer"}
        chosen = [word for key, value in WAYS[name].items() for word in (given[key], str(value))]
        with tempfile.TemporaryDirectory() as folder:
            script = [str(ROOT / "examples" / "text_classification.py"), "--epochs", str(epochs)]
            where = ["--checkpoint", f"{folder}/run.pt"]
            run = [sys.executable, "-m", "phalanx", "run", "--no-prefix", "-n", "2", *script, *where, *chosen]
            ended = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(ended.stdout.splitlines()[-1])["accuracy"]
        if "--json" not in sys.argv:
            print(f"{name:<18}held-out accuracy {found[name]:.4f} after {epochs} epochs", flush=True)
    return found


def main() -> None:
    """Measure as a rank, or start the hosts and the ranks on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--rates", nargs="+", default=["10mbit", "100mbit", "1gbit", "unshaped"], help="as tc writes them [%(default)s]"
    )
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY", help=f"some of {', '.join(WAYS)}")
    add("--steps", type=int, default=16, help="of a way in each round; a multiple of 16 [%(default)s]")
    add("--rounds", type=int, default=3)
    add("--batch-size", type=int, default=128, help="of all ranks together [%(default)s]")
    add("--limit", type=int, help="use only so many reviews")
    add("--large", type=int, default=LARGE, help="elements of the all_reduce that measures the link [%(default)s]")
    add("--epochs", type=int, default=0, help="train with each way for so many epochs as well [none]")
    add("--measure", action="store_true", help="be one of the ranks")
    add("--json", action="store_true", help="print one JSON object in the end, and no tables")
    options = parser.parse_args()
    if options.measure:
        result = measure(options)
        if result["rank"] == 0:
            print(json.dumps(result) if options.json else table(result))
        return
    passed = ["--ways", *options.ways, *("--steps", str(options.steps)), *("--rounds", str(options.rounds))]
    passed += ["--batch-size", str(options.batch_size), "--large", str(options.large)]
    passed += ["--limit", str(options.limit)] if options.limit else []
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"links": on_two_hosts(Path(folder), options.rates, passed)}
    if options.epochs:
        found["accuracy"] = accuracies(options.ways, options.epochs)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
