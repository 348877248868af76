"""The job's key: where it comes from, and which ones are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.errors import InitializationError
from phalanx.launch.job.job import make_job
from phalanx.launch.job.options import LaunchOptions
from phalanx.launch.job.target import Target
from phalanx.wire.key import job_key

SECRET = "0123456789abcdef"


def key_file(folder: Path, text: str = SECRET, mode: int = 0o600) -> dict[str, str]:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return {"PHALANX_KEY_FILE": str(path)}


def test_users_file_comes_before_the_launchers_key_and_that_before_none(tmp_path: Path) -> None:
    handed = {"PHALANX_KEY": "fedcba9876543210"}
    own = job_key({**handed, **key_file(tmp_path, f"  {SECRET}\n")})
    assert (own.secret, own.is_open) == (SECRET.encode(), False)
    assert own.source.startswith("PHALANX_KEY_FILE=")
    assert job_key(handed).secret == b"fedcba9876543210"
    assert job_key({}).is_open


def test_every_job_has_a_key_of_its_own_which_is_never_printed(tmp_path: Path) -> None:
    jobs = [make_job(LaunchOptions(ranks=2), Target("program", "true", "/bin/true", ("true",))) for _ in range(2)]
    keys = [{job.environment(rank, port=1)["PHALANX_KEY"] for rank in range(2)} for job in jobs]
    assert [len(same) for same in keys] == [1, 1]
    assert keys[0] != keys[1]
    assert all(len(job.key) == 64 and job.key not in repr(job) for job in jobs)
    assert SECRET not in repr(job_key(key_file(tmp_path)))


def test_file_that_others_can_read_or_write_or_own_is_refused(tmp_path: Path) -> None:
    for mode in (0o640, 0o604, 0o620):
        with pytest.raises(InitializationError, match=rf"other users \(mode {mode:04o}\).*chmod 600"):
            job_key(key_file(tmp_path, mode=mode))
    given = key_file(tmp_path)
    if os.geteuid() == 0:
        os.chown(given["PHALANX_KEY_FILE"], 4321, -1)
        with pytest.raises(InitializationError, match=r"belongs to another user \(id 4321\)"):
            job_key(given)


def test_key_that_can_be_guessed_or_is_not_there_is_refused(tmp_path: Path) -> None:
    for secret in ("short", "x" * 5000, ""):
        with pytest.raises(InitializationError, match="16 to 4096; make one with"):
            job_key(key_file(tmp_path, secret))
        if secret:
            with pytest.raises(InitializationError, match="PHALANX_KEY holds a key of"):
                job_key({"PHALANX_KEY": secret})
    for path, why in ((f"{tmp_path}/none", "No such file"), (str(tmp_path), "")):
        with pytest.raises(InitializationError, match=rf"PHALANX_KEY_FILE={path} cannot be read \({why}"):
            job_key({"PHALANX_KEY_FILE": path})
