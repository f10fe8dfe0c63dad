"""A real SLURM of one node: munged, slurmctld and slurmd of this machine's packages, with all of theirs in a temporary folder.

Nothing of the machine's own SLURM or munge is read or touched. A requeued job starts again after about six seconds: SLURM
waits for the old job's credentials to expire, and takes no less than five.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kit.kinds import starting

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "setpriv")
_PATH = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
_START_S = 20.0
_STOP_S = 10.0
_COMMAND_S = 30.0
_POLL_S = 0.05

_CONF = """
ClusterName=one
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
JobRequeue=1
KillWait={kill_wait_s}
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there can be no SLURM here; "" when there can."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Slurm:
    """A running SLURM. Its commands run with ``environment``.

    Args:
        folder: where everything of it lies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own = f"{Path(sys.executable).parent}{os.pathsep}{_PATH}"  # jobs run the python that runs the tests
        self.environment = {**os.environ, "PATH": own, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def submit(self, script: Path, *arguments: str, options: Sequence[str] = ()) -> int:
        """``sbatch`` a script with arguments in its own folder. Returns the number of the job."""
        said = self._command("sbatch", "--parsable", *options, script.name, *arguments, cwd=script.parent)
        return int(said)

    def signal(self, job: int, name: str) -> None:
        """Send a signal to every rank, as ``#SBATCH --signal=...`` does when the time runs out."""
        self._command("scancel", f"--signal={name.removeprefix('SIG')}", str(job))

    def requeue(self, job: int) -> None:
        """Take the node away from a job, as for one of a higher priority: SIGTERM, ``KillWait``, SIGKILL, and to the queue."""
        self._command("scontrol", "requeue", str(job))

    def state(self, job: int) -> str:
        """Such as PENDING, RUNNING, COMPLETING, COMPLETED."""
        return self._facts(job).get("JobState", "?")

    def restarts(self, job: int) -> int:
        """How often it was put back into the queue."""
        return int(self._facts(job).get("Restarts", "0"))

    def wait_for_end(self, job: int, within_s: float) -> str:
        """Wait until a job has ended for good. Returns how."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self.wait_until(lambda: self.state(job) in ends, within_s, f"job {job} to end")
        return self.state(job)

    def wait_until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait for something to become true.

        Raises:
            AssertionError: it did not in time; with the last lines of the logs.
        """
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {within_s:.0f} s for {what}\n{self.logs()}"
            time.sleep(_POLL_S)

    def logs(self) -> str:
        """What the daemons said last."""
        found = []
        for name in ("munged.log", "slurmctld.log", "slurmd.log"):
            with contextlib.suppress(OSError):
                lines = (self.folder / name).read_text(errors="replace").splitlines()[-8:]
                found += [f"{name}: {line}" for line in lines]
        return "\n".join(found)

    def start(self, kill_wait_s: int) -> None:
        """Start the daemons and wait until a job could run.

        Raises:
            AssertionError: that takes too long.
        """
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self._write_key()
        ports = dict(zip(("controller_port", "node_port"), _free_ports(2), strict=True))
        settings = _CONF.format(folder=self.folder, kill_wait_s=kill_wait_s, **ports)
        (self.folder / "slurm.conf").write_text(settings)
        self._start_munged()
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
        self._daemon("slurmd", "-D", "-N", "localhost", "-f", str(self.folder / "slurm.conf"))
        self.wait_until(self._is_idle, _START_S, "the node")

    def stop(self) -> None:
        """End the jobs, then the daemons, then whatever is left of either."""
        if self._daemons:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                self._command("scancel", "--signal=KILL", "--full", "--user=root")
                self._command("scancel", "--user=root")
                self.wait_until(lambda: not self._command("squeue", "--noheader"), _STOP_S, "the jobs to end")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=_STOP_S)
        self._daemons.clear()
        self._kill_what_is_left()

    def _write_key(self) -> None:
        # munged insists on folders that nobody else can write to, and a key that nobody else can read.
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def _start_munged(self) -> None:
        own = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        options = [f"--{name}={self.folder / file}" for name, file in own.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        self.wait_until((self.folder / "munge.socket").exists, _START_S, "munged")

    def _daemon(self, *command: str) -> None:
        # If the tests are killed, it must not stay behind.
        with (self.folder / f"{command[0]}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _is_idle(self) -> bool:
        try:
            return "State=IDLE" in self._command("scontrol", "show", "node", "localhost")
        except (AssertionError, subprocess.TimeoutExpired):
            return False  # the controller does not listen yet

    def _facts(self, job: int) -> dict[str, str]:
        said = self._command("scontrol", "--oneliner", "show", "job", str(job))
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def _command(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def _kill_what_is_left(self) -> None:
        mark = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        deadline = time.monotonic() + _STOP_S
        while (found := _with_environment(mark)) and time.monotonic() < deadline:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)


@contextlib.contextmanager
def one_node(*, kill_wait_s: int = 20) -> Iterator[Slurm]:
    """A SLURM with one node of four CPUs while this is entered.

    Args:
        kill_wait_s: seconds between SIGTERM and SIGKILL when a job must leave.
    """
    starting("hosts")
    # Not pytest's folder: the path of a socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        slurm = Slurm(Path(folder))
        try:
            slurm.start(kill_wait_s)
            yield slurm
        finally:
            slurm.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _with_environment(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
