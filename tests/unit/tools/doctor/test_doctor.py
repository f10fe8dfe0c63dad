"""The doctor: what it finds on good and bad directories, and that it leaves nothing behind."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from kit.disks import small_disk
from safe_ckpt import Checkpointer
from safe_ckpt.core.home.lease import Lease
from safe_ckpt.machine import memory_limit_bytes
from safe_ckpt.testing import FaultyStorage
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.doctor import disk, examination, machine
from safe_ckpt.tools.doctor.check import CheckOptions, CheckResult, refused, worst
from safe_ckpt.tools.doctor.durability import judge_fsync
from safe_ckpt.tools.doctor.examination import diagnose
from safe_ckpt.tools.doctor.speed import Pass, judge_speed
from support import kill_group, needs_root, run_program

GIB = 1 << 30
COMMAND = [sys.executable, "-m", "safe_ckpt.tools.cli", "doctor"]


def examine(path, *options):
    """The exit status and what was found, check by check."""
    done = CliRunner().invoke(app, ["doctor", str(path), "--json", "--mebibytes", "8", *options])
    found = json.loads(done.stdout)
    return done.exit_code, {finding["check"]: finding for finding in found["findings"]}, found


def test_a_good_directory_is_good_and_stays_as_it_was(tmp_path):
    """Every check comes to a verdict, none fails, the figures are there, and nothing is left."""
    code, found, whole = examine(tmp_path, "--state-bytes", "1MiB")
    assert code == 0
    assert whole["state"] in ("ok", "warn")
    assert {"fsync", "rename", "lock", "memory", "file size", "versions"} <= set(found)
    assert not [finding for finding in found.values() if finding["state"] == "fail"]
    assert found["lock"]["figures"]["takeover_s"] < 10
    assert found["speed"]["figures"]["cached_bytes_per_s"] > 0
    assert found["space"]["figures"]["state_bytes"] == 1 << 20
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_not_there_is_not_made(tmp_path):
    """Its nearest parent is examined, which is said, and nothing is created."""
    code, found, _ = examine(tmp_path / "a/b", "--mebibytes", "0")
    assert code == 0
    assert f"{tmp_path} is examined in its place" in found["directory"]["measured"]
    assert found["speed"]["state"] == "skipped"
    assert os.listdir(tmp_path) == []


def test_doctor_prints_a_line_per_check_and_advice(tmp_path):
    """For people: a state word and a figure per check, advice below it where there is any, a sentence at the end."""
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--mebibytes", "0", "--state-bytes", "900TiB"])
    lines = done.stdout.splitlines()
    assert done.exit_code == 1
    at = next(number for number, line in enumerate(lines) if line.startswith("fail     space"))
    assert "0 checkpoints fit of 900.0 TiB each" in lines[at]
    assert lines[at + 1].strip().startswith("-> delete something")
    assert "cannot be relied on here: 1 failed" in lines[-1]


@contextlib.contextmanager
def read_only(path):
    """A directory that nobody may write to, root neither."""
    if os.geteuid():
        path.chmod(0o500)
        yield
        path.chmod(0o700)
        return
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(path)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_doctor_fails_a_directory_that_cannot_be_written_to(tmp_path):
    """It fails with the cause and advice; what needs writing is skipped, the rest is looked at all the same."""
    with read_only(tmp_path):
        code, found, _ = examine(tmp_path)
    assert code == 1
    assert found["write"]["state"] == "fail"
    assert found["write"]["advice"]
    assert found["rename"]["state"] == found["lock"]["state"] == "skipped"
    assert found["space"]["state"] == "ok"


def test_a_file_is_no_directory(tmp_path):
    """It is said, and the file stays."""
    (tmp_path / "file").write_text("x")
    code, found, _ = examine(tmp_path / "file")
    assert code == 1
    assert "is no directory" in found["directory"]["measured"]
    assert (tmp_path / "file").read_text() == "x"


@needs_root
def test_little_space_is_a_warning_and_none_a_failure(tmp_path):
    """Little space is a warning, room for one checkpoint too, for none a failure; memory that looks like a disk is named."""
    with small_disk(tmp_path / "disk", "16m") as small:
        code, found, _ = examine(small)
        assert (code, found["space"]["state"], found["speed"]["state"]) == (0, "warn", "skipped")
        assert "gone after a reboot" in found["file system"]["advice"]
        assert examine(small, "--state-bytes", "10MiB")[1]["space"]["figures"]["fit"] == 1
        code, found, _ = examine(small, "--state-bytes", "1GiB")
        assert (code, found["space"]["state"]) == (1, "fail")


def test_a_live_job_is_not_disturbed(tmp_path):
    """Its holder is named, its checkpoints tell the size, its lock stays its own, and it saves on."""
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=20)
        before = sorted(os.listdir(tmp_path)), Lease.from_bytes((tmp_path / ".safe_ckpt/lock").read_bytes()).token
        code, found, _ = examine(tmp_path)
        token = Lease.from_bytes((tmp_path / ".safe_ckpt/lock").read_bytes()).token
        assert (sorted(os.listdir(tmp_path)), token) == before
        ckpt.save(2, {"x": 2}).result(timeout_s=20)
    assert code == 0
    assert found["held by"]["figures"]["pid"] == os.getpid()
    assert "as step-00000001 is" in found["space"]["measured"]


def test_a_check_of_doctor_that_breaks_leaves_no_folder(tmp_path, monkeypatch):
    """An error that nobody expected is raised, one of the operating system is told; the private folder goes either way."""

    def breaks(error):
        def run(examined):
            (examined.folder("left") / "file").touch()
            raise error

        return (("broken", run),)

    monkeypatch.setattr(examination, "ON_DIRECTORY", breaks(RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match="a mistake"):
        diagnose(tmp_path, CheckOptions())
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(examination, "ON_DIRECTORY", breaks(OSError(errno.EDQUOT, "Disk quota exceeded")))
    found = diagnose(tmp_path, CheckOptions()).findings[0]
    assert (found.check, found.state) == ("broken", "fail")
    assert "quota" in found.advice
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_doctor_leaves_no_folder(tmp_path, number):
    """Ctrl-C, or a scheduler's SIGTERM, in the middle of writing: the private folder is gone when the process is."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, and so it is by what is started from here")
    process = subprocess.Popen([*COMMAND, str(tmp_path), "--mebibytes", "4096"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not any((folder / "speed/direct").exists() for folder in tmp_path.iterdir()) and time.monotonic() < deadline:
        assert process.poll() is None
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return FaultyStorage(tmp_path_factory.mktemp("kit"))


def faulty(storage, path, *options):
    command = [*COMMAND, str(path), "--json", "--mebibytes", "0", *options]
    environment = {**os.environ, **storage.environment}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as started:
        try:
            found = json.loads(started.communicate(timeout=60)[0])
        finally:
            kill_group(started)
            storage.off()
    return started.returncode, {finding["check"]: finding for finding in found["findings"]}


@pytest.mark.parametrize(("kind", "check"), [("sync", "fsync"), ("rename", "rename")])
def test_a_disk_that_refuses_is_named(tmp_path, storage, kind, check):
    """An fsync or a rename that fails: that check fails with the errno and advice, and the others come to their own verdict."""
    storage.fail(1, tmp_path, errno.EIO, always=True, kinds=(kind,))
    code, found = faulty(storage, tmp_path)
    assert code == 1
    assert found[check]["state"] == "fail"
    assert "EIO" in found[check]["measured"]
    assert "dmesg" in found[check]["advice"]
    assert found["write"]["state"] == "ok"


def test_doctor_ends_on_a_disk_that_does_not_answer(tmp_path, storage):
    """A call that does not return is told of after --timeout-s, nothing else is tried on that disk, and the rest is told."""
    storage.delay(5, tmp_path, 600)
    begun = time.monotonic()
    code, found = faulty(storage, tmp_path, "--timeout-s", "1")
    assert time.monotonic() - begun < 20
    assert code == 1
    assert [name for name, finding in found.items() if "no answer within 1 s" in finding["measured"]] == ["fsync"]
    assert found["lock"]["measured"] == "not tried: the file system has stopped answering"
    assert found["memory"]["state"] in ("ok", "warn")


def test_doctor_on_one_process_does_not_import_torch(tmp_path):
    """On one process torch, which takes seconds to import, is not."""
    assert run_program("examines_a_folder", str(tmp_path), fresh=True).stdout.split() == ["0", "False"]


def test_doctor_with_a_size_that_is_none_ends_with_status_2(tmp_path):
    """A size that is none: status 2 and a sentence."""
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--state-bytes", "much"])
    assert (done.exit_code, "10GiB" in done.stderr) == (2, True)
    assert os.listdir(tmp_path) == []


MOUNTS = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 27 0:40 / /mnt/my\040runs rw,relatime shared:1 master:2 - nfs4 server:/x rw,soft,vers=4.2
41 27 0:41 / /over rw - ext4 /dev/vdb rw
42 27 0:42 / /over ro - tmpfs tmpfs rw,size=1k
43 27 0:43 / /overt rw - lustre mgs@tcp:/fs rw
damaged
"""


@pytest.mark.parametrize(
    ("path", "kind", "state", "says"),
    [
        ("/home/x", "ext4", "ok", ""),
        ("/mnt/my runs/exp", "nfs4", "warn", "hard"),
        ("/over/x", "tmpfs", "fail", "mount it for writing"),
        ("/overt", "lustre", "ok", "setstripe"),
    ],
)
def test_the_mount_of_a_path_is_the_deepest_and_latest(path, kind, state, says):
    """The deepest mount above it, of two at one point the later, spaces and all; and what is known of its kind."""
    mount = disk.mount_of(path, MOUNTS)
    assert mount.kind == kind
    found = disk.judge_file_system(mount)
    assert found.state == state
    assert says in found.advice


def test_mounts_of_containers_and_in_memory_are_warned_of():
    """What goes with the container, and what only looks like a disk, is a warning."""
    mount = disk.mount_of("/", MOUNTS)
    for kind, word in (("overlay", "volume"), ("fuse.s3fs", "object stores"), ("tmpfs", "reboot")):
        found = disk.judge_file_system(dataclasses.replace(mount, kind=kind))
        assert (found.state, word in found.advice) == ("warn", True)


def test_what_a_directory_lies_on_is_memory_nvme_a_disk_or_the_network(tmp_path):
    """By the mount and by the devices below it: of several the slowest, of NVMe over a network that."""
    mount = disk.mount_of("/", MOUNTS)
    for kind, medium in (
        ("tmpfs", "memory"),
        ("lustre", "the network"),
        ("fuse.glusterfs", "the network"),
        ("fuse.x", ""),
    ):
        assert disk.medium_of(dataclasses.replace(mount, kind=kind), os.makedev(0, 40), tmp_path) == medium

    def device(number, name, *, partition=False, slaves=(), **facts):
        whole = tmp_path / "devices" / name
        for fact, text in facts.items():
            (whole / "device").mkdir(parents=True, exist_ok=True)
            (whole / "device" / fact).write_text(f"{text}\n")
        block = whole / f"{name}p1" if partition else whole
        block.mkdir(parents=True, exist_ok=True)
        for slave in slaves:
            (block / "slaves").mkdir(exist_ok=True)
            (block / "slaves" / slave).symlink_to(tmp_path / "devices" / slave)
        (tmp_path / f"8:{number}").symlink_to(block)
        return disk.medium_of(mount, os.makedev(8, number), tmp_path)

    assert device(0, "sda") == "a disk"
    assert device(1, "nvme0n1", partition=True, transport="pcie", model="fast") == "NVMe"
    assert device(2, "nvme1n1", transport="tcp") == "the network"
    assert device(3, "nvme2n1", transport="pcie", model="Amazon Elastic Block Store") == "the network"
    assert device(4, "dm-0", slaves=("nvme0n1", "sda")) == "a disk"
    assert device(5, "dm-1", slaves=("nvme0n1",)) == "NVMe"
    assert device(6, "md0", slaves=("nvme0n1", "nvme1n1")) == "the network"


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (disk.judge_space(free_bytes=10 * GIB, total_bytes=90 * GIB, size=4 * GIB), "ok"),
        (disk.judge_space(free_bytes=7 * GIB, total_bytes=90 * GIB, size=4 * GIB), "warn"),
        (disk.judge_space(free_bytes=3 * GIB, total_bytes=90 * GIB, size=4 * GIB), "fail"),
        (judge_fsync(2e-3, 1e-3, in_memory=False), "ok"),
        (judge_fsync(2e-3, 3.0, in_memory=False), "warn"),
        (machine.judge_memory(free_bytes=GIB, limit_bytes=2 * GIB, size=3 * GIB), "warn"),
        (machine.judge_memory(free_bytes=9 * GIB, limit_bytes=None, size=3 * GIB), "ok"),
        (judge_speed({"direct": Pass(moved_bytes=GIB, seconds=100.0)}, GIB), "warn"),
        (judge_speed({"cached": Pass(moved_bytes=GIB, seconds=1.0)}, None), "ok"),
    ],
)
def test_figures_that_need_action_are_warned_of_with_advice(found, state):
    """Figures that ask for something to be done are warned of and come with advice; others are not."""
    assert found.state == state
    assert bool(found.advice) == (state != "ok")


def test_an_fsync_that_is_too_quick_is_a_hint():
    """No more than that, and none at all in memory, where there is nothing to sync."""
    assert "power cut" in judge_fsync(3e-6, 1e-6, in_memory=False).advice
    assert judge_fsync(3e-6, 1e-6, in_memory=False).state == "ok"
    assert judge_fsync(3e-6, 1e-6, in_memory=True).advice == ""


def test_a_limit_on_file_sizes_is_reported_and_may_fail():
    """It is reported with the command that raises it; one below the size of a checkpoint is a failure."""
    assert machine.judge_file_size(None, GIB).state == "ok"
    low = machine.judge_file_size(5 * GIB, GIB)
    assert (low.state, "ulimit -f" in low.advice) == ("warn", True)
    assert machine.judge_file_size(5 * GIB, 6 * GIB).state == "fail"


def test_the_tightest_limit_of_all_control_groups_counts(tmp_path):
    """The tightest limit of all levels counts; what says that it is none does not."""

    def read(membership, **files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "membership").write_text(membership)
        return memory_limit_bytes(tmp_path / "membership", tmp_path)

    limit_bytes = read(
        "0::/job/step\n",
        job__memory_dot_max="5000\n",
        job__step__memory_dot_max="max\n",
    )
    assert limit_bytes == 5000
    limit_bytes = read(
        "4:memory:/job\n1:cpu,cpuacct:/job\n",
        memory__memory_dot_limit_in_bytes="9223372036854771712\n",
        memory__job__memory_dot_limit_in_bytes="7000\n",
    )
    assert limit_bytes == 7000


def test_releases_too_old_fail_and_newer_series_are_a_warning():
    """What is too old fails, what is of a newer series than was run is a warning, what is missing is said."""
    too_old, newer, _ = machine.judge_versions({"torch": "2.0.1", "deepspeed": "99.0", "numpy": "9"})
    assert (too_old.state, "torch 2.0.1" in too_old.measured) == ("fail", True)
    assert (newer.state, "deepspeed 99.0" in newer.measured) == ("warn", True)
    assert machine.judge_versions({"numpy": "2.0"})[0].state == "fail"
    assert [finding.state for finding in machine.judge_versions({"torch": "2.13.0+cpu"})] == ["ok"]


def test_doctors_verdict_is_that_of_its_worst_check():
    """A failure outweighs a warning, that what was skipped, that what is fine."""
    findings = [CheckResult(check="x", state=state, measured="") for state in ("ok", "skipped", "warn")]
    assert worst([]) == "ok"
    assert worst(findings[:2]) == "skipped"
    assert worst(findings) == "warn"
    assert worst([*findings, refused("x", OSError(errno.EROFS, "Read-only file system"))]) == "fail"
