"""Translate options of torchrun, mpiexec, accelerate and horovodrun into those of ``phalanx run``.

An option that means the same here is accepted; one that asks for what happens anyway is accepted and ignored; for every
other one the error says how the same is done here. Only the words before the target are looked at: those after it are
its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.errors import LaunchError


class _Row(NamedTuple):
    """The meaning of another launcher's option.

    Attributes:
        ours: our words for it, with {} for its value, which it has only then; or our words for each value that we have;
            None if we have none.
        said: how the same is done here; beside words of ours without a value, why its value is not needed.
    """

    ours: str | Mapping[str, str] | None
    said: str = ""


_RANKS = "nproc-per-node np num-proc num-processes ntasks"
_LOGS = "--log-dir DIR writes the output of each rank to a file of its own, and --tee shows it as well"
_STREAMS = f"{_LOGS}, both streams of all ranks"
_TO_MPI = "give it to the MPI launcher: --mpi 'mpiexec …'"
_PLACING = "placing is up to the MPI launcher: --mpi 'mpirun --map-by …'"
_OWN_LAUNCHER = (
    "is for a launcher of its own kind, which reads more than this; start it by that, Phalanx works under it"
)
_ACCELERATE = "Accelerate reads it from the environment: -x ACCELERATE_MIXED_PRECISION=bf16, and so on"
_TIMES = "the files of --log-dir have times; or mark the lines by another program: phalanx run … 2>&1 | ts"
_FIXED = "the number of ranks is fixed: -n N"
# Names stand without dashes, because mpiexec takes each with one or with two, and with hyphens for underscores.
_ROWS = {
    _RANKS: _Row("-n {}"),
    "perhost npernode N ntasks-per-node": _Row("--ppn {}"),
    "host hostlist": _Row("--hosts {}"),
    "machinefile f mpirun-hostfile": _Row("--hostfile {}"),
    "iface network-interface network-interfaces": _Row("--interface {}"),
    "bind-to binding": _Row("--bind {}"),
    "s": _Row("--stdin {}"),
    "shutdown-timeout": _Row("--grace {}"),
    "max-restarts": _Row("--restarts {}"),
    "genv env": _Row("-x {}"),
    "num-cpu-threads-per-process": _Row("-x OMP_NUM_THREADS={}"),
    "module": _Row("-m"),
    "cpu": _Row("--device cpu"),
    "bind-to-core": _Row("--bind core"),
    "standalone no-python run-path use-env allow-run-as-root oversubscribe tag-output prepend-rank l label": _Row(""),
    "genvall envall display-map print-rank-map multi-gpu same-network gloo disable-cache": _Row(""),
    "num-machines": _Row("--nnodes {}"),
    "machine-rank": _Row("--node-rank {}"),
    "main-process-ip rdzv-endpoint": _Row("--master-addr {}"),
    "main-process-port": _Row("--master-port {}"),
    "output": _Row({"tag": "", "TAG": ""}, _LOGS),
    # The streams that torchrun and accelerate write to files: 0 none, 1 stdout, 2 stderr, 3 both, or one a local rank.
    "r redirects": _Row({"0": "", "3": ""}, _STREAMS),
    "t tee": _Row({"0": "", "3": "--tee"}, _STREAMS),
    "rdzv-backend rdzv-id rdzv-conf local-addr": _Row("", "nodes meet at --master-addr"),
    "monitor-interval": _Row("", "phalanx run is told at once that a rank has ended"),
    "start-method": _Row("", "Python ranks are forked; with --no-preload each is a new process"),
    "start-timeout": _Row("", "phalanx run waits for its ranks until they have started, or one has failed"),
    "role": _Row("", "all ranks of phalanx run have the same role"),
    "signals-to-handle": _Row("", "phalanx run passes signals on to the ranks anyway"),
    "event-log-handler": _Row("", "phalanx run keeps no log of events"),
    "genvlist envlist": _Row("", "ranks have every variable of this environment"),
    "output-filename output-directory logs-specs outfile errfile": _Row(None, _LOGS),
    "log-line-prefix-template": _Row(None, "every line is marked as [rank N], or not at all with --no-prefix"),
    "timestamp-output prepend-timestamp prefix-timestamp prefix-output-with-timestamp": _Row(None, _TIMES),
    "print-completion": _Row(None, "click's documentation says how a shell completes the command line"),
    "local-ranks-filter": _Row(None, "--only RANKS shows some ranks alone, counted over all hosts: --only 0"),
    "duplicate-stdout-filters duplicate-stderr-filters": _Row(None, "by a program: phalanx run … | grep PATTERN"),
    "wdir gwdir wd chdir": _Row(None, "ranks run in the directory of phalanx run: cd there first"),
    "genvnone envnone": _Row(None, 'leave variables out before: env -i PATH="$PATH" phalanx run …'),
    "rank": _Row(None, "phalanx run starts all ranks itself, and -n says how many"),
    "virtual-local-rank": _Row(None, "give each rank its own device in the script: phalanx.init().device"),
    "numa-binding enable-cpu-affinity": _Row(None, "you mean --bind numa, the cores of one NUMA node"),
    "gpu-ids": _Row(None, "you mean -x CUDA_VISIBLE_DEVICES=0,1"),
    "mixed-precision dynamo-backend dynamo-mode": _Row(None, _ACCELERATE),
    "config-file tpu use-deepspeed use-fsdp use-megatron-lm zero-stage jsrun": _Row(None, _OWN_LAUNCHER),
    "map-by rank-by rankfile rankmap rr grr membind use-hwthread-cpus gpus-per-proc binding-args": _Row(None, _PLACING),
    "p ssh-port i ssh-identity-file": _Row(None, "put it into ~/.ssh/config, or give --starter 'ssh -p 2222'"),
    "mpi-args tcp mca prtemca pmixmca prefix launcher bootstrap rmk nolocal localhost usize": _Row(None, _TO_MPI),
    "v verbose display report-bindings": _Row(None, "--dry-run shows what would be started, also with --json"),
    "timeout": _Row(None, "limit the job by another program: timeout SECONDS phalanx run …"),
    "min-np min-num-proc max-np max-num-proc host-discovery-script elastic-timeout reset-limit": _Row(None, _FIXED),
}
_TABLE = {name: row for names, row in _ROWS.items() for name in names.split()}
# How the names of accelerate's options for other engines begin.
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
    while left and left[0].startswith("-") and left[0] not in ("-", "--"):
        word = left.pop(0)
        name, given, value = word.partition("=")
        plain = name.lstrip("-").replace("_", "-")
        option, row = name if name in own else undashed.get(plain), _TABLE.get(plain)
        # Our --tee has no value, torchrun's has one.
        streams = bool(given) or bool(left and re.fullmatch(r"[0-3][0-3:,]*", left[0]))
        if option is not None and (row is None or not isinstance(row.ours, Mapping) or not streams):
            found.append(f"{option}={value}" if given and option.startswith("--") else option)
            if given and not option.startswith("--"):
                found.append(value)
            elif not given and own[option] and left:
                found.append(left.pop(0))
        elif row is None and _JOINED.fullmatch(word):
            found.append(word)
        elif row is None or row.ours is None:
            raise _unknown(name, plain, row, undashed)
        else:
            if not given and (isinstance(row.ours, Mapping) or "{}" in row.ours or row.said):
                value = _value(name, left)
            if plain in ("genv", "env") and "=" not in value:
                value = f"{value}={_value(name, left)}"
            if isinstance(row.ours, Mapping):
                if value not in row.ours:
                    raise LaunchError(f"no such option {name} {value}; {row.said}")
                found += row.ours[value].split()
            else:
                found += [part.replace("{}", value) for part in row.ours.split()]
                if row.said:
                    notes.append(f"{name} {value} is not needed: {row.said}")
    return found + left, notes


def _value(name: str, left: list[str]) -> str:
    if not left:
        raise LaunchError(f"{name} needs a value")
    return left.pop(0)


def _unknown(name: str, plain: str, row: _Row | None, undashed: Mapping[str, str]) -> LaunchError:
    if row is not None or plain.startswith(_FAMILIES):
        return LaunchError(f"no such option {name}; {row.said if row is not None else _OWN_LAUNCHER}")
    theirs = {**{known: f"--{known}" for known in _TABLE}, **undashed}
    near = difflib.get_close_matches(plain, theirs, 1, 0.7)
    meant = f"did you mean {theirs[near[0]]}? " if near else ""
    help_ = "phalanx run --help lists all; options of the script come after the script"
    return LaunchError(f"no such option {name}; {meant}{help_}")


def count_after_target(arguments: Sequence[str]) -> str:
    """Find an option for the number of ranks among a target's own arguments, as ``-n 2``; empty if there is none."""
    names = "|".join(("n", "ranks", *_RANKS.split())).replace("-", "[-_]")
    return next(iter(re.findall(rf"(?<!\S)--?(?:{names})[ =]\d+(?!\S)", " ".join(arguments))), "")
