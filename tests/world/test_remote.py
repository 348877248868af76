"""``phalanx run -H h0:2,h1:2``: ranks on other hosts behave as ranks of this one, and what differs is said first."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest
from tests.launch_support import ask_until, time_for_stacks
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PLAIN = ("--no-preload", "-q")  # nothing imports torch that the script does not import


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_ranks_of_two_hosts_join_each_other(remote: RemoteLauncher) -> None:
    script = remote.script("""
        import socket, sys, torch, phalanx
        world = phalanx.init()
        total = torch.tensor([1.0 + world.rank])
        world.all_reduce(total)
        print(world.rank, world.local_rank, world.node_rank, socket.gethostname(), total.item(), sys.argv[1:])
    """)
    job = remote.run("-H", "h1:2,h0:1", script, "a", "b c")
    assert job.process.returncode == 0, job.said()
    # Ranks follow the order of the hosts, as they were written.
    assert lines(job.out) == [
        "[rank 0] 0 0 0 h1 6.0 ['a', 'b c']",
        "[rank 1] 1 1 0 h1 6.0 ['a', 'b c']",
        "[rank 2] 2 0 1 h0 6.0 ['a', 'b c']",
    ], job.said()
    table = [line.split()[:4] for line in job.err.splitlines()[1:5]]
    assert table == [
        ["rank", "node", "host", "local"],
        ["0", "0", "h1", "0"],
        ["1", "0", "h1", "1"],
        ["2", "1", "h0", "0"],
    ]


def test_hosts_take_the_first_address_of_the_launcher_that_answers(remote: RemoteLauncher, hosts: TestHosts) -> None:
    hosts.add_login_address("192.168.99.1/32")
    # The name of the login node means another network, and only ssh's configuration knows those of the hosts.
    remote.files["/etc/hosts"] = remote.folder / "names"
    remote.files["/etc/hosts"].write_text("127.0.0.1 localhost\n192.168.99.1 login\n")
    script = remote.script("""
        import os, torch, phalanx
        world = phalanx.init()
        total = torch.tensor([1.0])
        world.all_reduce(total)
        print(os.environ["MASTER_ADDR"], total.item())
    """)
    job = remote.run("-q", "-H", "localhost,h0,h1", script)
    assert job.process.returncode == 0, job.said()
    login = hosts.address(253)
    assert lines(job.out) == ["[rank 0] 192.168.99.1 3.0", f"[rank 1] {login} 3.0", f"[rank 2] {login} 3.0"]
    job = remote.run("-q", "-H", "h0", "--address", "192.168.99.1", script)
    assert "it could not reach phalanx run at 192.168.99.1:" in job.err, job.said()
    hosts.add_login_address(f"{(own := hosts.address6(253))}/64", "sw")
    job = remote.run("-q", "-H", "h0,h1", "--address", own, script)
    assert lines(job.out) == [f"[rank 0] {own} 2.0", f"[rank 1] {own} 2.0"], job.said()


def test_what_the_user_set_reaches_the_ranks(remote: RemoteLauncher) -> None:
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


def test_a_rank_of_another_host_that_fails_is_shown_as_one_of_this_host(remote: RemoteLauncher) -> None:
    script = remote.script("""
        import os, time
        print("begins")
        if os.environ["RANK"] == "1":
            raise ValueError("of the other host")
        time.sleep(600)
    """)
    job = remote.run(*PLAIN, "-H", "h0,h1", script)
    assert job.process.returncode == 1
    assert job.err.startswith("phalanx: rank 1 of 2 failed: ValueError: of the other host\n  host h1, pid "), job.said()
    assert f'  File "{script}", line 4, in <module>\n' in job.err
    assert "phalanx/launch" not in job.err
    assert "  rank 0 ended by the launcher\n" in job.err
    assert lines(job.out) == ["[rank 0] begins", "[rank 1] begins"]


def test_exit_code_is_that_of_the_rank(remote: RemoteLauncher) -> None:
    script = remote.script("import os, sys\nif os.environ['RANK'] == '1': sys.exit(7)\n")
    assert remote.run(*PLAIN, "-H", "h0,h1", script).process.returncode == 7


def test_programs_that_are_not_python(remote: RemoteLauncher) -> None:
    job = remote.run("-q", "-H", "h0,h1:2", "sh", "-c", 'echo "$(hostname) $RANK of $WORLD_SIZE: $0 $1"', "a", "b c")
    assert lines(job.out) == ["[rank 0] h0 0 of 3: a b c", "[rank 1] h1 1 of 3: a b c", "[rank 2] h1 2 of 3: a b c"]


def test_much_output_and_input_arrive_whole_and_in_order(remote: RemoteLauncher) -> None:
    """A rank reads what is typed only as fast as it wants."""
    script = remote.script("""
        import sys
        for number in range(60000):
            print(f"{number:06} {'x' * 60}")
        print(len(sys.stdin.buffer.read()))
    """)
    data = os.urandom(1 << 22)
    job = remote.run(*PLAIN, "--stdin", "1", "-H", "h0,h1", script, stdin=data)
    for rank in range(2):
        own = [line.split()[2] for line in job.out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert own == [*(f"{number:06}" for number in range(60000)), str(len(data) * rank)]


WAITING = """
    import signal, sys, time
    signal.signal(signal.SIGUSR1, lambda *_: print("asked", flush=True))
    print("ready", flush=True)
    time.sleep(600)
"""


def test_ctrl_c_ends_the_ranks_of_all_hosts_and_says_where_they_were(remote: RemoteLauncher) -> None:
    environment = time_for_stacks(remote.folder / "site")
    job = remote.start("--no-preload", "-H", "h0:2,h1:2", remote.script(WAITING), environment=environment)
    job.wait_for_lines(4, "ready")
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for_lines(4, "asked")
    ask_until(job.process, lambda: job.err, r"ranks 0-3 are at\n")  # those of both hosts, at once
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130
    assert "phalanx: SIGINT: all 4 ranks have been ended; they were at:\n  ranks 0-3: script.py:" in job.err, job.said()


def test_a_host_that_loses_its_network_is_named_and_the_others_are_ended(
    remote: RemoteLauncher, hosts: TestHosts
) -> None:
    job = remote.start(*PLAIN, "-H", "h0,h1:2", remote.script(WAITING))
    job.wait_for_lines(3, "ready")
    hosts.cut(1)
    assert job.finish() == 1
    assert "phalanx: rank 1 of 3 failed: host h1 is lost" in job.err, job.said()
    assert "rank 2 then failed with the same error" in job.err, job.said()
    assert "rank 0 ended by the launcher" in job.err
    # The host itself was not told by anybody.
    remote.check(within_s=20.0)


def test_a_host_that_is_lost_does_not_wait_for_others_that_import(remote: RemoteLauncher, hosts: TestHosts) -> None:
    slow = remote.folder / "slow.py"
    slow.write_text("import time; time.sleep(600)")
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr,misc]
    hosts.start(0, ["mount", "--bind", str(slow), f"{torch}/__init__.py"], {}).wait()
    try:
        job = remote.start("-q", "-H", "h0:2,h1", remote.script(WAITING))
        remote.wait_for_process(1, "rank-2")
        os.kill(remote.wait_for_process(1, "phalanx-agent"), signal.SIGKILL)
        assert job.finish() == 1
        remote.check()
    finally:
        hosts.start(0, ["umount", f"{torch}/__init__.py"], {}).wait()
    assert "phalanx: rank 2 of 3 failed: host h1 is lost" in job.err, job.said()
    assert "ranks 0-1 ended by the launcher" in job.err, job.said()


def test_hosts_that_differ_are_refused_before_anything_runs(remote: RemoteLauncher, hosts: TestHosts) -> None:
    script = remote.script("print('ran')")
    # On one host another file lies where the script is.
    other = remote.folder / "other.py"
    other.write_text("print('ran as well')")
    hosts.start(1, ["mount", "--bind", str(other), script], {}).wait()
    try:
        job = remote.run("-q", "-H", "h0,h1", script)
    finally:
        hosts.start(1, ["umount", script], {}).wait()
    assert job.process.returncode == 1
    assert job.out == ""
    assert job.err == (
        f"phalanx: {script} is not the same file on h0; other than on h1; copy it to all hosts, or use a directory "
        f"that they share\n"
    )


def test_a_directory_and_a_script_that_are_missing_on_a_host(remote: RemoteLauncher, hosts: TestHosts) -> None:
    script = remote.script("print('ran')")
    empty = remote.folder.parent / f"{remote.folder.name}-empty"
    empty.mkdir()
    hosts.start(0, ["mount", "--bind", str(empty), str(remote.folder)], {}).wait()
    try:
        job = remote.run("-q", "-H", "h0,h1", script)
    finally:
        hosts.start(0, ["umount", str(remote.folder)], {}).wait()
    assert job.process.returncode == 1
    assert job.err == f"phalanx: {script}: there is no such file on h0\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-H", "h0,h9"], "ended with exit code 1 before the host had joined: no host h9"),
        (["-H", "h0,h1", "--interface", "ib7"], "has no interface of that name"),
        (["-H", "h0,h1", "--debug", "0"], "which ranks on other hosts do not have"),
    ],
)
def test_mistakes_cost_one_line(remote: RemoteLauncher, arguments: list[str], said: str) -> None:
    job = remote.run(*PLAIN, *arguments, remote.script("import os; print(os.environ['RANK'])"))
    assert job.process.returncode in (1, 2)
    assert said in job.err, job.said()
    assert len(job.err.splitlines()) == len(set(job.err.splitlines())) <= 2  # a line for each host that is to blame
    assert job.out == ""


def test_files_of_ranks_on_other_hosts_are_here(remote: RemoteLauncher) -> None:
    script = remote.script("""
        import os, pathlib, socket, time
        print(socket.gethostname(), os.environ["RANK"], flush=True)
        here = pathlib.Path(__file__).parent
        (here / ("printed-" + os.environ["RANK"])).touch()
        if os.environ["RANK"] == "2":
            while len(list(here.glob("printed-*"))) < 3:  # a rank that has printed nothing is ended with this one
                time.sleep(0.01)
            raise ValueError("two")
    """)
    logs = remote.folder / "logs"
    job = remote.run(*PLAIN, "-H", "h0:2,h1:1", "--log-dir", str(logs), "--only", "1", script)
    assert job.process.returncode == 1, job.said()
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


def test_the_recipe_for_pods(remote: RemoteLauncher) -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    (recipe,) = [
        block for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) if 'kubectl exec -i "' in block
    ]
    kubectl = KUBECTL.format(starter=remote.starter[0].partition("=")[2])
    for name, text in (("in-pod", recipe), ("kubectl", kubectl)):
        (remote.folder / name).write_text(text)
        (remote.folder / name).chmod(0o755)
    remote.starter = ["--starter", "./in-pod"]
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
