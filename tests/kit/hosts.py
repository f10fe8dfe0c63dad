"""Several hosts on one machine: each with a network, processes, mounts, /tmp, /dev/shm, name and boot of its own.

    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share("bindfs")  # at the same path on all of them
        hosts[0].run([sys.executable, "train.py", str(folder.path)])
        hosts[1].unplug()

The hosts hang on a switch, which is one more of them (``hosts.hub``); the machine's own network and mounts show nothing of it.
Each lives as long as its first process, which ends when the other end of a pipe is closed that this process holds: what is left
of a test run that was killed takes itself away. The folder of the test is seen by all hosts under its own path; all else in
/tmp is their own.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from kit.kinds import starting
from kit.patience import wait_until

NETWORK = "10.77.0"
INTERFACE = "eth0"
_KINDS = ("ipc", "uts", "net", "pid", "mnt")
_UNSHARE = ["unshare", "--ipc", "--uts", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
_FURNITURE = "SAFE_CKPT_KIT_FURNITURE"
_PRELOAD = ["torch.distributed.tensor", "torch.distributed.checkpoint", "safe_ckpt.checkpointer"]
# Runs as the first process of a host. Its own tmpfs is filled before it hides what it hides.
_FIRST = """
set -e
hostname "$NAME"
ip link set lo up
mount -t tmpfs tmpfs /mnt
for KEPT in $KEPT_IN_TMP; do
  mkdir -p "/mnt/$KEPT"
  mount --bind "/tmp/$KEPT" "/mnt/$KEPT"
done
mount --move /mnt /tmp
mount -t tmpfs tmpfs /dev/shm
mount --bind "$WORK/hosts" /etc/hosts
mount --bind "$WORK/boot-$NAME" /proc/sys/kernel/random/boot_id
echo ready
while read -r _; do :; done
"""


@functools.lru_cache
def why_no_hosts():
    """Why there can be no hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("unshare", "nsenter", "setpriv", "ip", "mount", "bash") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse"
    trial = "ip link add veth0 type veth peer name veth1 && ip link add sw type bridge && mount -t tmpfs tmpfs /mnt"
    command = [*_UNSHARE, "sh", "-c", trial]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=f"hosts of their own: {why_no_hosts()}")


class Hosts:
    """So many hosts, ``node0`` at 10.77.0.1 and so on, gone when this is left. ``work`` is seen by all of them."""

    def __init__(self, count, work):
        self.work = Path(work).resolve()
        self.hub = Host(self, "hub", 254)
        self._hosts = [Host(self, f"node{number}", number + 1) for number in range(count)]
        self.folders = []

    def __enter__(self):
        starting("hosts")
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in (self.hub, *self._hosts))]
        (self.work / "hosts").write_text("\n".join(lines) + "\n")
        try:
            self.hub.boot()
            for host in self._hosts:
                host.boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        for host in (*self._hosts, self.hub):
            host.kill()

    def __getitem__(self, number):
        return self._hosts[number]

    def __iter__(self):
        return iter(self._hosts)

    def __len__(self):
        return len(self._hosts)

    def share(self, kind, **options):
        """A folder of this kind at the same path on all hosts; skips the test where it cannot be had, and says why."""
        from kit.folders import KINDS

        folder = KINDS[kind](self, **options)
        folder.serve()
        for host in self._hosts:
            folder.attach(host)
        self.folders.append(folder)
        return folder


class Host:
    """One host. Made by ``Hosts``.

    Attributes:
        name: what it calls itself.
        address: where the others reach it.
        interface: its network interface.
        pid: of its first process, as this process sees it; 0 while it is down.
    """

    interface = INTERFACE

    @property
    def work(self):
        """The folder of the test, which all hosts see."""
        return self._hosts.work

    def __init__(self, hosts, name, number):
        self.name, self.address = name, f"{NETWORK}.{number}"
        self.pid = 0
        self._hosts, self._number = hosts, number
        self._lives = 0
        self._first = None
        self._started = []

    def boot(self):
        """Bring it up, with nothing of an earlier life but its name, address and boot."""
        boot = self.work / f"boot-{self.name}"
        if not boot.exists():
            boot.write_text(f"{uuid.uuid4()}\n")
        self._lives += 1
        self._first = subprocess.Popen(
            [*_UNSHARE, "bash", "-c", _FIRST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "NAME": self.name, "WORK": str(self.work), "KEPT_IN_TMP": _kept_in_tmp(self.work)},
            start_new_session=True,
        )
        if self._first.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{self.name} does not start: {self._first.stderr.read().decode()}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        self.pid = int(children[0])
        self._join_network()
        for folder in self._hosts.folders:
            folder.attach(self)

    def run(self, command, *, timeout_s=60, check=True, **more):
        """Run a command on it to its end; raises when it fails, unless told not to. Returns what it printed as text."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._kill_session(process.pid)
            raise
        if check and process.returncode != 0:
            raise RuntimeError(f"{command} on {self.name} exits with {process.returncode}: {err or out}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def start(self, command, *, env=None, furniture=False, **more):
        """Start a command on it, in a session of its own. ``furniture`` is what ``signal`` leaves alone.

        What is returned is the door: nsenter, which ends and stops as the command does, and ends with this thread.
        """
        door = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "nsenter",
            f"--target={self.pid}",
            "--ipc",
            "--uts",
            "--net",
            "--pid",
            "--mount",
        ]
        command = [*door, "env", "-C", str(self.work), *map(str, command)]
        environment = {**os.environ, **self.environment, **(env or {}), **({_FURNITURE: "1"} if furniture else {})}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **more)
        self._started.append(process)
        return process

    def fork(self, function, *args, env=None):
        """Run a function on it, in a process forked from one that has imported torch already: that saves its seconds.

        Returns a ``multiprocessing.Process`` that ends as the function does; ``behind`` says where the function runs.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        environment = {**os.environ, **self.environment, **(env or {})}
        settings = (self.pid, str(self.work), environment)
        process = context.Process(target=_run_within, args=(settings, function, args))
        process.start()
        return process

    @property
    def environment(self):
        """What programs on it find in their environment, besides what is in this process's own."""
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "RES_OPTIONS": "timeout:1 attempts:1",
            "OMP_NUM_THREADS": "2",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def see(self, path):
        """The path under which this process finds what the host has at ``path``."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def pids(self, *, furniture=False):
        """The processes on it as this process numbers them, without its first one and what serves its folders."""
        if not self.pid:
            return []
        here, found = _pid_namespace(self.pid), []
        for entry in Path("/proc").iterdir():
            pid = int(entry.name) if entry.name.isdigit() else 0
            if pid and pid != self.pid and _pid_namespace(pid) == here and not _has_ended(pid):
                found += [pid] if furniture or not _is_furniture(pid) else []
        return found

    def signal(self, number):
        """Send a signal to every process on it, as if somebody did there; what serves its folders goes on."""
        sent = set()
        while left := set(self.pids()) - sent:  # those that are forked meanwhile, too
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            sent |= left
        if number == signal.SIGCONT:  # a door stops with what is behind it
            for process in self._started:
                process.send_signal(number)

    def end_processes(self):
        """SIGKILL to every process on it, and wait until they are gone. The host itself stays."""
        self.signal(signal.SIGKILL)
        try:
            wait_until(lambda: not self.pids(), 30)
        except TimeoutError:
            left = [described(pid) for pid in self.pids()]
            raise TimeoutError(f"killed 30 s ago and still on {self.name}: {left}") from None

    def kill(self):
        """SIGKILL to everything on it at once, with its mounts and its network. (Unplug it before: nobody hears of it.)"""
        if self._first is None:
            return
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._first.stdin.close()
        wait_until(self._has_gone, 30, f"the end of {self.name}")
        _close_streams(self._first)
        for process in self._started:
            _close_streams(process)
        self._started = []
        self._first, self.pid = None, 0
        if self is not self._hosts.hub and self._hosts.hub.pid:
            _network(self._hosts.hub.pid, f"link del {self._port}", check=False)

    def _has_gone(self):
        # A door that stopped with what was behind it keeps that, ended, and so the host. It may be about to stop.
        gone = [process.poll() is not None or process.send_signal(signal.SIGCONT) for process in self._started]
        return all(gone) and self._first.poll() is not None

    def restart(self, *, rebooted=False):
        """Kill it if it is up, and bring it up again: as a pod that was rescheduled, or ``rebooted`` as a machine."""
        self.kill()
        if rebooted:
            (self.work / f"boot-{self.name}").unlink()
        self.boot()

    def unplug(self):
        """Take it off the network. Connections stay as they are; what is sent gets lost."""
        _network(self._hosts.hub.pid, f"link set {self._port} down")

    def plug(self):
        """Put it back on the network."""
        _network(self._hosts.hub.pid, f"link set {self._port} up")

    @property
    def _port(self):
        return f"port{self._number}.{self._lives}"

    def _join_network(self):
        hub = self._hosts.hub
        if self is hub:
            # An address of its own: else it takes that of one of its ports, another one when hosts come and go, and what the
            # hosts send to the hub is lost for seconds.
            bridge = "link add sw address 02:00:00:00:ff:00 type bridge"
            _network(self.pid, bridge, f"addr add {self.address}/24 dev sw", "link set sw up")
            return
        # Always the same hardware address: who knew it before it was restarted need not ask again.
        hardware = f"02:00:00:00:00:{self._number:02x}"
        pair = f"link add {self._port} type veth peer name {INTERFACE} address {hardware} netns {self.pid}"
        _network(hub.pid, pair, f"link set {self._port} master sw", f"link set {self._port} up")
        _network(self.pid, f"addr add {self.address}/24 dev {INTERFACE}", f"link set {INTERFACE} up")

    def _kill_session(self, coordinator):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(coordinator, signal.SIGKILL)


def _kept_in_tmp(work):
    # What of /tmp the host has, too: the folder of the test, and what it runs where that lies there.
    kept = {work, Path(__file__).resolve().parents[2], Path(sys.prefix).resolve()}
    return " ".join(sorted(str(path.relative_to("/tmp")) for path in kept if path.is_relative_to("/tmp")))


def _close_streams(process):
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and not stream.closed:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _network(pid, *commands, check=True):
    """Commands of ``ip`` in the network of a process."""
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"]
    lines = "\n".join(commands) + "\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {commands}: {done.stderr}")


def _pid_namespace(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _has_ended(pid):
    # What nobody has waited for yet, unless a thread of it is still there.
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True


def _is_furniture(pid):
    try:
        return f"{_FURNITURE}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def enter(pid, kinds=_KINDS):
    """Move this thread (with "mnt": this process, which must have no other) into namespaces of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in kinds:
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns {kind}")


def described(pid):
    """What a process is, its state, and where in the kernel each of its threads waits."""
    folder = Path(f"/proc/{pid}")
    try:
        words = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = folder.joinpath("stat").read_text().rpartition(") ")[2][0]
        waits = {task.joinpath("wchan").read_text() for task in folder.joinpath("task").iterdir()}
    except OSError as error:
        return f"{pid}: {error}"
    parent = folder.joinpath("stat").read_text().rpartition(") ")[2].split()[1]
    return f"{pid} {state}, of {parent}, in {sorted(waits)}: {words[:200]}"


def behind(process):
    """The pid, as this process sees it, of what ``Host.fork`` started; 0 when it has ended."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else 0
    return 0


def _run_within(settings, function, args):
    pid, work, environment = settings
    enter(pid)  # the children are in the process namespace, this process is not
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))
    os.setsid()
    os.chdir(work)
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


__all__ = ["INTERFACE", "Host", "Hosts", "behind", "enter", "needs_hosts", "why_no_hosts"]
