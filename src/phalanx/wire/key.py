"""The job's key, which a process must know to join.

A launcher makes a new one for each job; elsewhere a user puts one into a file that only the ranks can read. A key is
never part of a command line, which every user of a machine can read, as the environment of a process is not.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx import settings
from phalanx.errors import InitializationError

# An eavesdropper on one join can try guesses at leisure, so a password that people can remember is not enough.
SHORTEST, LONGEST = 16, 4096
_REMEDY = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


@dataclass(frozen=True)
class Key:
    """The secret by which a process proves that it belongs to the job; empty if there is none, and the join is open.

    ``source`` says where it comes from, for people.
    """

    secret: bytes = field(default=b"", repr=False)
    source: str = ""

    @property
    def is_open(self) -> bool:
        """Tell whether every process that reaches the port can join."""
        return not self.secret


def new_key() -> str:
    """Make a key that no other job has, in letters and digits."""
    return secrets.token_hex(32)


def job_key(environment: Mapping[str, str] | None = None) -> Key:
    """Return the key of this process's job: the user's file, else the launcher's, else none.

    Raises:
        InitializationError: the file cannot be read, others can read it, or the key is too short or too long.
    """
    environment = os.environ if environment is None else environment
    path = environment.get(settings.KEY_FILE)
    if path:
        source = f"{settings.KEY_FILE}={path}"
        return Key(_long_enough(_read(path, source), source), source)
    if environment.get(settings.KEY):
        return Key(_long_enough(environment[settings.KEY].encode(), settings.KEY), settings.KEY)
    return Key()


def _read(path: str, source: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InitializationError(f"{source} is not a file; {_REMEDY}")
            if status.st_uid not in (os.geteuid(), 0):
                raise InitializationError(
                    f"{source} belongs to another user (id {status.st_uid}), who knows and can change it; use a file "
                    f"of your own: {_REMEDY}"
                )
            if status.st_mode & 0o077:
                raise InitializationError(
                    f"{source} can be read or written by other users (mode {stat.S_IMODE(status.st_mode):04o}), so it "
                    f"is not a secret; make another key and keep it to yourself: chmod 600 {path}"
                )
            return file.read(LONGEST + 1).strip()
    except OSError as error:
        raise InitializationError(
            f"{source} cannot be read ({error.strerror}); every rank needs it, on every host"
        ) from error


def _long_enough(secret: bytes, source: str) -> bytes:
    if not SHORTEST <= len(secret) <= LONGEST:
        raise InitializationError(
            f"{source} holds a key of {len(secret)} bytes, and it must have {SHORTEST} to {LONGEST}; {_REMEDY}"
        )
    return secret
