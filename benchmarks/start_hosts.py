"""How long ranks take to start over test hosts of this machine, beside as many on one host: by ssh, or without a login.

The hosts are network namespaces (``tests/support/hosts.py``), so this needs root, iproute2 and, for ssh, OpenSSH's
server. They share the cores of this machine: where each real host imports torch for itself and all do so at once, here
the imports take turns. ``--plain`` leaves the import out, and so measures what Phalanx itself adds.

    python benchmarks/start_hosts.py                       two hosts, four ranks each
    python benchmarks/start_hosts.py --hosts 32 --ranks 2 --plain
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import reachable_hosts
from tests.support.sshd import client, running_sshd, why_no_sshd

IMPORTING = "import os, torch\nprint('rank', os.environ['RANK'], torch.__version__)\n"
PLAIN = "import os\nprint('rank', os.environ['RANK'])\n"


def time_once(words: list[str], ranks: int, folder: Path) -> float:
    """Run a command that prints a line for each rank; return the wall time in seconds, process start to its end."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    environment.pop("OMP_NUM_THREADS", None)
    begin = time.perf_counter()
    done = subprocess.run(words, capture_output=True, cwd=folder, env=environment, check=False)
    elapsed = time.perf_counter() - begin
    if done.returncode or done.stdout.count(b"\n") != ranks:
        sys.exit(f"{' '.join(words)} failed (code {done.returncode}):\n{done.stderr.decode()}")
    return elapsed


def measure(hosts: TestHosts, folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """The times of each way to start the ranks; they take turns, so that a busy moment slows all of them."""
    script = folder / "script.py"
    script.write_text(PLAIN if arguments.plain else IMPORTING)
    run = [sys.executable, "-m", "phalanx", "run", "-q", "--no-prefix", *(["--no-preload"] if arguments.plain else [])]
    there = ",".join(f"h{host}:{arguments.ranks}" for host in range(hosts.count))
    outside = hosts.outside({"/etc/ssh/ssh_config": client(folder)})
    total = hosts.count * arguments.ranks
    ways = {
        "on one host": [*outside, *run, "-n", str(total), str(script)],
        "without a login": [*outside, *run, "--starter", hosts.starter, "-H", there, str(script)],
        "by ssh": [*outside, *run, "-H", there, str(script)],
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(arguments.rounds + 1):
        for way, words in ways.items():
            taken = time_once(words, total, folder)
            if turn:  # the first round brings the files into the page cache
                times[way].append(taken)
    return times


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts (default 2)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on each (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is timed (default 5)")
    parser.add_argument("--plain", action="store_true", help="a script that does not import torch")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    why_not = why_no_hosts() or why_no_sshd()
    if why_not:
        sys.exit(why_not)
    with (
        tempfile.TemporaryDirectory() as name,
        reachable_hosts(arguments.hosts, Path(name)) as hosts,
        running_sshd(hosts, Path(name)),
    ):
        for host in range(hosts.count):
            # So that agents can start each other's.
            mount = ["mount", "--bind", str(client(Path(name))), "/etc/ssh/ssh_config"]
            hosts.start(host, mount, {}).wait()
        times = measure(hosts, Path(name), arguments)
    cores = len(os.sched_getaffinity(0))
    if arguments.json:
        print(json.dumps({"cores": cores, "hosts": arguments.hosts, "ranks": arguments.ranks, "times_s": times}))
        return
    what = "a line" if arguments.plain else "import torch, a line"
    print(f"{arguments.hosts} hosts x {arguments.ranks} ranks ({what}), {cores} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':18}{'median':>9}{'fastest':>9}{'slowest':>9}  seconds")
    for way, taken in times.items():
        print(f"{way:18}{statistics.median(taken):>9.2f}{min(taken):>9.2f}{max(taken):>9.2f}")


if __name__ == "__main__":
    main()
