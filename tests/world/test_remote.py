"""``phalanx run -H h0:2,h1:2``: ranks on other hosts behave as ranks of this one, and what differs is said first."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from tests.launch_support import ask_until, time_for_stacks
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, impatient, remote

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PLAIN = ("--no-preload", "-q")  # nothing imports torch that the script does not import


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


JOIN = """
    import socket, sys, torch, phalanx
    world = phalanx.init()
    total = torch.tensor([1.0 + world.rank])
    world.all_reduce(total)
    print(world.rank, world.local_rank, world.node_rank, socket.gethostname(), total.item(), sys.argv[1:])
"""


def test_ranks_of_two_hosts_join_each_other(remote: RemoteLauncher) -> None:
    job = remote.run("-H", "h1:2,h0:1", "--no-prefix", remote.script(JOIN), "a", "b c")
    assert job.process.returncode == 0, job.said()
    # Ranks follow the order of the hosts, as they were written.
    assert lines(job.out) == [
        "0 0 0 h1 6.0 ['a', 'b c']",
        "1 1 0 h1 6.0 ['a', 'b c']",
        "2 0 1 h0 6.0 ['a', 'b c']",
    ], job.said()
    table = [line.split()[:4] for line in job.err.splitlines()[1:5]]
    assert table == [
        ["rank", "node", "host", "local"], ["0", "0", "h1", "0"], ["1", "0", "h1", "1"], ["2", "1", "h0", "0"],
    ]  # fmt: skip


WAITING = """
    import signal, sys, time
    signal.signal(signal.SIGUSR1, lambda *_: print("asked", flush=True))
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_ctrl_c_or_a_lost_host_ends_the_ranks_of_all_hosts(remote: RemoteLauncher, hosts: TestHosts) -> None:
    """Whether its network went or its agent, and although another host still imports torch."""
    script = remote.script(WAITING)
    environment = time_for_stacks(remote.folder / "patient")
    job = remote.start("--no-preload", "-H", "h0:2,h1:2", script, environment=environment)
    job.wait_for_lines(4, "ready")
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for_lines(4, "asked")
    ask_until(job.process, lambda: job.err, r"ranks 0-3 are at\n")  # those of both hosts, at once
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130
    assert "phalanx: SIGINT: all 4 ranks have been ended; they were at:\n  ranks 0-3: script.py:" in job.err, job.said()
    job = remote.start(*PLAIN, "-H", "h0,h1:2", script, environment=impatient(remote.folder / "site"))
    job.wait_for_lines(3, "ready")
    hosts.cut(1)
    assert job.finish() == 1
    assert "phalanx: rank 1 of 3 failed: host h1 is lost" in job.err, job.said()
    assert "rank 2 then failed with the same error" in job.err, job.said()
    assert "rank 0 ended by the launcher" in job.err
    remote.check(within_s=20.0)  # the host itself was not told by anybody
    hosts.mend(1)
    slow = remote.folder / "slow.py"
    slow.write_text("import time; time.sleep(600)")
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr,misc]
    with hosts.mounted(0, slow, f"{torch}/__init__.py"):
        job = remote.start("-q", "-H", "h0:2,h1", script)
        remote.wait_for_process(1, "rank-2")
        os.kill(remote.wait_for_process(1, "phalanx-agent"), signal.SIGKILL)
        assert job.finish() == 1
        remote.check()
    assert "phalanx: rank 2 of 3 failed: host h1 is lost" in job.err, job.said()
    assert "ranks 0-1 ended by the launcher" in job.err, job.said()


@pytest.mark.long
def test_hosts_that_differ_are_refused_and_reach_it_by_an_address(
    remote: RemoteLauncher, hosts: TestHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a host lacks is said before anything runs. Hosts take the first of the launcher's addresses that answers."""
    script, other = remote.script("print('ran')"), remote.folder / "other.py"
    other.write_text("print('ran as well')")
    with hosts.mounted(1, other, script):  # on one host another file lies where the script is
        differs = remote.run("-q", "-H", "h0,h1", script)
    with hosts.mounted(0, tmp_path_factory.mktemp("empty"), str(remote.folder)):
        missing = remote.run("-q", "-H", "h0,h1", script)
    remedy = "copy it to all hosts, or use a directory that they share"
    assert differs.err == f"phalanx: {script} is not the same file on h0; other than on h1; {remedy}\n"
    assert missing.err == f"phalanx: {script}: there is no such file on h0\n"
    for arguments, said in (
        (["-H", "h0,h9"], "ended with exit code 1 before the host had joined: no host h9"),
        (["-H", "h0,h1", "--interface", "ib7"], "has no interface of that name"),
        (["-H", "h0,h1", "--debug", "0"], "which ranks on other hosts do not have"),
    ):
        job = remote.run(*PLAIN, *arguments, script)
        assert job.process.returncode in (1, 2)
        assert said in job.err, job.said()
        assert len(job.err.splitlines()) == len(set(job.err.splitlines())) <= 2  # a line for each host to blame
        assert job.out == ""
    assert (differs.process.returncode, differs.out, missing.process.returncode, missing.out) == (1, "", 1, "")
    hosts.add_login_address("192.168.99.1/32")
    # The name of the login node means another network, and only ssh's configuration knows those of the hosts.
    remote.files["/etc/hosts"] = remote.folder / "names"
    remote.files["/etc/hosts"].write_text("127.0.0.1 localhost\n192.168.99.1 login\n")
    show = ("sh", "-c", "echo $MASTER_ADDR")
    job = remote.run("-q", "-H", "localhost,h0,h1", *show)
    assert job.process.returncode == 0, job.said()
    login = hosts.address(253)
    assert lines(job.out) == ["[rank 0] 192.168.99.1", f"[rank 1] {login}", f"[rank 2] {login}"]
    job = remote.run("-q", "-H", "h0", "--address", "192.168.99.1", *show)
    assert "it could not reach phalanx run at 192.168.99.1:" in job.err, job.said()
    hosts.add_login_address(f"{(own := hosts.address6(253))}/64", "sw")
    job = remote.run("-q", "-H", "h0,h1", "--address", f"[{own}]", *show)
    assert lines(job.out) == [f"[rank 0] {own}", f"[rank 1] {own}"], job.said()


def test_ranks_of_other_hosts_behave_and_fail_as_those_of_this_one(remote: RemoteLauncher) -> None:
    """Their variables, input, output, attempts, failures and files."""
    script = remote.script("""
        import os, sys
        print(os.getcwd(), *map(os.environ.get, ("OWN", "SSH_CLIENT", "TMPDIR")), sys.flags.hash_randomization)
        print(sys.stdin.read().upper(), end="", file=sys.stderr)
    """)
    environment = {"OWN": "two\nlines", "SSH_CLIENT": "10.0.0.1", "TMPDIR": str(remote.folder), "PYTHONHASHSEED": "0"}
    job = remote.run(
        *PLAIN, "--no-prefix", "-x", "TMPDIR", "-hosts", "h0,h1", "-ppn", "1", script, stdin=b"some\ninput\n",
        environment=environment,
    )  # fmt: skip
    assert job.process.returncode == 0, job.said()
    said = f"{remote.folder} two\nlines None {remote.folder} 0"
    assert lines(job.out) == lines(f"{said}\n{said}\n")
    assert job.err == "SOME\nINPUT\n"  # of rank 0; the input of the other one is empty
    # A rank reads what is typed only as fast as it wants; its exit code is the job's.
    much = remote.script("""
        import os, sys
        for number in range(30000):
            print(f"{number:06} {'x' * 60}")
        print(len(sys.stdin.buffer.read()))
        sys.exit(7 * (os.environ['RANK'] == '1'))
    """)
    data = os.urandom(1 << 22)
    job = remote.run(*PLAIN, "--stdin", "1", "-H", "h0,h1", much, stdin=data)
    assert job.process.returncode == 7
    own = [line.split()[2] for line in job.out.splitlines() if line.startswith("[rank 1]")]
    assert own == [*(f"{number:06}" for number in range(30000)), str(len(data))]
    # A program that is not Python, which fails once: every attempt starts the ranks as the first one did.
    program = """
        echo "$PHALANX_ATTEMPT $(hostname) $RANK of $WORLD_SIZE: $0 $1"
        touch "here-$RANK"
        [ $PHALANX_ATTEMPT = 1 ] && exit
        while [ $(ls here-* | wc -l) -lt 3 ]; do sleep 0.01; done
        exit 3
    """
    options = ("-H", "h0,h1:2", "--no-prefix", "--restarts", "1")
    job = remote.run(*options, "sh", "-c", program, "a", "b c")
    assert job.process.returncode == 0, job.said()
    words = ("h0 0 of 3: a b c", "h1 1 of 3: a b c", "h1 2 of 3: a b c")
    assert lines(job.out) == [f"{attempt} {text}" for attempt in (0, 1) for text in words]
    script = remote.script("""
        import os, pathlib, socket, time
        print(socket.gethostname(), os.environ["RANK"], flush=True)
        here = pathlib.Path(__file__).parent
        (here / ("printed-" + os.environ["RANK"])).touch()
        if os.environ["RANK"] == "2":
            while len(list(here.glob("printed-*"))) < 3:  # a rank that has printed nothing is ended with this one
                time.sleep(0.01)
            raise ValueError("two")
        time.sleep(600)
    """)
    logs = remote.folder / "logs"
    job = remote.run(*PLAIN, "-H", "h0:2,h1:1", "--log-dir", str(logs), "--only", "1", script)
    assert job.process.returncode == 1, job.said()
    assert job.err.startswith("phalanx: rank 2 of 3 failed: ValueError: two\n  host h1, pid "), job.said()
    assert f'  File "{script}", line 8, in <module>\n' in job.err
    assert "phalanx/launch" not in job.err
    assert "  ranks 0-1 ended by the launcher\n" in job.err
    assert lines(job.out) == ["[rank 1] h0 1"], job.said()
    assert f"its output is in {logs}/rank-2.log" in job.err, job.said()
    assert "    h1 2\n" in job.err, job.said()
    for rank, host in enumerate(("h0", "h0", "h1")):
        text = (logs / f"rank-{rank}.log").read_text()
        assert f" stdout {host} {rank}\n" in text
        assert f" phalanx started on host {host}, pid " in text
    assert " phalanx ValueError: two\n" in text


# As the real one: what it has started goes on when it is killed itself.
KUBECTL = """\
#!/bin/sh
[ "$1 $2 $4" = "exec -i --" ] || {{ echo "kubectl: $*" >&2; exit 1; }}
pod=$3; shift 4
exec 3<&0
setsid {starter} "$pod" "$@" <&3 3<&- &
wait $!
"""


@pytest.mark.long
def test_the_starter_of_pods_leaves_nothing_when_the_launcher_is_killed(remote: RemoteLauncher) -> None:
    kubectl = remote.folder / "kubectl"
    kubectl.write_text(KUBECTL.format(starter=remote.starter[0].partition("=")[2]))
    kubectl.chmod(0o755)
    remote.starter = ["--starter", "kubectl"]
    script = remote.script("""
        import os, sys, time
        print(os.uname().nodename, os.environ["RANK"], sys.argv[1], flush=True)
        time.sleep(600)
    """)
    path = {"PATH": f"{remote.folder}:{os.environ['PATH']}:/usr/sbin:/sbin"}
    job = remote.start(*PLAIN, "-H", "h0:1,h1:2", script, "a 'b'", environment=path)
    job.wait_for_lines(3, "a 'b'")
    assert lines(job.out) == ["[rank 0] h0 0 a 'b'", "[rank 1] h1 1 a 'b'", "[rank 2] h1 2 a 'b'"], job.said()
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.finish() == -signal.SIGKILL


# IBM's reference of the real one: it works only in a job, and only for hosts of that job; the command goes through a
# shell, as with rsh; standard input is passed on; and it ends as the command does.
BLAUNCH = """\
#!/bin/sh
[ -n "$LSB_JOBID" ] || {{ echo "blaunch: not in a job" >&2; exit 255; }}
host=$1; shift
case " $LSB_MCPU_HOSTS " in
  *" $host "*) exec {starter} "$host" LSB_JOBID="$LSB_JOBID" LSB_MCPU_HOSTS="$LSB_MCPU_HOSTS" sh -c "$*" ;;
  *) echo "blaunch: $host is not a host of this job" >&2; exit 255 ;;
esac
"""


@pytest.mark.long
def test_ranks_run_on_the_hosts_of_a_job_of_lsf(remote: RemoteLauncher) -> None:
    """LSF itself cannot be had here; a stand-in for its ``blaunch`` does what the real one is said to do."""
    blaunch = remote.folder / "bin" / "blaunch"
    blaunch.parent.mkdir()
    blaunch.write_text(BLAUNCH.format(starter=remote.starter[0].partition("=")[2]))
    blaunch.chmod(0o755)
    remote.starter = []
    lsf = {"PATH": f"{blaunch.parent}:{os.environ['PATH']}:/usr/sbin:/sbin", "LSB_JOBID": "9"}
    show = ("sh", "-c", 'echo $RANK $(hostname) $(pwd) "$0"', "a  b")
    job = remote.run(*show, environment={**lsf, "LSB_MCPU_HOSTS": "h0 1 h1 2"})
    assert job.process.returncode == 0, job.said()
    places = ("0 h0", "1 h1", "2 h1")
    assert lines(job.out) == [f"[rank {place[0]}] {place} {remote.folder} a  b" for place in places], job.said()
    assert "note: ranks run on 2 hosts of LSF's job 9" in job.err
    job = remote.run("--starter", "blaunch", "-H", "h0,h1", *show, environment={**lsf, "LSB_MCPU_HOSTS": "h0 1"})
    assert job.process.returncode == 1
    assert "phalanx: h1: blaunch ended with exit code 255 before the host had joined: blaunch: h1 is not a" in job.err
