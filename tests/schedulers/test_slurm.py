"""A job under a real SLURM: it is told to go, goes, is started again by SLURM, and ends as one that nobody disturbed."""

import contextlib
import functools
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from kit.pages import write_files
from kit.slurm import one_node, why_not

PAGE = "docs/clusters.md"
# Enough for a fast machine not to be done before it hears of the signal, which takes about a second.
STEPS = {"train.py": "2000", "train_lightning.py": "700"}
WAIT_S = 90.0
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(400),
]


class Cluster:
    """A folder with the files of the page, and a SLURM that runs them."""

    def __init__(self, slurm, folder):
        self.slurm, self.folder = slurm, folder
        write_files(PAGE, folder, "job.sbatch", "train.py", "train_lightning.py")

    def submit(self, script, runs, *more, options=()):
        """Submit it as the page does. Returns the number of the job."""
        command = ["python", script, runs, STEPS[script], *more]
        return self.slurm.submit(self.folder / "job.sbatch", *command, options=options)

    def printed(self, job):
        """All that the job has printed, over all of its starts."""
        file = self.folder / f"job-{job}.out"
        return file.read_text() if file.exists() else ""

    def wait_for(self, job, text, count=1):
        """Wait until a job has printed something for the ``count``-th time; as long for the others to make room for it."""
        with self.told(job):
            self.slurm.wait_until(lambda: self.slurm.state(job) != "PENDING", WAIT_S, f"job {job} to begin")
            self.slurm.wait_until(lambda: self.printed(job).count(text) >= count, WAIT_S, f"{text!r} of job {job}")

    def weights(self, job):
        """Wait for the end of a job that succeeds, and return what became of its weights."""
        with self.told(job):
            assert self.slurm.wait_for_end(job, WAIT_S) == "COMPLETED"
            return re.search(r"finished \d+ steps, weights (\w+)", self.printed(job)).group(1)

    @contextlib.contextmanager
    def told(self, job):
        """Show what a job has printed if this fails."""
        try:
            yield
        except BaseException:
            print(self.printed(job))
            raise


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with one_node() as slurm:
        yield Cluster(slurm, tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Jobs to compare with: script -> number. They run beside the others."""
    return {script: cluster.submit(script, f"runs/{script}") for script in ("train.py", "train_lightning.py")}


def check_lightning(cluster, job, undisturbed):
    """It stopped in mid-epoch, went on there, and ended as the undisturbed one."""
    cluster.wait_for(job, "starts at step", 2)
    start = int(re.findall(r"starts at step (\d+)", cluster.printed(job))[1])
    assert 3 * 29 <= start < int(STEPS["train_lightning.py"])
    assert cluster.weights(job) == cluster.weights(undisturbed["train_lightning.py"])
    assert cluster.slurm.restarts(job) == 1


def test_plain_torch_goes_on_by_itself(cluster, undisturbed):
    """SIGUSR1, as before the time limit: the ranks stop at one step, the script requeues, and the weights are the same."""
    job = cluster.submit("train.py", "runs/plain")
    cluster.wait_for(job, "step 100")
    cluster.slurm.signal(job, "SIGUSR1")
    cluster.wait_for(job, "resumed from")
    stopped = int(re.search(r"resumed from step-(\d+)", cluster.printed(job)).group(1))
    assert f"step {stopped}\n" in cluster.printed(job)
    assert 100 <= stopped < int(STEPS["train.py"])
    assert cluster.weights(job) == cluster.weights(undisturbed["train.py"])
    assert cluster.slurm.restarts(job) == 1


def test_lightning_is_requeued_by_lightning(cluster, undisturbed):
    """SIGUSR1 in mid-epoch, with Lightning's own requeueing: the same weights, and nothing was saved in a handler."""
    job = cluster.submit("train_lightning.py", "runs/lightning")
    cluster.wait_for(job, "epoch 2\n")
    cluster.slurm.signal(job, "SIGUSR1")
    check_lightning(cluster, job, undisturbed)
    assert not list((cluster.folder / "runs/lightning").glob("hpc_ckpt*"))


def test_lightning_is_requeued_by_slurm(cluster, undisturbed):
    """Another job needs the node: SIGTERM, KillWait, SIGKILL. Lightning leaves the queue alone; the same weights."""
    job = cluster.submit("train_lightning.py", "runs/taken", "--requeued-by-script")
    cluster.wait_for(job, "epoch 2\n")
    cluster.slurm.requeue(job)
    check_lightning(cluster, job, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize(("script", "sign"), [("train.py", "step 100"), ("train_lightning.py", "epoch 2\n")])
def test_a_job_whose_node_is_taken_and_then_times_out_goes_on(cluster, undisturbed, script, sign):
    """The node is taken, and later the time is up; in Lightning the script requeues then."""
    job = cluster.submit(script, f"runs/twice-{script}", *(["--requeued-by-script"] if "lightning" in script else []))
    cluster.wait_for(job, sign)
    cluster.slurm.requeue(job)
    for started in ("resumed from", "step 600") if script == "train.py" else ("starts at", "epoch 10\n"):
        cluster.wait_for(job, started)
    cluster.slurm.signal(job, "SIGUSR1")
    assert cluster.weights(job) == cluster.weights(undisturbed[script])
    assert cluster.slurm.restarts(job) == 2


@pytest.mark.thorough
def test_a_job_that_reaches_its_slurm_time_limit_goes_on(cluster, undisturbed):
    """``#SBATCH --time`` and ``--signal`` as SLURM applies them: the job runs over its limit and ends as it should."""
    job = cluster.submit("train.py", "runs/limit", options=("--time=1", "--signal=USR1@55"))
    cluster.wait_for(job, "step 100")
    # SLURM looks at the limits every 30 s, and a fast machine would be done by then.
    ranks = _python_running("train.py runs/limit")
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    for pid in ranks:
        cluster.slurm.wait_until(
            functools.partial(_has_been_sent, signal.SIGUSR1, pid), WAIT_S, "the signal of the limit"
        )
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):  # SLURM may have let it go on itself
            os.kill(pid, signal.SIGCONT)
    cluster.wait_for(job, "SIGUSR1")
    cluster.wait_for(job, "resumed from")
    assert cluster.weights(job) == cluster.weights(undisturbed["train.py"])


def _python_running(words):
    """Process ids, without those of the srun that started them."""
    found = subprocess.run(
        ["pgrep", "--full", "--", f"^[^ ]*python[^ ]* {words}"], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in found.stdout.split()]


def _has_been_sent(number, pid):
    """Whether a stopped process will get a signal when it goes on, or went on."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
    pending = re.findall(r"^S(?:ig|hd)Pnd:\s*(\w+)", status, re.MULTILINE)
    return "T (stopped)" not in status or any(int(mask, 16) >> (number - 1) & 1 for mask in pending)


def test_nothing_is_left_of_a_slurm():
    """The kit itself: daemons and jobs are gone when it is left, also after a failure."""
    with contextlib.suppress(ZeroDivisionError), one_node() as slurm:
        (slurm.folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nsrun sleep 1000\n")
        job = slurm.submit(slurm.folder / "job.sh")
        slurm.wait_until(lambda: slurm.state(job) == "RUNNING", 30, "a job")
        raise ZeroDivisionError
    left = subprocess.run(["pgrep", "--full", "--", str(slurm.folder)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
