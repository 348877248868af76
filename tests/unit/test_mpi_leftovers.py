"""Shared memory that an MPI library has left: what nobody uses is removed, and nothing else."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.strangers import NOBODY, needs_another_user

from phalanx.system.files import remove_unused_mpi_files


@pytest.fixture
def make() -> Iterator[Callable[..., Path]]:
    made = []

    def file(name: str = "mpich_shm_") -> Path:
        made.append(Path(f"/dev/shm/{name}{secrets.token_hex(4)}"))
        made[-1].write_bytes(bytes(4096))
        return made[-1]

    yield file
    for path in made:
        path.unlink(missing_ok=True)


def test_unused_files_are_removed(make: Callable[..., Path]) -> None:
    files = [make(), make("sm_segment.h1.0."), make("Intel_MPI_")]
    remove_unused_mpi_files()
    assert not any(map(Path.exists, files))


def test_file_of_another_process_or_name_is_left(make: Callable[..., Path]) -> None:
    used, other = make(), make("data_of_mine_")
    with open(used, "rb+") as opened, mmap.mmap(opened.fileno(), 4096):
        opened.close()  # it is mapped still
        remove_unused_mpi_files()
        assert used.exists()
    remove_unused_mpi_files()
    assert not used.exists()
    assert other.exists()


@needs_another_user
def test_file_of_another_user_is_left(make: Callable[..., Path]) -> None:
    file = make()
    os.chown(file, NOBODY, NOBODY)
    remove_unused_mpi_files()
    assert file.exists()
