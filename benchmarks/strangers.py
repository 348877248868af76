"""By how much another user of this machine, who attacks a job all the time, delays it.

The same job runs without and with him, in turns, so that a busy moment of the machine slows both; the difference of the
medians is printed. He looks for every port on which a process of the job listens (anybody can read them), and there

- holds hundreds of connections open and says nothing,
- sends requests for the store to torch's protocol and to Phalanx's, broken messages, and claims of the wrong form,
- where the ranks derive their port from the job's id, sits on the first one and passes on what he hears.

He pauses between his attacks: what he does to the processor is not the question. How many connections he has made in a
run, in the middle, is printed too. Root alone can start another user's process.

    python benchmarks/strangers.py
    python benchmarks/strangers.py --rounds 9
"""

from __future__ import annotations

import argparse
import contextlib
import encodings.idna  # noqa: F401 - another user may not be able to read it when it is first needed
import json
import mmap
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

from phalanx.membership.meeting_point import derived_ports
from phalanx.membership.protocol import ROLE
from phalanx.wire.key import Key
from phalanx.wire.proof import GREETING, GREETING_BYTES, Response

SCRIPT = """
import sys, time, torch, torch.distributed as dist
import phalanx
began = time.monotonic()
if sys.argv[1] == "init":
    phalanx.init(quiet=True)
else:
    dist.init_process_group("phalanx")
x = torch.ones(1000)
for step in range(200):
    dist.all_reduce(x)
    if step % 20 == 0:
        dist.all_gather_object([None] * dist.get_world_size(), step)
        group = dist.new_group([0, 1])
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
    time.sleep(0.005)
dist.destroy_process_group()
print(began, time.monotonic(), flush=True)
"""
NOBODY = 65534
SILENT = 1200
FORMS = ("phalanx run", "a derived port")
STORE_REQUESTS = [b"\0" + struct.pack("=I", 0x3C85F7CE) + code for code in (b"\1", b"\7", b"\21")]
WORDS = [*STORE_REQUESTS, b"GET / HTTP/1.1\r\n\r\n", GREETING + b"x" * 64 + b"\xff" * 4, b"\0" * 5000]
CLAIMS = [
    {"rank": 1, "world_size": 2, "pid": 1, "host": "\ud800"},
    {"rank": 1, "world_size": 2, "pid": 1, "host": "h", "node_rank": []},
    {"rank": 1, "world_size": 2, "pid": 1, "host": "h"},
]


def listening(owner: int) -> set[int]:
    """The ports at which processes of this user listen, as anybody can read them."""
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and int(fields[7]) == owner:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def attack(owner: int, spared: set[int], first: int | None, count: mmap.mmap) -> None:
    """Attack whatever listens that did not before, until this process is killed; count the connections."""
    made = 0

    def connect(port: int) -> socket.socket:
        nonlocal made
        sock = socket.create_connection(("127.0.0.1", port), timeout=1)
        made += 1
        count[:8] = made.to_bytes(8, "little")
        return sock

    if first is not None:
        threading.Thread(target=sit_on, args=(first, owner, spared), daemon=True).start()
    held: list[socket.socket] = []
    while True:
        for port in sorted(listening(owner) - spared):
            for _ in range(SILENT - len(held) if len(held) < SILENT else 0):
                with contextlib.suppress(OSError):
                    held.append(connect(port))
            for words in WORDS:
                with contextlib.suppress(OSError), connect(port) as sock:
                    sock.sendall(words)
            for claim in CLAIMS:
                with contextlib.suppress(Exception), connect(port) as sock:
                    sock.settimeout(0.1)
                    greeting = sock.recv(GREETING_BYTES, socket.MSG_WAITALL)
                    said = json.dumps(claim).encode()
                    sock.sendall(Response(Key(), ROLE, greeting, ("127.0.0.1", port), said).message)
        time.sleep(0.05)
        held = [sock for sock in held if not closed(sock)]


def closed(sock: socket.socket) -> bool:
    """Whether the job has closed the connection; if so, close it here too."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            if sock.recv(1 << 16):
                return False
        except ConnectionError:
            pass
        sock.close()
        return True
    return False


def sit_on(port: int, owner: int, spared: set[int]) -> None:
    """Listen where the ranks search first, and pass everything on to where rank 0 listens."""
    with socket.create_server(("127.0.0.1", port), backlog=64) as listener:
        while True:
            caller, _ = listener.accept()
            targets = sorted(listening(owner) - spared)
            if not targets:
                held_open.append(caller)
                continue
            with contextlib.suppress(OSError):
                called = socket.create_connection(("127.0.0.1", targets[0]), timeout=1)
                for source, sink in ((caller, called), (called, caller)):
                    threading.Thread(target=pass_on, args=(source, sink), daemon=True).start()


held_open: list[socket.socket] = []


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Send what comes from one side to the other."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def start_stranger(first: int | None, count: mmap.mmap) -> int:
    """Start the other user's process, which counts in ``count`` how often it has connected; return its pid."""
    owner = os.geteuid()
    spared = listening(owner)
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        attack(owner, spared, first, count)
    finally:
        os._exit(1)


def start_job(form: str, script: str, job: str) -> list[subprocess.Popen[bytes]]:
    """The processes of one job: one that ``phalanx run`` starts, or two ranks that know nothing but Slurm's job id."""
    if form == "phalanx run":
        commands = [([sys.executable, "-m", "phalanx", "run", "-n", "2", "-q", script, "env"], dict(os.environ))]
    else:
        slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
        slurm |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "PHALANX_KEY": uuid.uuid4().hex}
        commands = [
            ([sys.executable, script, "init"], {**os.environ, **slurm, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
            for rank in ("1", "0")
        ]
    pipe = subprocess.PIPE
    return [subprocess.Popen(words, env=variables, stdout=pipe, stderr=pipe) for words, variables in commands]


def time_once(form: str, script: str, *, attacked: bool) -> tuple[float, int]:
    """Run the job once. It must succeed, and the stranger must have attacked it to its end.

    Returns:
        The seconds from its last rank's having imported torch to its end, and how often the stranger has connected.
    """
    job = str(uuid.uuid4().int % 10**9)
    ports = derived_ports(f"SLURM_JOB_ID={job} SLURM_STEP_ID=0")
    count = mmap.mmap(-1, 8)  # the stranger alone writes, and this process reads it when that has ended
    stranger = start_stranger(ports[0] if form == "a derived port" else None, count) if attacked else None
    try:
        processes = start_job(form, script, job)
        said = [[text.decode() for text in process.communicate()] for process in processes]
    finally:
        if stranger is not None:
            os.kill(stranger, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(stranger, 0)[1])
            if status != -signal.SIGKILL:
                sys.exit(f"the stranger had ended before, with {status}")
    if any(process.returncode for process in processes):
        sys.exit(f"the job failed{' under attack' if attacked else ''}:\n{''.join(err for _, err in said)}")
    times = [line.split()[-2:] for out, _ in said for line in out.splitlines()]
    made = int.from_bytes(count[:8], "little")
    if attacked and not made:
        sys.exit("the stranger could not connect to anything")
    return max(float(end) for _, end in times) - max(float(began) for began, _ in times), made


def main() -> None:
    """Time both forms of job without and with the stranger, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--form", choices=FORMS, action="append", help="the form of job; both by default")
    options = parser.parse_args()
    rounds = options.rounds
    if os.geteuid() != 0:
        sys.exit("only root can start a process of another user")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        for form in options.form or FORMS:
            alone_s, attacked_s, connections = [], [], []
            for _ in range(rounds):
                alone_s.append(time_once(form, str(script), attacked=False)[0])
                took_s, made = time_once(form, str(script), attacked=True)
                attacked_s.append(took_s)
                connections.append(made)
            one, other = statistics.median(alone_s), statistics.median(attacked_s)
            print(
                f"{form}: {one:.2f} s ({min(alone_s):.2f} to {max(alone_s):.2f}), attacked {other:.2f} s "
                f"({min(attacked_s):.2f} to {max(attacked_s):.2f}), so {other - one:+.2f} s "
                f"(median of {rounds}; {statistics.median(connections):.0f} connections)",
                flush=True,
            )


if __name__ == "__main__":
    main()
