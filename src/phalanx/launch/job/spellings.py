"""Translate options of torchrun, mpiexec, accelerate and horovodrun into those of ``phalanx run``.

Users come with a command line for another launcher. An option of it that means the same here is accepted; one that asks
for what happens anyway is accepted and ignored; for every other one the error says how the same is done here. Only the
words before the target are looked at, because those after it belong to the target.

Names are written without their dashes, because mpiexec takes each with one dash or with two, and with hyphens, because
torchrun and accelerate take those and underscores.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from phalanx.errors import LaunchError

__all__ = ["count_after_target", "translate"]

_T = TypeVar("_T")


def _by_name(rows: Mapping[str, _T]) -> dict[str, _T]:
    """Spread a table whose rows are each for several names."""
    return {name: row for names, row in rows.items() for name in names.split()}


_RANKS = "nproc-per-node np num-proc num-processes ntasks"
# Options that mean the same as one of ours: in our words, with {} for the value. Nothing: it happens anyway.
_SAME = _by_name(
    {
        _RANKS: "-n {}",
        "perhost npernode N ntasks-per-node": "--ppn {}",
        "host hostlist": "--hosts {}",
        "machinefile f mpirun-hostfile": "--hostfile {}",
        "iface network-interface network-interfaces": "--interface {}",
        "bind-to binding": "--bind {}",
        "s": "--stdin {}",
        "num-machines": "--nnodes {}",
        "machine-rank": "--node-rank {}",
        "main-process-ip rdzv-endpoint": "--master-addr {}",
        "main-process-port": "--master-port {}",
        "shutdown-timeout": "--grace {}",
        "max-restarts": "--restarts {}",
        "genv env": "-x {}",
        "num-cpu-threads-per-process": "-x OMP_NUM_THREADS={}",
        "module": "-m",
        "cpu": "--device cpu",
        "bind-to-core": "--bind core",
        "standalone no-python run-path use-env allow-run-as-root oversubscribe": "",
        "tag-output prepend-rank l label genvall envall display-map": "",
        "print-rank-map multi-gpu same-network gloo disable-cache": "",
    }
)
_HOSTS = (
    "phalanx run is called once, and starts the ranks of all hosts: -H h1:4,h2:4; under torchrun, srun or mpiexec the "
    "same script runs unchanged"
)
_LOGS = "--log-dir DIR writes the output of each rank to a file of its own, and --tee shows it as well"
_STREAMS = f"{_LOGS}, both streams of all ranks"
# Options of which some values mean the same as words of ours, and the remedy for other values. The streams of torchrun
# and accelerate that go to files are 0 none, 1 stdout, 2 stderr, 3 both, or such a number for each local rank.
_VALUES: dict[str, tuple[dict[str, str], str]] = _by_name(
    {
        "output": ({"tag": "", "TAG": ""}, _LOGS),
        "r redirects": ({"0": "", "3": ""}, _STREAMS),
        "t tee": ({"0": "", "3": "--tee"}, _STREAMS),
    }
)
_MEETING = "phalanx run chooses where its ranks meet, on a free port"
# Options with a value that nothing here needs, and why.
_NEEDLESS = _by_name(
    {
        "rdzv-backend rdzv-id rdzv-conf local-addr": _MEETING,
        "monitor-interval": "phalanx run is told at once that a rank has ended",
        "start-method": "Python ranks are forked; with --no-preload each is a new process",
        "start-timeout": "phalanx run waits for its ranks until they have started, or one has failed",
        "role": "all ranks of phalanx run have the same role",
        "signals-to-handle": "phalanx run passes signals on to the ranks anyway",
        "event-log-handler": "phalanx run keeps no log of events",
        "genvlist envlist": "ranks have every variable of this environment",
    }
)
_ADDRESSES = ("master-addr", "main-process-ip", "rdzv-endpoint")
_THIS_HOST = ("", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0")
_OWN_LAUNCHER = (
    "is for a launcher of its own kind, which reads more than this; start it by that, Phalanx works under it"
)
_ACCELERATE_ENV = "Accelerate reads it from the environment: -x ACCELERATE_"
_TO_MPI = "give it to the MPI launcher: --mpi 'mpiexec …'"
_TIMES = "the files of --log-dir have times; or mark the lines by another program: phalanx run … 2>&1 | ts"
# Options that have no counterpart, and how the same is done here.
_OTHERWISE = _by_name(
    {
        "output-filename output-directory logs-specs outfile outfile-pattern errfile errfile-pattern": _LOGS,
        "print-completion": "the command line is click's; click's documentation says how a shell completes it",
        "log-line-prefix-template": "every line is marked as [rank N], or not at all with --no-prefix",
        "merge-stderr-to-stdout": "phalanx run … 2>&1 does the same",
        "timestamp-output prepend-timestamp prefix-timestamp prefix-output-with-timestamp": _TIMES,
        "wdir gwdir wd chdir": "ranks run in the directory of phalanx run: cd there first",
        "genvnone envnone": 'leave variables out before: env -i PATH="$PATH" phalanx run …',
        "rank": "phalanx run starts all ranks itself, and -n says how many",
        "c": "-n says how many ranks to start; --bind core gives each its share of the cores",
        "local-ranks-filter": "--only RANKS shows some ranks alone, counted over all hosts: --only 0",
        "duplicate-stdout-filters duplicate-stderr-filters": "by another program: phalanx run … | grep PATTERN",
        "virtual-local-rank": "give each rank its own device in the script: phalanx.init().device",
        "numa-binding enable-cpu-affinity": "you mean --bind numa, the cores of one NUMA node",
        "gpu-ids": "you mean -x CUDA_VISIBLE_DEVICES=0,1",
        "mixed-precision": f"{_ACCELERATE_ENV}MIXED_PRECISION=bf16",
        "dynamo-backend": f"{_ACCELERATE_ENV}DYNAMO_BACKEND=INDUCTOR",
        "dynamo-mode dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation": (
            f"{_ACCELERATE_ENV}DYNAMO_MODE=default, and so on"
        ),
        "config-file tpu use-deepspeed use-fsdp use-megatron-lm use-parallelism-config zero-stage jsrun": _OWN_LAUNCHER,
        "gradient-accumulation-steps gradient-clipping downcast-bf16 main-training-function": _OWN_LAUNCHER,
        "map-by rank-by rankfile rankmap rr grr membind use-hwthread-cpus gpus-per-proc binding-args": (
            "placing is up to the MPI launcher: --mpi 'mpirun --map-by …'"
        ),
        "p ssh-port i ssh-identity-file": (
            "ssh reads ports and keys from ~/.ssh/config; or give it options of its own: --starter 'ssh -p 2222'"
        ),
        "mpi-args tcp mca prtemca pmixmca prefix launcher launcher-exec bootstrap": _TO_MPI,
        "rmk nolocal localhost usize tune gtool": _TO_MPI,
        "configfile app": "a job here has one program for all ranks, which may ask for its rank",
        "v verbose display report-bindings": (
            "--dry-run shows what would be started, and with --json the cores of each rank"
        ),
        "version V": "phalanx --version prints it",
        "timeout": "limit the job by another program: timeout SECONDS phalanx run …",
        "xterm": "--debug RANK hands this terminal to a rank",
        "min-np min-num-proc max-np max-num-proc host-discovery-script slots-per-host elastic-timeout reset-limit": (
            "the number of ranks is fixed: -n N"
        ),
        "blacklist-cooldown-range": "the number of ranks is fixed: -n N",
        "fusion-threshold-mb cycle-time-ms cache-capacity autotune log-level timeline-filename no-stall-check "
        "hierarchical-allreduce num-nccl-streams thread-affinity gloo-timeout-seconds": (
            "belongs to Horovod's own engine; start such a script by horovodrun, Phalanx works under it too"
        ),
    }
)
# How the names of whole groups of options begin: those of accelerate for other engines.
_FAMILIES = ("deepspeed-", "zero3-", "offload-", "fsdp-", "megatron-lm-", "parallelism-config-", "fp8-", "tpu-", "aws-")
# A one-letter option with its value, or several flags, in one word.
_JOINED = re.compile(r"-n(\d+|auto|gpu|cpu)|-[Hx][^=].*|-[qm]{2,}")


def translate(words: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Replace other launchers' options by ours, up to the target.

    Args:
        words: the command line after ``phalanx run``.
        own: the options that ``phalanx run`` has, and whether each takes a value.

    Returns:
        The command line in our own spelling, and a note for each option that was accepted but is not needed.
    """
    undashed = {option.lstrip("-"): option for option in own}
    left = list(words)
    found: list[str] = []
    notes: list[str] = []

    def take(name: str) -> str:
        if not left:
            raise LaunchError(f"{name} needs a value")
        return left.pop(0)

    while left and left[0].startswith("-") and left[0] not in ("-", "--"):
        word = left.pop(0)
        name, given, value = word.partition("=")
        plain = name.lstrip("-").replace("_", "-")
        option = name if name in own else undashed.get(plain)
        if plain == "tee" and not given and not (left and re.fullmatch(r"[0-3][0-3:,]*", left[0])):
            found.append("--tee")  # ours has no value
        elif plain in _VALUES:
            value = value if given else take(name)
            meanings, remedy = _VALUES[plain]
            if value not in meanings:
                raise LaunchError(f"no such option {name} {value}; {remedy}")
            found += meanings[value].split()
        elif option is not None:
            found.append(f"{option}={value}" if given and option.startswith("--") else option)
            if given and not option.startswith("--"):
                found.append(value)
            elif not given and own[option] and left:
                found.append(left.pop(0))
        elif plain in _SAME:
            if "{}" in _SAME[plain]:
                value = value if given else take(name)
            if plain in ("genv", "env") and "=" not in value:
                value = f"{value}={take(name)}"
            found += [part.replace("{}", value) for part in _SAME[plain].split()]
        elif plain in _NEEDLESS:
            value = value if given else take(name)
            notes.append(f"{name} {value} is not needed: {_NEEDLESS[plain]}")
        elif plain in _OTHERWISE or plain.startswith(_FAMILIES):
            raise LaunchError(f"no such option {name}; {_OTHERWISE.get(plain, _OWN_LAUNCHER)}")
        elif _JOINED.fullmatch(word):
            found.append(word)
        else:
            theirs = {known: f"--{known}" for known in (*_SAME, *_VALUES, *_NEEDLESS, *_OTHERWISE)} | undashed
            near = difflib.get_close_matches(plain, theirs, 1, 0.7)
            meant = f"did you mean {theirs[near[0]]}? " if near else ""
            help_ = "phalanx run --help lists all; options of the script come after the script"
            raise LaunchError(f"no such option {name}; {meant}{help_}")
    return found + left, notes


def count_after_target(arguments: Sequence[str]) -> str:
    """Find an option for the number of ranks among a target's own arguments, as ``-n 2``; empty if there is none."""
    names = "|".join(("n", "ranks", *_RANKS.split())).replace("-", "[-_]")
    return next(iter(re.findall(rf"(?<!\S)--?(?:{names})[ =]\d+(?!\S)", " ".join(arguments))), "")
