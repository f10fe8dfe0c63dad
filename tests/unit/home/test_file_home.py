import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.inside import exchange_no_names
from kit.limits import QUICK
from kit.manifests import checkpoint
from safe_ckpt.core.formats.manifest import Manifest, read_manifest
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.file_lock import JobLock
from safe_ckpt.core.home.home import Additions, NewCheckpoint, Pointer
from safe_ckpt.core.home.lease import Lease
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.durable import Link
from safe_ckpt.errors import DirectoryError, DirectoryInUseError
from support import program_path


def of_elsewhere(**facts):
    """A lock file as a process on another machine would have left it."""
    known = {"token": "ab", "host": "elsewhere", "pid": 1, "started_at": "2026-01-01T00:00:00+00:00", "lease_s": 60.0}
    return Lease(**{**known, "kernel": "other", "namespace": 1, "process_start": 5, **facts}).to_bytes()


@pytest.fixture
def home(tmp_path):
    made = FileHome(tmp_path / "exp", lease_s=6)
    made.open()
    yield made
    made.close()


def test_leftovers_of_a_dead_job_are_swept(tmp_path):
    """Half-written saves and half-deleted checkpoints are gone after the next start; checkpoints and quarantine stay.

    ``staging`` is the former name of ``pending``.
    """
    exp = tmp_path / "exp"
    for left in ("pending/abc/step-1", "staging/ghi/step-4", "trash/def", "quarantine/step-2"):
        (exp / ".safe_ckpt" / left).mkdir(parents=True)
    (exp / "step-3").mkdir()
    home = FileHome(exp, lease_s=6)
    home.open()
    assert not any(home.pending.iterdir())
    assert not (exp / ".safe_ckpt/staging").exists()
    assert not any(home.trash.iterdir())
    assert [path.name for path in home.quarantined()] == ["step-2"]
    assert (exp / "step-3").exists()
    home.close()


def test_a_hidden_folder_may_lie_elsewhere(tmp_path):
    """Both folders are made, and both are gone at the end where nothing was saved."""
    home = FileHome(tmp_path / "run/weights", lease_s=6, hidden=tmp_path / "beside/hidden")
    home.open()
    assert home.path.is_dir()
    assert home.pending.is_relative_to(tmp_path / "beside/hidden")
    home.close()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("pending", ["pending", "staging"])
@pytest.mark.parametrize("complete", [True, False])
def test_an_interrupted_replacement_is_finished_or_undone(home, complete, pending):
    """Killed between "old away" and "new in": a complete new one goes forward, else the old one comes back."""
    final = home.path / "step-1"
    final.mkdir()
    checkpoint(final, {"f": b"old"})
    staged = home.make_pending("op") / "step-1"
    staged.mkdir()
    checkpoint(staged, {"f": b"new"})
    if not complete:
        (staged / "f").write_bytes(b"ne")
    final.rename(home.aside("op", home.path / "step-1"))
    home.close()
    home.pending.rename(home.hidden / pending)  # the former name, too
    again = FileHome(home.path, lease_s=6)
    again.open()
    assert (final / "f").read_bytes() == (b"new" if complete else b"old")
    assert not any(again.pending.iterdir())
    assert not any(again.trash.iterdir())
    again.close()


@pytest.mark.parametrize("lost", ["step-1", "last"])
def test_of_two_names_that_a_save_replaced_the_one_that_was_not_given_again_comes_back(home, lost):
    """Killed between the two: what has its name keeps the new one."""
    home.make_pending("op")
    for name in ("step-1", "last"):
        place = home.path / name
        place.mkdir()
        checkpoint(place, {"f": b"old"})
        place.rename(home.aside("op", place))
        if name != lost:
            place.write_text("new")
    home.close()
    again = FileHome(home.path, lease_s=6)
    again.open()
    assert (again.path / lost / "f").read_bytes() == b"old"
    assert [one.read_text() for one in again.path.iterdir() if one.is_file()] == ["new"]
    again.close()


def test_a_checkpoint_may_lie_in_a_folder_below(home):
    """One that is not there yet is made with it."""
    place = home.path / "below/deeper/step-1"
    _publication(home, "below/deeper/step-1").commit((), {}, lambda: None)
    assert read_manifest(place).step == 2


def test_an_unfinished_save_is_never_rolled_forward(home):
    """A complete but uncommitted save of a new name is not a checkpoint."""
    staged = home.make_pending("op") / "step-1"
    staged.mkdir()
    checkpoint(staged, {"f": b"new"})
    home.close()
    again = FileHome(home.path, lease_s=6)
    again.open()
    assert not (home.path / "step-1").exists()
    again.close()


def test_a_live_job_keeps_others_out(tmp_path):
    """A second job is refused with host, pid and start of the first; once that is killed, the next one gets in at once."""
    command = [sys.executable, program_path("holds_a_directory"), str(tmp_path / "exp")]
    second = FileHome(tmp_path / "exp", lease_s=60)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(DirectoryInUseError) as caught:
            second.open()
        assert caught.value.pid == holder.pid
        assert caught.value.host in str(caught.value)
        assert caught.value.started_at.startswith("20")
        holder.kill()
    begun = time.monotonic()
    second.open()
    assert time.monotonic() - begun < 5
    second.confirm()
    second.close()


def _publication(home, name="step-2", kind="directory", **additions):
    manifest = Manifest(name=Path(name).name, sequence=1, step=2, world_size=1, files=())
    new = NewCheckpoint(
        path=home.path / name, manifest=manifest, op_id="op", kind=kind, additions=Additions(**additions)
    )
    publication = home.begin(new, QUICK)
    publication.prepare()
    return publication


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_further_name_stays_with_a_healthy_one(home, kind, marked):
    """A name such as ``last``, and a pointer that a resume follows, go to the new one only where its numbers are healthy."""
    (home.path / "step-1").write_text("old")
    (home.path / "last").symlink_to("step-1")
    (home.path / "latest").write_text("step-1")
    links = [Link(path=home.path / "last", target="step-2")]
    pointers = [Pointer(path=home.path / "latest", data=b"step-2", is_for_resume=True)]
    new = _publication(home, kind=kind, links=links, pointers=pointers)
    new.commit((), {"health": {"healthy": False, "marked": True, "files": {}}} if marked else {}, lambda: None)
    assert os.readlink(home.path / "last") == (home.path / "latest").read_text() == ("step-1" if marked else "step-2")


def _publish(home, **what):
    publication = _publication(home, **what)
    return lambda: publication.commit((), {}, lambda: None)


def _discards_on_a_full_disk(home, monkeypatch):
    mkdir = Path.mkdir

    def full(path, *given, **more):
        if path.parent == home.trash:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        mkdir(path, *given, **more)

    monkeypatch.setattr(Path, "mkdir", full)
    return lambda: home.discard([home.path / "one.ckpt"])


def _left_over(home, name, act):
    (home.hidden / name).mkdir(parents=True)
    checkpoint(home.hidden / name, {"f": b"x"})
    return act


MOVES = {
    "a deletion": lambda home, _: lambda: home.discard([home.path / "step-1"]),
    "a deletion of a file": lambda home, _: lambda: home.discard([home.path / "one.ckpt"]),
    "a deletion on a full disk": _discards_on_a_full_disk,
    "a quarantine": lambda home, _: lambda: home.quarantine(home.path / "step-1"),
    "a new name": lambda home, _: _publish(home),
    "a further name": lambda home, _: _publish(home, kind="file", links=[Link(path=home.path / "last", target="x")]),
    "a pointer": lambda home, _: _publish(
        home, kind="file", pointers=[Pointer(path=home.path / "latest", data=b"step-2", is_for_resume=True)]
    ),
    "a sweep": lambda home, _: home._sweep,
    "a sweep of a quarantine": lambda home, _: _left_over(home, "quarantine/.moving-1/step-7", home._sweep),
    "a repair": lambda home, _: home._repair,
    "a repair of an earlier version's": lambda home, _: _left_over(home, "staging/op3/step-7", home._take_former),
}


@pytest.mark.parametrize("move", MOVES)
def test_who_has_lost_the_directory_moves_nothing_in_it(tmp_path, monkeypatch, move):
    """The lock is looked at right before every rename and deletion, not of a commit alone. Another job has just got it, and has
    not come to moving anything away: every name is what it was.
    """
    home = FileHome(tmp_path, lease_s=60)
    home.open()
    for name in ("step-1", ".safe_ckpt/trash/left", ".safe_ckpt/pending/left"):
        (tmp_path / name).mkdir(parents=True)
        checkpoint(tmp_path / name, {"f": b"x"})
    for name in ("one.ckpt", "last", "latest", "x"):
        (tmp_path / name).write_text(name)
    # Of a replacement that was interrupted, for the repair.
    for name in (".safe_ckpt/trash/op2/step-9", ".safe_ckpt/pending/op2/step-9"):
        (tmp_path / name).mkdir(parents=True)
        checkpoint(tmp_path / name, {"f": b"x"})
    act = MOVES[move](home, monkeypatch)

    def names():
        found = {path for path in tmp_path.rglob("*") if not path.name.startswith("lock")}
        # An empty folder to move things to may be made: it lets nobody move anything.
        return {
            (path, path.read_bytes() if path.is_file() else b"")
            for path in found
            if any_file(path) and "op" not in path.parts
        }

    before = names()
    (home.hidden / "lock").write_bytes(of_elsewhere())
    with contextlib.suppress(DirectoryInUseError):
        assert act() == []
    assert names() == before
    monkeypatch.undo()
    home.close()


def any_file(path):
    return path.is_symlink() or path.is_file() or any(one.is_file() for one in path.rglob("*"))


def test_one_process_opens_a_directory_once(home):
    """Two pipelines of one process in one directory would overwrite each other."""
    with pytest.raises(DirectoryInUseError, match="this process"):
        FileHome(home.path, lease_s=6).open()


def test_a_lease_of_another_host_is_taken_over_when_it_stands_still(tmp_path):
    """A requeued job on another machine resumes by itself once the dead holder's record has not changed for the lease."""
    hidden = tmp_path / "exp/.safe_ckpt"
    hidden.mkdir(parents=True)
    (hidden / "lock").write_bytes(of_elsewhere(lease_s=2.0))
    home = FileHome(tmp_path / "exp", lease_s=2)
    begun = time.monotonic()
    home.open()
    assert 1.5 < time.monotonic() - begun < 6
    home.confirm()
    home.close()


def test_a_lost_lease_is_noticed_before_a_commit(home):
    """When another job has taken over, this one may not rename anything into place any more; it is told by whom."""
    (home.hidden / "lock").write_bytes(of_elsewhere(pid=77))
    with pytest.raises(DirectoryInUseError, match="took the directory over") as caught:
        home.confirm()
    assert (caught.value.host, caught.value.pid) == ("elsewhere", 77)
    (home.hidden / "lock").unlink()
    with pytest.raises(DirectoryInUseError, match="its lock is gone"):
        home.confirm()


def test_what_fails_since_another_job_has_the_directory_is_told_by_the_name_of_that_job(home):
    """It has swept the files away: that the disk has not found them is not what the user has to know."""
    publication = _publication(home)
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", str(home.pending / "op/step-2/f"))
    assert isinstance(publication.explain(missing, rank=0, phase="write"), DirectoryError)
    (home.hidden / "lock").write_bytes(of_elsewhere(pid=77))
    told = publication.explain(missing, rank=0, phase="write")
    assert isinstance(told, DirectoryInUseError)
    assert (told.host, told.pid) == ("elsewhere", 77)


@pytest.mark.parametrize("make", [lambda p: p.write_text("x"), lambda p: p.symlink_to("/dev/null")])
def test_a_file_in_the_way_is_named(tmp_path, make):
    """A path that is no directory is refused with its name, and left alone."""
    path = tmp_path / "exp"
    make(path)
    with pytest.raises(DirectoryError) as caught:
        FileHome(path, lease_s=6).open()
    assert str(path) in str(caught.value)
    assert not path.is_dir()


def test_discarding_a_checkpoint_that_is_gone_is_no_error(home):
    """What is deleted is renamed away first; what is gone already is no error."""
    (home.path / "step-1").mkdir()
    assert home.discard([home.path / "step-1", home.path / "step-2"]) == [home.path / "step-1"]
    assert not any(home.trash.iterdir())


def test_quarantine_keeps_two_checkpoints_of_one_name(home):
    """Two damaged checkpoints of one name are both kept."""
    for word in ("a", "b"):
        (home.path / "step-1").mkdir()
        (home.path / "step-1" / "f").write_text(word)
        home.quarantine(home.path / "step-1")
    assert sorted((path / "f").read_text() for path in home.quarantined()) == ["a", "b"]


def test_the_record_of_a_lock_can_be_read_by_people(home):
    """The lock is a record that a person can read."""
    record = json.loads((home.hidden / "lock").read_text())
    assert (record["host"], record["pid"]) == (socket.gethostname(), os.getpid())
    assert record["started_at"].startswith("20")


@pytest.mark.parametrize(
    "name",
    ["step-1", "loss%2F0.5", "100%25", "sub/of%2F the user/step-1", f"{'é' * 60}/{'ä' * 60}", "\udcff/step-1"],
    ids=["plain", "a slash that is none", "a percentage", "below", "long", "no text"],
)
def test_replacing_without_exchange_survives_each_step(tmp_path, monkeypatch, caplog, name):
    """Where the kernel cannot exchange names: killed after each rename, the old or the new is there after a restart."""
    caplog.set_level(logging.CRITICAL, "safe_ckpt")  # xdist cannot pass on a name that is no text
    exchange_no_names(monkeypatch)
    for stop_after in range(4):
        exp = tmp_path / f"exp{stop_after}"
        home = FileHome(exp, lease_s=6)
        home.open()
        final = exp / name
        final.mkdir(parents=True)
        checkpoint(final, {"f": b"old"})
        staged = home.make_pending("op") / final.name
        staged.mkdir()
        checkpoint(staged, {"f": b"new"})
        renames = iter(range(stop_after))
        real = durable.os.rename

        def rename(one, other, renames=renames, real=real):
            if next(renames, None) is None:
                raise KeyboardInterrupt
            real(one, other)

        with monkeypatch.context() as patched:
            patched.setattr(durable.os, "rename", rename)
            with contextlib.suppress(KeyboardInterrupt):
                durable.publish_directory(staged, final, home.aside("op", final))
        home.close()
        again = FileHome(exp, lease_s=6)
        again.open()
        assert (final / "f").read_bytes() in (b"old", b"new")
        assert (final / "f").read_bytes() == (b"old" if stop_after == 0 else b"new")
        again.close()
        assert [path.parent for path in exp.rglob("f")] == [final]


def test_tidying_up_a_failed_replacement_keeps_the_only_copy(tmp_path):
    """A replacement that failed half-way: tidying up after it does not delete the only copy, and the next start restores it."""
    home = FileHome(tmp_path, lease_s=60)
    home.open()
    (home.make_pending("op") / "step-00000001").mkdir()  # the new one, which did not get the name
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001/f").touch()
    os.rename(tmp_path / "step-00000001", home.aside("op", home.path / "step-00000001"))
    home.drop_pending("op")
    home.close()
    again = FileHome(tmp_path, lease_s=60)
    again.open()
    again.close()
    assert (tmp_path / "step-00000001/f").exists()


@pytest.mark.parametrize("left", ["half", "whole"])
def test_what_a_power_cut_left_half_deleted_gets_no_name(tmp_path, left):
    """A power cut may bring back the folder of a save that was over, and with it what that save replaced. What is half deleted
    does not get its name again, and what is whole may.
    """
    step = tmp_path / "step-00000001"
    checkpoint(step, {"f": b"old"})
    aside = tmp_path / ".safe_ckpt/trash/op" / step.name
    (tmp_path / ".safe_ckpt/pending/op").mkdir(parents=True)
    aside.parent.mkdir(parents=True)
    step.rename(aside)
    if left == "half":
        (aside / "manifest.json").unlink()
    again = FileHome(tmp_path, lease_s=60)
    again.open()
    again.close()
    assert step.exists() == (left == "whole")


@pytest.mark.parametrize("swept", [False, True])
def test_the_folder_of_a_save_is_gone_for_good_before_what_it_replaced(tmp_path, monkeypatch, swept):
    """By the folder of its save the next start tells what was set aside: its end is durable before a file of the old one goes,
    after a save, and when a start removes what an earlier job left. The disk keeps no order by itself.
    """
    home = FileHome(tmp_path, lease_s=60)
    home.open()
    home.make_pending("op")
    step = tmp_path / "step-00000001"
    for folder in (step, home.aside("op", step)):
        folder.mkdir()
        (folder / "f").write_text(str(folder))
    seen = []

    def synced(path, real=durable.sync_directory):
        real(path)
        if path == str(home.pending):
            seen.append(sorted(path.name for path in home.pending.iterdir()))

    def removed(path, real=durable.remove_tree):
        if list(path.rglob("f")):
            assert seen == [[]], f"{path} is deleted"
        real(path)

    monkeypatch.setattr(durable, "sync_directory", synced)
    monkeypatch.setattr(durable, "remove_tree", removed)
    if swept:
        home.close()
        home.open()
    else:
        home.drop_pending("op")
    home.close()
    assert seen == [[]]
    assert list(tmp_path.rglob("f")) == [step / "f"]


def test_what_lies_in_the_folder_of_a_save_is_there_for_good_before_it_is_swept(tmp_path, monkeypatch):
    """It may have had its name, which was taken back: that is made durable before its files go, else a power cut brings the
    name back without them.
    """
    left = tmp_path / ".safe_ckpt/pending/op"
    (left / "step-00000001").mkdir(parents=True)
    checkpoint(left / "step-00000001", {"f": b"x"})
    seen = []

    def synced(path, real=durable.sync_directory):
        real(path)
        seen.append(path)

    def removed(path, real=durable.remove_tree):
        assert str(left) in seen or not list(path.rglob("f")), f"{path} is deleted"
        real(path)

    monkeypatch.setattr(durable, "sync_directory", synced)
    monkeypatch.setattr(durable, "remove_tree", removed)
    home = FileHome(tmp_path, lease_s=60)
    home.open()
    home.close()
    assert not left.exists()


def test_a_record_that_cannot_be_written_gives_the_lock_back(tmp_path, monkeypatch):
    """A full disk at the moment of taking the lock: a typed error, and the same process can try again."""
    home = FileHome(tmp_path, lease_s=60)
    with monkeypatch.context() as patch:
        patch.setattr(
            JobLock, "_with_kernel_lock", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(DirectoryError, match="No space"):
            home.open()
    home.open()
    home.close()


@pytest.mark.parametrize("name", ["", "pending", "staging", "trash", "quarantine"])
def test_a_hidden_folder_that_is_a_link_is_refused_and_not_swept(tmp_path, name):
    """A hidden folder that is a link is refused by name: sweeping it would delete somebody else's files."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept")
    link = tmp_path / "held" / ".safe_ckpt" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(DirectoryError, match="is a link") as caught:
        FileHome(tmp_path / "held", lease_s=60.0).open()
    assert caught.value.path == str(link).rstrip("/")
    assert (elsewhere / "precious").read_text() == "kept"


@pytest.mark.parametrize("name", [".safe_ckpt", ".safe_ckpt/names"])
def test_a_link_above_a_hidden_folder_is_not_followed(tmp_path, name):
    """A directory that is named by itself has its hidden folder further down: no part of the way there may be a link."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "held" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(DirectoryError, match="is a link"):
        FileHome(tmp_path / "held", lease_s=60.0, hidden=tmp_path / "held/.safe_ckpt/names/weights").open()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_directory_behind_a_link_is_one(tmp_path):
    """The checkpoint directory itself may be a link, as users have them to a larger disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "held").symlink_to(tmp_path / "disk", target_is_directory=True)
    home = FileHome(tmp_path / "held", lease_s=60.0)
    home.open()
    home.close()


def test_a_name_that_cannot_be_is_a_directory_error(tmp_path):
    """What the kernel refuses to look at is the same named error as what it refuses to create."""
    with pytest.raises(DirectoryError, match="creating the checkpoint directory"):
        FileHome(tmp_path / ("n" * 300), lease_s=60.0).open()


def test_a_directory_that_nothing_was_saved_into_is_removed_at_the_end(tmp_path):
    """A directory that nothing was saved into leaves no trace, one that was there stays, and what somebody put there, too."""
    home = FileHome(tmp_path / "a/b/exp", lease_s=6)
    home.open()
    home.aside("op", home.path / "x")
    home.drop_pending("op")
    home.close()
    home.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "exp").mkdir()
    home = FileHome(tmp_path / "exp", lease_s=6)
    home.open()
    home.close()
    assert list((tmp_path / "exp").iterdir()) == []
    home.open()
    (home.hidden / "note").touch()
    home.close()
    assert list(home.hidden.iterdir()) == [home.hidden / "note"]


def test_nothing_of_a_job_that_took_over_is_taken_away(tmp_path):
    """A job that ends when another one has its directory leaves that one's folders alone."""
    home = FileHome(tmp_path / "exp", lease_s=6)
    home.open()
    (home.hidden / "lock").write_bytes(of_elsewhere())
    home.close()
    assert home.pending.is_dir()
    assert (home.hidden / "lock").exists()


def test_jobs_that_end_and_begin_at_once_do_not_disturb_each_other(tmp_path):
    """One job after the other has the directory, two processes at a time; each either gets it, or is told that it is in use."""
    command = [sys.executable, program_path("holds_in_turn"), tmp_path / "a/exp"]
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [job.communicate(timeout=100)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert not any(path.is_file() or path.name == ".safe_ckpt" for path in tmp_path.rglob("*"))


def test_empty_folders_of_others_stay(tmp_path):
    """Nothing was saved: what this opening made is taken away, not what an earlier one had made and the user has since."""
    home = FileHome(tmp_path / "runs/exp", lease_s=6)
    home.open()
    home.close()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    home.open()
    home.close()
    assert (tmp_path / "runs").is_dir()
    assert not (tmp_path / "runs/exp").exists()


def test_folders_that_a_killed_job_made_are_durable_after_the_next_start(tmp_path, monkeypatch):
    """Whoever made them may have died before it synced their entries: with one of them a power cut would take all saves."""
    path = tmp_path / "a/b/run"
    (path / ".safe_ckpt").mkdir(parents=True)
    synced, real = set(), durable.sync_directory
    monkeypatch.setattr(durable, "sync_directory", lambda folder: synced.add(folder) or real(folder))
    home = FileHome(path, lease_s=6)
    home.open()
    home.close()
    assert {str(folder) for folder in (path, *path.parents[:3])} <= synced
