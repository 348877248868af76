"""``phalanx run`` in a job of LSF: ranks run on its hosts, and no host is named.

LSF itself cannot be had here. A stand-in for its ``blaunch`` behaves as IBM's reference describes the real one: it
works only in a job, and only for hosts of that job; the command goes through a shell, as with rsh; standard input is
passed on; and it ends as the command does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, launching

__all__ = ["hosts"]  # fixture

pytestmark = [pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts"), pytest.mark.long]

BLAUNCH = """\
#!/bin/sh
[ -n "$LSB_JOBID" ] || {{ echo "blaunch: not in a job" >&2; exit 255; }}
host=$1; shift
case " $LSB_MCPU_HOSTS " in
  *" $host "*) exec {starter} "$host" LSB_JOBID="$LSB_JOBID" LSB_MCPU_HOSTS="$LSB_MCPU_HOSTS" sh -c "$*" ;;
  *) echo "blaunch: $host is not a host of this job" >&2; exit 255 ;;
esac
"""


@pytest.fixture
def remote(hosts: TestHosts, tmp_path: Path) -> Iterator[RemoteLauncher]:
    launcher = RemoteLauncher(hosts, tmp_path)
    blaunch = tmp_path / "bin" / "blaunch"
    blaunch.parent.mkdir()
    blaunch.write_text(BLAUNCH.format(starter=launcher.starter[0].partition("=")[2]))
    blaunch.chmod(0o755)
    launcher.starter = []
    with launching(launcher):
        yield launcher


def job_of(remote: RemoteLauncher, hosts: str) -> dict[str, str]:
    path = f"{remote.folder}/bin:{os.environ['PATH']}:/usr/sbin:/sbin"
    return {"PATH": path, "LSB_JOBID": "9", "LSB_MCPU_HOSTS": hosts}


def test_ranks_run_on_the_hosts_of_the_job(remote: RemoteLauncher) -> None:
    script = remote.script("""
        import os, socket, sys
        print(os.environ["RANK"], socket.gethostname(), os.getcwd(), sys.argv[1:])
    """)
    job = remote.run("--no-preload", script, "a b", environment=job_of(remote, "h0 1 h1 2"))
    assert job.process.returncode == 0, job.said()
    where = f"{remote.folder} ['a b']"
    assert sorted(job.out.splitlines()) == [
        f"[rank 0] 0 h0 {where}",
        f"[rank 1] 1 h1 {where}",
        f"[rank 2] 2 h1 {where}",
    ], job.said()
    assert "note: ranks run on 2 hosts of LSF's job 9" in job.err


def test_a_host_that_is_not_of_the_job(remote: RemoteLauncher) -> None:
    # As with a list that a script has changed.
    words = ("--starter", "blaunch", "-H", "h0,h1")
    job = remote.run("--no-preload", "-q", *words, remote.script(""), environment=job_of(remote, "h0 1"))
    assert job.process.returncode == 1
    assert "phalanx: h1: blaunch ended with exit code 255 before the host had joined: blaunch: h1 is not a" in job.err


def test_the_doctor_looks_at_the_hosts_of_the_job(remote: RemoteLauncher) -> None:
    doctor = [*remote.hosts.outside(), sys.executable, "-m", "phalanx", "doctor", "--json", "--no-rates"]
    own = {**os.environ, **job_of(remote, "h0 1 h1 2")}
    done = subprocess.run(doctor, env=own, cwd=remote.folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 3), done
    said = json.loads(done.stdout)
    assert {"h0", "h1"} <= {one["host"] for one in said["findings"]}
    assert {(pair["from"], pair["to"]) for pair in said["pairs"]} == {("h0", "h1"), ("h1", "h0")}
