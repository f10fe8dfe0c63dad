"""``torchrun`` over two hosts of which one goes and comes back, with a model of which every rank has a part."""

import re
import signal

import pytest

from kit.hosts import Hosts, needs_hosts
from kit.pages import activated, write_files
from kit.patience import wait_until

PAGE = "docs/clusters.md"
WAIT_S = 120.0
pytestmark = [needs_hosts, pytest.mark.timeout(400)]


class Job:
    """The page's command on every host that is up."""

    def __init__(self, hosts, work):
        self._hosts, self._work = hosts, work
        self._processes = {}
        write_files(PAGE, work, "train_sharded.py", "host.sh")
        for host in hosts:
            self._log(host).touch()

    def start(self, host):
        """Start it on a host, for more steps than there is time for."""
        command = ["bash", "host.sh", "train_sharded.py", "runs", "1000000"]
        with self._log(host).open("a") as log:
            self._processes[host.name] = host.start(command, env=activated(), stdout=log, stderr=log)

    def stop(self):
        """End it on all hosts, as their administrator would."""
        for host in self._hosts:
            host.signal(signal.SIGTERM)
        for process in self._processes.values():
            process.wait(timeout=WAIT_S)

    def printed(self):
        """What has been printed on all hosts."""
        return "".join(self._log(host).read_text(errors="replace") for host in self._hosts)

    def wait_for(self, pattern):
        """Wait until something has been printed. Returns the match."""
        try:
            return wait_until(lambda: re.search(pattern, self.printed()), WAIT_S, pattern)
        except TimeoutError:
            print(self.printed()[-20000:])
            raise

    def check_resumed(self, saved_on, on):
        """Wait for a resume by another number of ranks: with the very weights that were saved. Returns the step."""
        resumed = self.wait_for(rf"resumed step-(\d+) of {saved_on} on {on} ranks, weights (\w+)")
        step = int(resumed[1])
        assert f"step {step} on {saved_on} ranks, weights {resumed[2]}\n" in self.printed()
        return step

    def _log(self, host):
        return self._work / f"{host.name}.log"


@pytest.mark.parametrize(
    "silent", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["processes killed", "nothing heard of it"]
)
def test_a_host_goes_and_comes_back(tmp_path, silent):
    """2 -> 1 -> 2 hosts under FSDP2: the job goes on by itself, with what was saved, and loses nothing on the way up."""
    with Hosts(2, tmp_path) as hosts:
        job = Job(hosts, tmp_path)
        for host in hosts:
            job.start(host)
        job.wait_for("step 300 on 2 ranks")
        if not silent:
            hosts[1].end_processes()
        hosts[1].kill()
        alone = job.check_resumed(saved_on=2, on=1)
        assert alone >= 100
        job.wait_for(f"step {alone + 100} on 1 ranks")
        hosts[1].boot()
        job.start(hosts[1])
        together = job.check_resumed(saved_on=1, on=2)
        stopped = job.wait_for(r"stopped after (\d+) steps on 1 ranks")
        assert together == int(stopped[1])
        job.wait_for(f"step {together // 100 * 100 + 100} on 2 ranks")
        job.stop()
