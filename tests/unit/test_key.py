"""The job's key: where it comes from, and which ones are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.errors import InitializationError
from phalanx.launch.job.job import make_job
from phalanx.launch.job.target import Target
from phalanx.wire.key import job_key, new_key

SECRET = "0123456789abcdef"


def key_file(folder: Path, text: str = SECRET, mode: int = 0o600) -> dict[str, str]:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return {"PHALANX_KEY_FILE": str(path)}


def test_the_users_file_comes_before_the_launchers_key_and_that_before_none(tmp_path: Path) -> None:
    handed = {"PHALANX_KEY": "fedcba9876543210"}
    own = job_key({**handed, **key_file(tmp_path, f"  {SECRET}\n")})
    assert (own.secret, own.is_open) == (SECRET.encode(), False)
    assert own.source.startswith("PHALANX_KEY_FILE=")
    assert job_key(handed).secret == b"fedcba9876543210"
    assert job_key({}).is_open
    assert job_key({}).source == ""


def test_a_key_is_never_printed(tmp_path: Path) -> None:
    assert SECRET not in repr(job_key(key_file(tmp_path)))
    job = make_job(1, Target("program", "true", "/bin/true", ("true",)))
    assert len(job.key) == 64
    assert job.key not in repr(job)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InitializationError, match=rf"other users \(mode {mode:04o}\).*chmod 600"):
        job_key(key_file(tmp_path, mode=mode))


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    given = key_file(tmp_path)
    os.chown(given["PHALANX_KEY_FILE"], 4321, -1)
    with pytest.raises(InitializationError, match=r"belongs to another user \(id 4321\)"):
        job_key(given)


@pytest.mark.parametrize("secret", ["short", "x" * 5000, ""])
def test_a_key_that_can_be_guessed_or_is_no_key_is_refused(tmp_path: Path, secret: str) -> None:
    with pytest.raises(InitializationError, match="16 to 4096; make one with"):
        job_key(key_file(tmp_path, secret))
    if secret:
        with pytest.raises(InitializationError, match="PHALANX_KEY holds a key of"):
            job_key({"PHALANX_KEY": secret})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InitializationError, match=rf"PHALANX_KEY_FILE={tmp_path}/none cannot be read \(No such file"):
        job_key({"PHALANX_KEY_FILE": f"{tmp_path}/none"})
    with pytest.raises(InitializationError, match="cannot be read"):
        job_key({"PHALANX_KEY_FILE": str(tmp_path)})


def test_every_job_of_the_launcher_has_a_key_of_its_own() -> None:
    target = Target("program", "true", "/bin/true", ("true",))
    plans = [make_job(2, target) for _ in range(2)]
    keys = [{job.environment(rank, port=1)["PHALANX_KEY"] for rank in range(2)} for job in plans]
    assert keys[0] != keys[1]
    assert all(len(same) == 1 for same in keys)
    assert new_key() != new_key()
