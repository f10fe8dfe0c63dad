"""What Kubernetes does to a pod, done to a host of its own: SIGTERM, grace, SIGKILL, and the same name with new processes."""

import re
import shlex
import subprocess
import time

import pytest
import yaml

from docs.blocks import blocks_of
from kit.hosts import Hosts, needs_hosts
from kit.pages import activated, write_files
from kit.patience import wait_until

PAGE = "docs/clusters.md"
STEPS = "1500"
WAIT_S = 90.0
LEASE_S = 10.0  # in train.py
pytestmark = [needs_hosts, pytest.mark.timeout(240)]


def job():
    """The Job that the page shows."""
    return yaml.safe_load(next(block.code for block in blocks_of(PAGE) if block.title == "job.yaml"))


class Pod:
    """A host that runs the command of the page's Job, with another number of steps, in a folder of its own."""

    def __init__(self, host, work, name):
        self.host = host
        self._folder = work / name
        self._folder.mkdir()
        write_files(PAGE, self._folder, "train.py")
        self._spec = job()["spec"]["template"]["spec"]
        self._command = [*self._spec["containers"][0]["command"][:-2], "runs", STEPS]
        self._log = self._folder / "log"
        self._log.touch()
        self._process = None

    def start(self):
        """Start the container."""
        line = f"cd {shlex.quote(str(self._folder))} && exec {shlex.join(self._command)} >>log 2>&1"
        self._process = self.host.start(["bash", "-c", line], env=activated())

    def terminate(self):
        """SIGTERM to the container's first process, and SIGKILL to what is left after the grace. Returns the exit status."""
        (first,) = [pid for pid in self.host.pids() if "--standalone" in arguments(pid)]
        subprocess.run(["kill", "-TERM", str(first)], check=True)
        status = self._process.wait(timeout=self._spec["terminationGracePeriodSeconds"])
        self.host.restart()
        return status

    def printed(self):
        """All that its containers have printed."""
        return self._log.read_text()

    def wait_for(self, text, count=1):
        """Wait until it has printed something for the ``count``-th time. Returns the seconds that took."""
        begun = time.monotonic()

        def is_there():
            ended = self._process.poll() is not None
            there = self.printed().count(text) >= count
            assert there or not ended, f"ended without {text!r}:\n{self.printed()}"
            return there

        wait_until(is_there, WAIT_S, f"{text!r}")
        return time.monotonic() - begun

    def weights(self):
        """Wait until it has finished, and return what became of its weights."""
        self.wait_for("finished")
        assert self._process.wait(timeout=WAIT_S) == 0
        return re.search(rf"finished {STEPS} steps, weights (\w+)", self.printed()).group(1)


def arguments(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().split("\0")
    except OSError:
        return []


def test_the_grace_is_longer_than_what_it_is_for():
    """The page's own numbers: the pod's grace is above torchrun's 30 s, and those are above signal_grace_s."""
    train = next(block.code for block in blocks_of(PAGE) if block.title == "train.py")
    (grace_s,) = re.findall(r"signal_grace_s=(\d+)", train)
    assert int(grace_s) < 30 < job()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert f"lease_s={LEASE_S:.0f}," in train


def test_a_pod_that_is_told_to_go_and_one_that_is_killed_go_on(tmp_path):
    """SIGTERM: it stops within the grace, saved. SIGKILL: it goes on within lease_s + 5 s of a start. Then the same weights."""
    with Hosts(2, tmp_path) as hosts:
        pod, undisturbed = (Pod(host, tmp_path, host.name) for host in hosts)
        undisturbed.start()
        pod.start()
        fresh_s = pod.wait_for("fresh run")
        pod.wait_for("step 200")
        assert pod.terminate() != 0  # else the Job would count as done
        pod.start()
        pod.wait_for("resumed from")
        stopped = re.search(r"resumed from step-(\d+)", pod.printed()).group(1)
        assert f"step {int(stopped)}\n" in pod.printed()
        pod.wait_for(f"step {int(stopped) // 100 * 100 + 200}")
        pod.host.restart()
        pod.start()
        assert pod.wait_for("resumed from", 2) < fresh_s + LEASE_S + 5
        assert pod.weights() == undisturbed.weights()
