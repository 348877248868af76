"""The options of torchrun, mpiexec, accelerate and horovodrun, as ``phalanx run`` understands them.

Users come with a command line for another launcher. An option of it that means the same here is accepted; one that asks
for what happens anyway is accepted and ignored; for every other one the error says how the same is done here. Only the
words before the target are looked at, because those after it belong to the target.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from phalanx.errors import LaunchError

__all__ = ["translate"]

# Options that mean the same as one of ours, with a value.
_SAME = {
    "-n": ("--nproc-per-node", "-np", "--np", "--num-proc", "--num-processes", "--ntasks"),
    "--ppn": ("-ppn", "-perhost", "--perhost", "--npernode", "-npernode", "-N", "--ntasks-per-node"),
    "--hosts": ("-hosts", "-host", "--host"),
    "--hostfile": ("-hostfile", "-machinefile", "--machinefile", "-f"),
    "--interface": ("-iface", "--network-interface", "--network-interfaces"),
    "--bind": ("--bind-to", "-bind-to"),
    "--grace": ("--shutdown-timeout",),
}
# Options without a value, and what they are here; empty for those that ask for what happens anyway.
_FLAGS = {
    "--module": ("-m",),
    "--cpu": ("--device", "cpu"),
    **dict.fromkeys(
        (
            "--standalone",
            "--no-python",
            "--run-path",
            "--use-env",
            "--allow-run-as-root",
            "--oversubscribe",
            "-oversubscribe",
            "--tag-output",
            "-tag-output",
            "-prepend-rank",
            "-genvall",
            "-envall",
            "--multi-gpu",
            "--gloo",
        ),
        (),
    ),
}
# Options with a variable and its value as two words.
_VARIABLES = ("-genv", "-env")
_HOSTS_REMEDY = (
    "phalanx run starts ranks on this machine, or with an MPI launcher on several: --mpi mpiexec -H h1:4,h2:4; under "
    "torchrun, srun or mpiexec the same script runs unchanged"
)
_RESTART_REMEDY = "phalanx run starts a job once; start it again where it fails: until phalanx run …; do sleep 1; done"
# Options with a value that asks for what happens anyway, the values that do, and the remedy for the others.
_DEFAULTS = {
    "--nnodes": (("1", "1:1"), _HOSTS_REMEDY),
    "--num-machines": (("1",), _HOSTS_REMEDY),
    "--node-rank": (("0",), _HOSTS_REMEDY),
    "--machine-rank": (("0",), _HOSTS_REMEDY),
    "--max-restarts": (("0",), _RESTART_REMEDY),
}
# Options with the address at which ranks meet. Here the launcher chooses it.
_ADDRESSES = ("--master-addr", "--main-process-ip", "--rdzv-endpoint")
_LOOPBACK = ("", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0")
# Options with a value that nothing here needs.
_NEEDLESS = (
    "--master-port",
    "--main-process-port",
    "--rdzv-backend",
    "--rdzv-id",
    "--rdzv-conf",
    "--local-addr",
    "--monitor-interval",
    "--start-method",
    "--start-timeout",
    "--role",
    "--signals-to-handle",
    "--event-log-handler",
)
_NO_LOGS = "phalanx run writes no log files; it marks every line with its rank: phalanx run … 2>&1 | tee job.log"
_ACCELERATES = "belongs to Accelerate, which reads it from the environment: -x ACCELERATE_…=…"
_OWN_LAUNCHER = "is for accelerate launch; start it by that, Phalanx works under it too"
_PLACEMENT = "placing is up to the MPI launcher: --mpi 'mpirun --map-by …'"
# Options that have no counterpart, and how the same is done here.
_OTHERWISE = {
    **dict.fromkeys(("--log-dir", "-r", "--redirects", "-t", "--tee", "--output-filename", "--logs-specs"), _NO_LOGS),
    **dict.fromkeys(("-outfile-pattern", "-errfile-pattern"), _NO_LOGS),
    **dict.fromkeys(("-wdir", "--wdir", "-wd", "--chdir"), "ranks run in the directory of phalanx run: cd there first"),
    "--rank": "phalanx run starts all ranks itself, and -n says how many",
    **dict.fromkeys(
        ("--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters"),
        "every line is marked with its rank: phalanx run … | grep '^.rank 0.'",
    ),
    "--virtual-local-rank": "give each rank its own device in the script: phalanx.init().device",
    "--numa-binding": "you mean --bind numa",
    "--mixed-precision": _ACCELERATES,
    "--dynamo-backend": _ACCELERATES,
    "--gpu-ids": "you mean -x CUDA_VISIBLE_DEVICES=0,1",
    **dict.fromkeys(("--config-file", "--use-deepspeed", "--use-fsdp"), _OWN_LAUNCHER),
    **dict.fromkeys(("--map-by", "-map-by", "--rank-by", "-rank-by"), _PLACEMENT),
    **dict.fromkeys(("-p", "--ssh-port", "--ssh-identity-file"), "give it to the MPI launcher: --mpi 'mpiexec …'"),
    **dict.fromkeys(("-v", "--verbose"), "--dry-run shows what would be started"),
    **dict.fromkeys(("--min-np", "--max-np", "--host-discovery-script"), "the number of ranks is fixed: -n N"),
}
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
    left = list(words)
    found: list[str] = []
    notes: list[str] = []
    while left and left[0].startswith("-") and left[0] not in ("-", "--"):
        word = left.pop(0)
        name, given, value = word.partition("=")
        if name in own:
            found.append(word)
            if own[name] and not given and left:
                found.append(left.pop(0))
            continue
        # torchrun and accelerate take their options with underscores too.
        plain = name.replace("_", "-") if name.startswith("--") else name
        if plain in own:
            found.append(plain + given + value)
            if own[plain] and not given and left:
                found.append(left.pop(0))
        elif plain in _FLAGS:
            found += _FLAGS[plain]
        elif plain in _VARIABLES and not given:
            variable, value = _take(name, left), _take(name, left)
            found += ["-x", f"{variable}={value}"]
        elif plain in _OURS or plain in _DEFAULTS or plain in _ADDRESSES or plain in _NEEDLESS:
            ours, note = _with_value(name, plain, value if given else _take(name, left))
            found += ours
            notes += note
        elif plain in _OTHERWISE:
            raise LaunchError(f"no such option {name}; {_OTHERWISE[plain]}")
        elif _JOINED.fullmatch(word):
            found.append(word)
        else:
            raise LaunchError(f"no such option {name}; {_nearest(plain, own)}")
    return found + left, notes


def _take(name: str, left: list[str]) -> str:
    if not left:
        raise LaunchError(f"{name} needs a value")
    return left.pop(0)


def _with_value(name: str, plain: str, value: str) -> tuple[list[str], list[str]]:
    """Our words for an option with a value, and the note that it is not needed."""
    if plain in _OURS:
        return [_OURS[plain], value], []
    if plain in _DEFAULTS:
        values, remedy = _DEFAULTS[plain]
        if value not in values:
            raise LaunchError(f"no such option {name} {value}; {remedy}")
        return [], []
    host = value.rpartition(":")[0] if plain == "--rdzv-endpoint" and ":" in value else value
    if plain in _ADDRESSES and host not in _LOOPBACK:
        raise LaunchError(f"no such option {name} {value}; {_HOSTS_REMEDY}")
    return [], [f"{name} {value} is not needed: phalanx run chooses where its ranks meet, on a free port"]


def _nearest(name: str, own: Mapping[str, bool]) -> str:
    known = [*own, *_OURS, *_FLAGS, *_DEFAULTS, *_ADDRESSES, *_NEEDLESS, *_OTHERWISE]
    near = difflib.get_close_matches(name, known, 1, 0.7)
    meant = f"did you mean {_OURS.get(near[0], near[0])}? " if near else ""
    return f"{meant}phalanx run --help lists all; options of the script come after the script"
