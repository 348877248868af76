"""How soon workers of other hosts know that one has been killed while they waited for it.

As ``rpc_deaths.py``, with the same waits, but each worker is on a test host of its own: a network namespace of this
machine (``tests/support/hosts.py``), so this needs root and iproute2. All hosts read the same clock, and share its
cores. The wait for the store is left out: a job whose store has gone cannot go on.

    python benchmarks/rpc_deaths_hosts.py
    python benchmarks/rpc_deaths_hosts.py --rounds 9 --workers 3 --waits callee backward
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from textwrap import dedent

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.hosts import TestHosts, running_hosts, why_no_hosts

from rpc_deaths import WAITS, quantile

PORT = 29561
PATIENCE_S = 120.0
SCRIPT = """
    import json, os, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, os.environ["BENCHMARKS"])
    import torch, torch.distributed as dist
    from phalanx import rpc
    from rpc_deaths import FOREVER_S, WAITS

    folder, rank, size = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    victim = size - 1

    def note(name, value=""):
        (folder / f"{name}-{rank}.part").write_text(json.dumps(value))
        (folder / f"{name}-{rank}.part").rename(folder / f"{name}-{rank}")

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rpc.init(timeout_s=FOREVER_S)
    wait = None if rank == victim else WAITS[os.environ["WAIT"]](rank, victim, size)
    note("ready")
    if wait is None:
        while not (folder / "die").exists():
            time.sleep(0.002)
        note("killed", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    why = ""
    try:
        wait()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    note("known", [time.monotonic(), why])
    rpc.shutdown()
"""


def await_files(folder: Path, names: list[str], what: str) -> None:
    """Wait until all of these files are there."""
    until = time.monotonic() + PATIENCE_S
    while missing := [name for name in names if not (folder / name).exists()]:
        if time.monotonic() > until:
            sys.exit(f"{what}: no {', '.join(missing)} within {PATIENCE_S:g} s; {folder} has what the workers said")
        time.sleep(0.005)


def one_death(hosts: TestHosts, what: str, script: Path, folder: Path, chance: random.Random) -> list[float]:
    """The seconds until each worker of a new world knew of the death of the last one."""
    folder.mkdir()
    size = hosts.count
    world = {"MASTER_ADDR": "h0", "MASTER_PORT": str(PORT), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "eth0"}
    world |= {"BENCHMARKS": str(Path(__file__).parent), "FOLDER": str(folder), "WAIT": what}
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            with open(folder / f"said-{rank}", "wb") as said:
                own = {**world, "RANK": str(rank)}
                workers.append(hosts.start(rank, [sys.executable, str(script)], own, stdout=said, stderr=said))
        await_files(folder, [f"ready-{rank}" for rank in range(size)], what)
        time.sleep(0.1 + 0.1 * chance.random())  # all of them wait now
        (folder / "die").touch()
        await_files(folder, [f"killed-{size - 1}", *(f"known-{rank}" for rank in range(size - 1))], what)
    finally:
        for rank, worker in enumerate(workers):
            hosts.kill_all(rank)
            worker.wait()
    killed = json.loads((folder / f"killed-{size - 1}").read_text())
    times = []
    for rank in range(size - 1):
        known, why = json.loads((folder / f"known-{rank}").read_text())
        if known < killed:
            sys.exit(f"a wait for {what} ended before the death: {why}")
        times.append(known - killed)
    return times


def main() -> None:
    """Parse the command line, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    waits = [name for name in WAITS if name != "store"]
    parser.add_argument("--rounds", type=int, default=9, help="how often each wait is tried (default 9)")
    parser.add_argument("--workers", type=int, default=3, help="how many, each on its own host (default 3)")
    parser.add_argument("--waits", choices=waits, nargs="+", default=waits)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample")
    options = parser.parse_args()
    if why_not := why_no_hosts():
        sys.exit(why_not)
    chance = random.Random(options.seed)
    samples: dict[str, list[float]] = {what: [] for what in options.waits}
    folder = Path(tempfile.mkdtemp(prefix="rpc-deaths-"))
    script = folder / "script.py"
    script.write_text(dedent(SCRIPT))
    with running_hosts(options.workers, folder) as hosts:
        for number in range(options.rounds):
            for what, times in samples.items():
                times += one_death(hosts, what, script, folder / f"{what}-{number}", chance)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    if options.json:
        print(json.dumps(samples))
        return
    print(f"{'ms until known':<16}{'waits':>8}{'median':>10}{'99 %':>10}{'longest':>10}")
    for what, times in [*samples.items(), ("all", [one for some in samples.values() for one in some])]:
        row = "".join(f"{1e3 * quantile(times, share):10.1f}" for share in (0.5, 0.99, 1.0))
        print(f"{what:<16}{len(times):>8}{row}")


if __name__ == "__main__":
    main()
