"""The options of torchrun, mpiexec, accelerate and horovodrun, as ``phalanx run`` understands them.

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

from phalanx.errors import LaunchError
from phalanx.system.host import machine_name

__all__ = ["count_after_target", "translate"]

# Options that mean the same as one of ours, with a value.
_SAME = {
    "-n": ("nproc-per-node", "np", "num-proc", "num-processes", "ntasks"),
    "--ppn": ("perhost", "npernode", "N", "ntasks-per-node"),
    "--hosts": ("host", "hostlist"),
    "--hostfile": ("machinefile", "f", "mpirun-hostfile"),
    "--interface": ("iface", "network-interface", "network-interfaces"),
    "--bind": ("bind-to", "binding"),
    "--stdin": ("s",),
    "--grace": ("shutdown-timeout",),
    "--restarts": ("max-restarts",),
}
# Options without a value, and what they are here; empty for those that ask for what happens anyway.
_FLAGS = {
    "module": ("-m",),
    "cpu": ("--device", "cpu"),
    "bind-to-core": ("--bind", "core"),
    **dict.fromkeys(("standalone", "no-python", "run-path", "use-env", "allow-run-as-root", "oversubscribe"), ()),
    **dict.fromkeys(("tag-output", "prepend-rank", "l", "label", "genvall", "envall", "display-map"), ()),
    **dict.fromkeys(("print-rank-map", "multi-gpu", "same-network", "gloo", "disable-cache"), ()),
}
# Options with a variable and its value, as two words or as one with an equals sign.
_VARIABLES = ("genv", "env")
# Options whose value is that of a variable.
_AS_VARIABLE = {"num-cpu-threads-per-process": "OMP_NUM_THREADS"}
_HOSTS_REMEDY = (
    "phalanx run is called once, and starts the ranks of all hosts: -H h1:4,h2:4; under torchrun, srun or mpiexec the "
    "same script runs unchanged"
)
_LOGS = "--log-dir DIR writes the output of each rank to a file of its own, and --tee shows it as well"
# Options with a value that asks for what happens anyway, the values that do, and the remedy for the others.
_DEFAULTS = {
    "nnodes": (("1", "1:1"), _HOSTS_REMEDY),
    "num-machines": (("1",), _HOSTS_REMEDY),
    "node-rank": (("0",), _HOSTS_REMEDY),
    "machine-rank": (("0",), _HOSTS_REMEDY),
    "output": (("tag", "TAG"), _LOGS),
}
# torchrun's and accelerate's options that say which streams go to files: 0 none, 1 stdout, 2 stderr, 3 both, or such a
# number for each local rank; and what they are here.
_STREAMS = {"r": [], "redirects": [], "t": ["--tee"], "tee": ["--tee"]}
_OF_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
# Options with the address at which ranks meet. Here the launcher chooses it.
_ADDRESSES = ("master-addr", "main-process-ip", "rdzv-endpoint")
_LOOPBACK = ("", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0")
_MEETING = "phalanx run chooses where its ranks meet, on a free port"
# Options with a value that nothing here needs, and why.
_NEEDLESS = {
    **dict.fromkeys(
        ("master-port", "main-process-port", "rdzv-backend", "rdzv-id", "rdzv-conf", "local-addr"), _MEETING
    ),
    "monitor-interval": "phalanx run is told at once that a rank has ended",
    "start-method": "Python ranks are forked; with --no-preload each is a new process",
    "start-timeout": "phalanx run waits for its ranks until they have started, or one has failed",
    "role": "all ranks of phalanx run have the same role",
    "signals-to-handle": "phalanx run passes signals on to the ranks anyway",
    "event-log-handler": "phalanx run keeps no log of events",
    **dict.fromkeys(("genvlist", "envlist"), "ranks have every variable of this environment"),
}
_OWN_LAUNCHER = (
    "is for a launcher of its own kind, which reads more than this; start it by that, Phalanx works under it"
)
_HOROVODS = "belongs to Horovod's own engine; start such a script by horovodrun, Phalanx works under it too"
_PLACEMENT = "placing is up to the MPI launcher: --mpi 'mpirun --map-by …'"
_LAUNCHERS_OWN = "give it to the MPI launcher: --mpi 'mpiexec …'"
_LOGIN = "ssh reads ports and keys from ~/.ssh/config; or give it options of its own: --starter 'ssh -p 2222'"
_ELASTIC = "the number of ranks is fixed: -n N"
_SHOWN = "--dry-run shows what would be started, and with --json the cores of each rank"
_TIMES = "the files of --log-dir have times; or mark the lines by another program: phalanx run … 2>&1 | ts"
# Options that have no counterpart, and how the same is done here.
_OTHERWISE = {
    **dict.fromkeys(("output-filename", "output-directory", "logs-specs"), _LOGS),
    **dict.fromkeys(("outfile", "outfile-pattern", "errfile", "errfile-pattern"), _LOGS),
    "print-completion": "the command line is click's; click's documentation says how a shell completes it",
    "log-line-prefix-template": "every line is marked as [rank N], or not at all with --no-prefix",
    "merge-stderr-to-stdout": "phalanx run … 2>&1 does the same",
    **dict.fromkeys(("timestamp-output", "prepend-timestamp", "prefix-timestamp"), _TIMES),
    "prefix-output-with-timestamp": _TIMES,
    **dict.fromkeys(("wdir", "gwdir", "wd", "chdir"), "ranks run in the directory of phalanx run: cd there first"),
    **dict.fromkeys(("genvnone", "envnone"), 'leave variables out before: env -i PATH="$PATH" phalanx run …'),
    "rank": "phalanx run starts all ranks itself, and -n says how many",
    "c": "-n says how many ranks to start; --bind core gives each its share of the cores",
    "local-ranks-filter": "--only RANKS shows some ranks alone, counted over all hosts: --only 0",
    **dict.fromkeys(
        ("duplicate-stdout-filters", "duplicate-stderr-filters"),
        "find lines by another program: phalanx run … | grep PATTERN",
    ),
    "virtual-local-rank": "give each rank its own device in the script: phalanx.init().device",
    **dict.fromkeys(("numa-binding", "enable-cpu-affinity"), "you mean --bind numa, the cores of one NUMA node"),
    "gpu-ids": "you mean -x CUDA_VISIBLE_DEVICES=0,1",
    "mixed-precision": "Accelerate reads it from the environment: -x ACCELERATE_MIXED_PRECISION=bf16",
    **dict.fromkeys(
        ("dynamo-mode", "dynamo-use-fullgraph", "dynamo-use-dynamic", "dynamo-use-regional-compilation"),
        "Accelerate reads it from the environment: -x ACCELERATE_DYNAMO_MODE=default, and so on",
    ),
    "dynamo-backend": "Accelerate reads it from the environment: -x ACCELERATE_DYNAMO_BACKEND=INDUCTOR",
    **dict.fromkeys(("config-file", "tpu", "use-deepspeed", "use-fsdp", "use-megatron-lm"), _OWN_LAUNCHER),
    **dict.fromkeys(("use-parallelism-config", "zero-stage", "gradient-accumulation-steps"), _OWN_LAUNCHER),
    **dict.fromkeys(("gradient-clipping", "downcast-bf16", "main-training-function", "jsrun"), _OWN_LAUNCHER),
    **dict.fromkeys(("map-by", "rank-by", "rankfile", "rankmap", "rr", "grr", "membind"), _PLACEMENT),
    **dict.fromkeys(("use-hwthread-cpus", "gpus-per-proc", "binding-args"), _PLACEMENT),
    **dict.fromkeys(("p", "ssh-port", "i", "ssh-identity-file"), _LOGIN),
    **dict.fromkeys(("mpi-args", "tcp"), _LAUNCHERS_OWN),
    **dict.fromkeys(("mca", "prtemca", "pmixmca", "prefix", "launcher", "launcher-exec", "bootstrap"), _LAUNCHERS_OWN),
    **dict.fromkeys(("rmk", "nolocal", "localhost", "usize", "tune", "gtool"), _LAUNCHERS_OWN),
    **dict.fromkeys(("configfile", "app"), "a job here has one program for all ranks, which may ask for its rank"),
    **dict.fromkeys(("v", "verbose", "display", "report-bindings"), _SHOWN),
    **dict.fromkeys(("version", "V"), "phalanx --version prints it"),
    "timeout": "limit the job by another program: timeout SECONDS phalanx run …",
    "xterm": "--debug RANK hands this terminal to a rank",
    **dict.fromkeys(("min-np", "min-num-proc", "max-np", "max-num-proc", "host-discovery-script"), _ELASTIC),
    **dict.fromkeys(("slots-per-host", "elastic-timeout", "reset-limit", "blacklist-cooldown-range"), _ELASTIC),
    **dict.fromkeys(("fusion-threshold-mb", "cycle-time-ms", "cache-capacity", "autotune", "log-level"), _HOROVODS),
    **dict.fromkeys(("timeline-filename", "no-stall-check", "hierarchical-allreduce"), _HOROVODS),
    **dict.fromkeys(("num-nccl-streams", "thread-affinity", "gloo-timeout-seconds"), _HOROVODS),
}
# How the names of whole groups of options begin: those of accelerate for other engines.
_FAMILIES = ("deepspeed-", "zero3-", "offload-", "fsdp-", "megatron-lm-", "parallelism-config-", "fp8-", "tpu-", "aws-")
_OURS = {theirs: ours for ours, names in _SAME.items() for theirs in names}
# A one-letter option with its value, or several flags, in one word.
_JOINED = re.compile(r"-n(\d+|auto|gpu|cpu)|-[Hx][^=].*|-[qm]{2,}")


def translate(words: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Replace other launchers' options by ours, up to the target.

    Args:
        words: the command line after ``phalanx run``.
        own: the options that ``phalanx run`` has, and whether each takes a value.

    Returns:
        The command line in our own spelling, and a note for each option that was accepted but is not needed.

    Raises:
        LaunchError: an option is neither ours nor means the same; the message says what to write.
    """
    undashed = {option.lstrip("-"): option for option in own}
    left = list(words)
    found: list[str] = []
    notes: list[str] = []
    while left and left[0].startswith("-") and left[0] not in ("-", "--"):
        word = left.pop(0)
        name, given, value = word.partition("=")
        plain = name.lstrip("-").replace("_", "-")
        option = name if name in own else undashed.get(plain)
        if plain in _STREAMS and not (given and not _OF_STREAMS.fullmatch(value)):
            found += _streams(name, plain, value, left)
        elif option is not None:
            found.append(option)
            if given and option.startswith("--"):
                found[-1] += given + value
            elif given:
                found.append(value)
            elif own[option] and left:
                found.append(left.pop(0))
        elif plain in _FLAGS:
            found += _FLAGS[plain]
        elif plain in _VARIABLES:
            variable = value if given else _take(name, left)
            found += ["-x", variable if "=" in variable else f"{variable}={_take(name, left)}"]
        elif plain in _OURS or plain in _AS_VARIABLE or plain in _DEFAULTS or plain in _ADDRESSES or plain in _NEEDLESS:
            ours, note = _with_value(name, plain, value if given else _take(name, left))
            found += ours
            notes += note
        elif plain in _OTHERWISE or plain.startswith(_FAMILIES):
            raise LaunchError(f"no such option {name}; {_OTHERWISE.get(plain, _OWN_LAUNCHER)}")
        elif _JOINED.fullmatch(word):
            found.append(word)
        else:
            raise LaunchError(f"no such option {name}; {_nearest(plain, undashed)}")
    return found + left, notes


def count_after_target(arguments: Sequence[str]) -> str:
    """The first option for the number of ranks among a target's own arguments, as ``-n 2``; empty if there is none."""
    names = "|".join(("n", "ranks", *_SAME["-n"])).replace("-", "[-_]")
    return next(iter(re.findall(rf"(?<!\S)--?(?:{names})[ =]\d+(?!\S)", " ".join(arguments))), "")


def _take(name: str, left: list[str]) -> str:
    if not left:
        raise LaunchError(f"{name} needs a value")
    return left.pop(0)


def _with_value(name: str, plain: str, value: str) -> tuple[list[str], list[str]]:
    """Our words for an option with a value, and the note that it is not needed."""
    if plain in _OURS:
        return [_OURS[plain], value], []
    if plain in _AS_VARIABLE:
        return ["-x", f"{_AS_VARIABLE[plain]}={value}"], []
    if plain in _DEFAULTS:
        values, remedy = _DEFAULTS[plain]
        if value not in values:
            raise LaunchError(f"no such option {name} {value}; {remedy}")
        return [], []
    host = value.rpartition(":")[0] if plain == "rdzv-endpoint" and ":" in value else value
    if plain in _ADDRESSES and host not in (*_LOOPBACK, machine_name()):
        raise LaunchError(f"no such option {name} {value}; {_HOSTS_REMEDY}")
    return [], [f"{name} {value} is not needed: {_NEEDLESS.get(plain, _MEETING)}"]


def _streams(name: str, plain: str, value: str, left: list[str]) -> list[str]:
    """Our words for an option that says which streams go to files; ours, ``--tee``, has no value."""
    if not value and left and _OF_STREAMS.fullmatch(left[0]):
        value = left.pop(0)
    elif not value and plain != "tee":
        raise LaunchError(f"{name} needs a value")
    if value not in ("", "0", "3"):
        raise LaunchError(f"no such option {name} {value}; {_LOGS}, both streams of all ranks")
    return [] if value == "0" else _STREAMS[plain]


def _nearest(plain: str, undashed: Mapping[str, str]) -> str:
    theirs = (_FLAGS, _VARIABLES, _AS_VARIABLE, _DEFAULTS, _STREAMS, _ADDRESSES, _NEEDLESS, _OTHERWISE)
    shown = {**{name: f"--{name}" for names in theirs for name in names}, **_OURS, **undashed}
    near = difflib.get_close_matches(plain, shown, 1, 0.7)
    meant = f"did you mean {shown[near[0]]}? " if near else ""
    return f"{meant}phalanx run --help lists all; options of the script come after the script"
