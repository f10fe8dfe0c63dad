"""The hosts of the fault tests are what they are said to be: apart from each other, and gone afterwards."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kit.hosts import Hosts, needs_hosts
from kit.patience import wait_until
from kit.proxy import Proxy
from support import program_path

pytestmark = needs_hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with Hosts(2, tmp_path_factory.mktemp("hosts")) as found:
        yield found


def program(name, *args):
    return [sys.executable, str(program_path(name)), *map(str, args)]


def reaches(host, name):
    """Whether somebody answers, if only that nobody listens."""
    return host.run(program("knocks_at_a_host", name)).stdout == "refused\n"


def test_a_simulated_host_has_its_own_name_processes_and_memory(hosts):
    """Name, processes, /tmp, /dev/shm and boot are each host's own; localhost works, and names lead to the other hosts."""
    boots = set()
    for host, other in (hosts, reversed(list(hosts))):
        assert host.run(["hostname"]).stdout.strip() == host.name
        assert len(host.run(["ps", "ax", "-o", "pid="]).stdout.split()) <= 3
        host.run(["sh", "-c", f"echo {host.name} | tee /tmp/mine /dev/shm/mine"])
        assert host.run(["cat", "/tmp/mine", "/dev/shm/mine"]).stdout.split() == [host.name] * 2
        boots.add(host.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout)
        look = "import socket; print(*(socket.gethostbyname(n) for n in ('localhost', %r, %r)))"
        found = host.run([sys.executable, "-c", look % (host.name, other.name)]).stdout.split()
        assert found == ["127.0.0.1", host.address, other.address]
    assert len(boots) == 2
    assert not os.path.exists("/tmp/mine")
    assert "10.77." not in subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def listening(host):
    """Something on port 5000 that sends everything back."""
    process = host.start(program("sends_everything_back"), stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        host.end_processes()
        process.wait(timeout=10)
        process.stdout.close()


def test_an_unplugged_host_is_silent_until_it_is_plugged_in(hosts):
    """What is sent to it gets lost and no connection ends; afterwards the same connection goes on."""
    talk = program("talks_twice", hosts[1].address)
    with listening(hosts[1]):
        process = hosts[0].start(talk, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"connected hello \n"
        hosts[1].unplug()
        process.stdin.write(b"while away\n")
        process.stdin.flush()
        assert not reaches(hosts[0], hosts[1].name)
        assert process.poll() is None
        hosts[1].plug()
        assert process.stdout.readline() == b"again while away\n"
        process.communicate(b"end\n", timeout=10)


def test_a_killed_host_comes_back_under_its_name(hosts):
    """All its processes end at once, also those it started aside; then it is there again, empty, at the same address."""
    host = hosts[1]
    process = host.start(["sh", "-c", "setsid sleep 1000 & echo > /tmp/mine; exec sleep 1000"])
    wait_until(lambda: len(host.pids()) == 2)
    boot = host.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout
    pids = host.pids()
    host.restart()
    assert process.wait(timeout=5) == -signal.SIGKILL
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert host.run(["cat", "/tmp/mine"], check=False).returncode != 0
    assert host.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout == boot
    assert reaches(hosts[0], host.name)
    host.restart(rebooted=True)
    assert host.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout != boot


def test_what_runs_on_a_host_can_be_stopped(tmp_path):
    """A signal reaches every process on it, and not what serves its folders; a stopped host can be killed as well."""
    with Hosts(1, tmp_path) as hosts:
        folder, (host,) = hosts.share("bindfs"), hosts
        process = host.start(["sh", "-c", "while :; do echo >> shared/count; done"])
        lines = folder.behind / "count"
        wait_until(lambda: lines.exists() and lines.stat().st_size > 10)
        host.signal(signal.SIGSTOP)
        wait_until(lambda: {Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in host.pids()} == {"T"})
        assert host.run(["ls", "shared"]).stdout == "count\n"
        size = lines.stat().st_size
        host.signal(signal.SIGCONT)
        wait_until(lambda: lines.stat().st_size > size)
        host.signal(signal.SIGSTOP)
        host.kill()
        assert process.returncode == -signal.SIGKILL


def tell(path):
    path.write_text(f"{socket.gethostname()} {os.getpid() < 100} {os.environ['GLOO_SOCKET_IFNAME']} {os.getcwd()}")


def fall():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_function_runs_on_a_host(hosts):
    """In all its namespaces and in the folder of the test, and how it ended is told."""
    process = hosts[1].fork(tell, hosts.work / "told")
    process.join(timeout=60)
    assert process.exitcode == 0
    assert (hosts.work / "told").read_text() == f"node1 True eth0 {hosts.work}"
    process = hosts[0].fork(fall)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL


def test_nothing_stays_when_a_test_run_is_killed(tmp_path):
    """SIGKILL to the process that made the hosts: their processes, file systems and networks go by themselves."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        program("makes_a_host", tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    pids = process.stdout.readline().split()
    assert len(pids) == 2
    namespaces = [os.readlink(f"/proc/{int(pid)}/ns/pid") for pid in pids]
    process.kill()
    process.wait(timeout=10)

    def alive():
        found = set()
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{entry}/ns/pid"))
        return found & set(namespaces)

    wait_until(lambda: not alive(), 10, "the end of the hosts")
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("kind", ["ext4", "bindfs", "faulty", "glusterfs", "btrfs", "xfs"])
def test_a_shared_folder_is_the_same_on_all_hosts(tmp_path, kind):
    """What one host writes the other reads, and so do we; also after a restart. Two names change places where they can."""
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share(kind)
        hosts[0].run(["sh", "-c", "echo one > shared/file && mkdir shared/exchange"])
        assert hosts[1].run(["cat", folder.path / "file"]).stdout == "one\n"
        assert (folder.behind / "file").read_text() == "one\n"
        hosts[1].restart()
        assert hosts[1].run(["cat", folder.path / "file"]).stdout == "one\n"
        exchanged = hosts[0].run(program("exchanges_two_names", folder.path / "exchange")).stdout.strip()
        assert exchanged == ("Invalid argument a" if kind in {"bindfs", "faulty", "glusterfs"} else "0 b")


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_copies_on_a_reflink_folder_share_their_blocks(tmp_path, kind):
    """A reflink works there."""
    with Hosts(1, tmp_path) as hosts:
        hosts.share(kind)
        hosts[0].run(["sh", "-c", "head -c 100000 /dev/urandom > shared/a && cp --reflink=always shared/a shared/b"])


def test_a_faulty_folder_does_what_it_is_told(tmp_path):
    """Every fault comes on the host it is for, only while it is switched on, and is counted."""
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share("faulty")
        first, second = hosts

        def said(host):
            return host.run(program("tries_calls_of_disks", folder.path)).stdout.strip()

        assert said(first) == "4096 True None None"
        folder.refuse(direct=True, statfs=True, links=True, fallocate=True, on=first)
        assert said(first) == "EINVAL False EPERM ENOTSUP"
        assert said(second) == "4096 True None None"
        assert folder.hits(first) > 3
        assert folder.hits(second) == 0
        folder.heal()
        folder.lose("inner", on=first)
        assert first.run(["ls", "shared/d"]).stdout == ""
        assert first.run(["ls", "shared/d/inner"], check=False).returncode != 0
        assert second.run(["ls", "shared/d"]).stdout == "inner\n"
        folder.heal()
        folder.coarsen(2)
        folder.behind.joinpath("f").write_text("x")
        assert float(first.run(["stat", "-c", "%.9Y", "shared/f"]).stdout) % 2 == 0
        folder.heal()
        folder.fail(0.3)
        assert "Input/output error" in first.run(["ls", "shared/d"], check=False).stderr
        wait_until(lambda: first.run(["ls", "shared/d"], check=False).stdout == "inner\n", 5)
        folder.fail()
        assert second.run(["touch", "shared/new"], check=False).returncode != 0
        folder.heal()
        second.run(["touch", "shared/new"])


def test_a_faulty_folder_shows_old_news(tmp_path):
    """With caches of 20 s a host goes on seeing no file where another has made one."""
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share("faulty", cache_s=20)
        assert hosts[0].run(["stat", "shared/late"], check=False).returncode != 0
        hosts[1].run(["touch", "shared/late"])
        assert (folder.behind / "late").exists()
        assert hosts[0].run(["stat", "shared/late"], check=False).returncode != 0


def test_the_proxy_delays_holds_back_and_cuts(hosts):
    """What goes through it arrives whole and in order: late, after a resume, or ends with a reset."""
    with listening(hosts[1]), Proxy((hosts[1].address, 5000), host=hosts[0]) as proxy:
        talk = program("times_what_comes_back", proxy.port)
        process = hosts[0].start(talk, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def ask(line):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

        def answer():
            return process.stdout.readline().split()

        assert answer() == ["hello"]
        ask("soon")
        assert answer()[0] == "True"
        proxy.delay_s = 0.2
        ask("later")
        whole, seconds = answer()
        assert whole == "True"
        assert float(seconds) > 0.39  # both ways
        proxy.delay_s = 0.0
        (connection,) = proxy.connections
        connection.stall()
        threading.Timer(0.3, connection.resume).start()
        ask("held back")
        whole, seconds = answer()
        assert whole == "True"
        assert float(seconds) > 0.27
        proxy.stall()
        ask("cut")
        proxy.cut()
        assert answer() == ["ConnectionResetError"]
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=10)
