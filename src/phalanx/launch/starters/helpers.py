"""Helpers on other hosts, for a command that a user runs here.

:class:`Helper` starts one, asks it and ends it; it answers by :func:`serve`. A question is a JSON object on a line, of
which ``do`` names the answer and the rest are arguments; the answer is a line too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

from phalanx.errors import LaunchError
from phalanx.launch.starters.ssh import command_for

__all__ = ["Helper", "Unanswered", "serve"]

_READY = "phalanx-helper"  # its first line, so that what a login shell prints before it can be told apart
_START_S = 10.0
_LAST_WORDS_S = 1.0
_HINTS = (
    (
        "Host key verification failed",
        "ssh to {host} once by hand, and accept its key (ssh-keyscan {host} >> ~/.ssh/known_hosts)",
    ),
    (
        "Permission denied",
        "ssh asks for a password or a key that it does not have: ssh-copy-id {host}, or start an agent",
    ),
    ("Could not resolve hostname", "this host does not know the name {host}: add it to /etc/hosts or to ~/.ssh/config"),
    ("Connection refused", "no ssh server listens there: start sshd on {host}, or give --starter another program"),
    ("timed out", "{host} does not answer: is it up, and does a firewall let ssh pass?"),
    ("No module named", "that Python has no Phalanx: install it there, in the same environment as here"),
    ("No such file or directory", "the same Python has to be at the same path on {host}"),
    ("not found", "the same Python has to be at the same path on {host}"),
)


class Unanswered(Exception):
    """A helper did not start, or did not answer. ``remedy`` says what to do."""

    def __init__(self, said: str, remedy: str) -> None:
        super().__init__(said)
        self.remedy = remedy


class Helper:
    """The helper on one host. It ends when this is closed.

    Args:
        host: the host, as the user calls it.
        starter: the user's starter and its arguments, as of ``phalanx run --starter``; empty for ssh.
        module: what the helper runs; it calls :func:`serve`.

    Raises:
        Unanswered: the starter cannot be run.
    """

    def __init__(self, host: str, starter: Sequence[str], module: str) -> None:
        self.host = host
        try:
            self._command = command_for(host, starter, (sys.executable, "-m", module))
        except LaunchError as error:
            raise Unanswered(str(error), "correct the name, or call the host by its address") from error
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - until close()
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C reaches the command, which then closes what it has started
            )
        except OSError as error:
            self._errors.close()
            raise Unanswered(
                f"{self._command[0]} cannot be started: {error.strerror}",
                "install OpenSSH's client, or name another program: --starter 'PROGRAM ARGS'",
            ) from error
        self._questions, self._answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._until_ready = time.monotonic() + _START_S

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Wait until the helper answers.

        Raises:
            Unanswered: it does not; the error says why, as far as the starter has said so.
        """
        while self._line(self._until_ready) != _READY:
            pass  # what a login shell prints

    def ask(self, do: str, timeout_s: float = 30.0, **details: Any) -> dict[str, Any]:
        """Ask a question of the helper's module.

        Raises:
            Unanswered: none came, or it was an error.
        """
        with contextlib.suppress(BrokenPipeError):  # then no answer comes, and its last words say why
            self._questions.write(json.dumps({"do": do, **details}).encode() + b"\n")
            self._questions.flush()
        until = time.monotonic() + timeout_s
        answer = None
        while not isinstance(answer, dict):
            with contextlib.suppress(ValueError):  # what the starter says beside it
                answer = json.loads(self._line(until))
        if answer.keys() == {"error"}:
            raise Unanswered(f"its helper failed: {answer['error']}", "please report this")
        return answer

    def close(self) -> None:
        """End the helper, and wait for the program that started it."""
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
        try:
            self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            # With all that a starter's script has started: what holds the pipes' other ends would be waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.close()
        self._errors.close()

    def _line(self, until: float) -> str:
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self._answers)
        began = time.monotonic()
        while b"\n" not in self._buffer:
            readable = poll.poll(1000 * max(0.0, until - time.monotonic()))
            more = os.read(self._answers.fileno(), 1 << 16) if readable else b""
            if not more:
                raise self._why(0.0 if readable else time.monotonic() - began)
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace").strip()

    def _why(self, waited_s: float) -> Unanswered:
        """Explain a missing answer.

        Args:
            waited_s: how long the helper kept this process waiting; 0 if it has ended instead.
        """
        if not waited_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_S)
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        words = " / ".join(lines[-3:])
        said = f"its helper did not answer in {waited_s:.0f} s" if waited_s else "its helper ended"
        remedy = next((hint for sign, hint in _HINTS if sign in words), "run the same command by hand: {command}")
        return Unanswered(
            f"{said}: {words}" if words else said, remedy.format(host=self.host, command=shlex.join(self._command))
        )


def serve(answers: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
    """Be a helper: answer questions on standard input until that ends.

    Args:
        answers: what makes an answer, by the name of the question.
    """
    # Whatever a library prints must not be taken for an answer.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(_READY, file=output, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer: Mapping[str, Any]
        try:
            answer = answers[question.pop("do")](**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        try:
            print(json.dumps(answer), file=output, flush=True)
        except BrokenPipeError:  # who has asked is gone
            os.dup2(2, output.fileno())  # for what the interpreter writes when it ends
            return
