import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from kit.inside import exchange_no_names
from safe_ckpt import machine
from safe_ckpt.core.storage import durable
from safe_ckpt.errors import NotEnoughSpaceError


def folder(path, word):
    path.mkdir()
    (path / "f").write_text(word)
    return path


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_replaces_another_of_the_same_name(tmp_path, monkeypatch, can_exchange):
    """The new one has the name, the old one lies aside, with and without the kernel's exchange."""
    if not can_exchange:
        exchange_no_names(monkeypatch)
    final = folder(tmp_path / "final", "old")
    durable.publish_directory(folder(tmp_path / "staged", "new"), final, tmp_path / "aside")
    assert (final / "f").read_text() == "new"
    assert (tmp_path / "aside" / "f").read_text() == "old"
    assert not (tmp_path / "staged").exists()


def test_what_was_replaced_is_durable_aside_before_the_new_one_has_its_name(tmp_path, monkeypatch):
    """Where the kernel cannot exchange names: a power cut between the two renames must leave the old one somewhere."""
    exchange_no_names(monkeypatch)
    final, done, rename, sync = folder(tmp_path / "final", "old"), [], os.rename, durable.sync_directory
    (tmp_path / "trash").mkdir()

    def renamed(one, other):
        rename(one, other)
        done.append(Path(one).name)

    def synced(path):
        sync(path)
        done.append(Path(path).name)

    monkeypatch.setattr(durable.os, "rename", renamed)
    monkeypatch.setattr(durable, "sync_directory", synced)
    durable.publish_directory(folder(tmp_path / "staged", "new"), final, tmp_path / "trash/aside")
    assert done.index("final") < done.index("trash") < done.index("staged", done.index("final")), done


def test_exchange_swaps_two_names_or_says_that_it_cannot(tmp_path):
    """renameat2 either swaps or reports; where a name is missing it raises with both names."""
    one, other = folder(tmp_path / "one", "1"), folder(tmp_path / "other", "2")
    if not durable.exchange(one, other):
        pytest.skip("this kernel or file system has no exchange")
    assert ((one / "f").read_text(), (other / "f").read_text()) == ("2", "1")
    with pytest.raises(FileNotFoundError) as caught:
        durable.exchange(one, tmp_path / "missing")
    assert caught.value.filename == str(one)


def test_links_replace_what_had_the_name(tmp_path):
    """A hard link and a symbolic link take over an existing name in one step."""
    (tmp_path / "a").write_text("new")
    (tmp_path / "last").write_text("old")
    durable.publish_link(tmp_path / "a", tmp_path / "staged", durable.Link(path=tmp_path / "last"), Path)
    assert (tmp_path / "last").read_text() == "new"
    assert os.path.samefile(tmp_path / "a", tmp_path / "last")
    durable.publish_link(tmp_path / "a", tmp_path / "staged", durable.Link(path=tmp_path / "last", target="a"), Path)
    assert os.readlink(tmp_path / "last") == "a"


def test_made_directories_include_their_parents(tmp_path):
    """A deep directory is made in one call, and again without complaint."""
    durable.make_directory(tmp_path / "a/b/c")
    durable.make_directory(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()


@pytest.fixture
def synced(monkeypatch):
    """The folders whose entries were synced, in order."""
    real, found = durable.sync_directory, []
    monkeypatch.setattr(durable, "sync_directory", lambda folder: (real(folder), found.append(folder))[0])
    return found


def test_all_that_leads_to_a_directory_is_durable_whoever_made_it(tmp_path, synced):
    """A job that made folders may have been killed before it synced them. Once in a process: a save pays for no more."""
    (tmp_path / "a/b/c").mkdir(parents=True)
    durable.make_directory(tmp_path / "a/b/c")
    above = [str(tmp_path / "a/b"), str(tmp_path / "a"), str(tmp_path)]
    assert synced[:3] == above
    synced.clear()
    durable.make_directory(tmp_path / "a/b/c")
    assert synced == above[:1]


def test_a_folder_that_was_made_again_is_made_durable_again(tmp_path, synced):
    """Somebody removed it, and another job, which was killed, made it anew: what this process knew is of no use."""
    durable.make_directory(tmp_path / "a/b/c")
    (tmp_path / "a/b/c").rmdir()
    (tmp_path / "a/b").rmdir()
    (tmp_path / "a").rmdir()
    time.sleep(0.01)  # a file system tells times apart by ticks of 4 ms
    (tmp_path / "a/b/c").mkdir(parents=True)
    synced.clear()
    durable.make_directory(tmp_path / "a/b/c")
    assert synced[:3] == [str(tmp_path / "a/b"), str(tmp_path / "a"), str(tmp_path)]


def test_a_sync_that_failed_is_made_up_for(tmp_path, monkeypatch):
    """The folder is there after the error, its entry is not durable: the next call syncs it."""
    real, calls = durable.sync_directory, []

    def failing_once(folder):
        calls.append(folder)
        if len(calls) == 1:
            raise OSError(5, "Input/output error", folder)
        real(folder)

    monkeypatch.setattr(durable, "sync_directory", failing_once)
    with pytest.raises(OSError, match="Input/output"):
        durable.make_directory(tmp_path / "a/b")
    durable.make_directory(tmp_path / "a/b")
    assert calls[1:3] == [str(tmp_path / "a"), str(tmp_path)]


@pytest.mark.parametrize("number", [13, 107])
def test_what_is_out_of_reach_above_is_no_error(tmp_path, monkeypatch, number):
    """A parent that may not be opened, or a mount above that is dead: no job made folders there."""
    real = durable.sync_directory

    def refusing(folder):
        if folder == str(tmp_path):
            raise OSError(number, os.strerror(number), folder)
        real(folder)

    monkeypatch.setattr(durable, "sync_directory", refusing)
    durable.make_directory(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir()


def test_removing_what_is_gone_is_fine(tmp_path):
    """Files, links to folders, folders and nothing at all can be removed."""
    target = folder(tmp_path / "target", "x")
    (tmp_path / "link").symlink_to(target)
    durable.remove_tree(tmp_path / "link")
    assert target.exists()
    durable.remove_tree(target)
    durable.remove_tree(target)
    assert not target.exists()


def test_a_failed_replacement_puts_the_old_one_back(tmp_path, monkeypatch):
    """Without the exchange, the second rename fails: the old directory has its name again, the new one is where it was."""
    exchange_no_names(monkeypatch)
    rename = os.rename

    def flaky(source, target):
        if os.path.basename(source) == "staged":
            raise OSError(5, "Input/output error", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", flaky)
    final, staged = folder(tmp_path / "final", "old"), folder(tmp_path / "staged", "new")
    with pytest.raises(OSError, match="Input/output"):
        durable.publish_directory(staged, final, tmp_path / "aside")
    assert (final / "f").read_text() == "old"
    assert (staged / "f").read_text() == "new"


@pytest.mark.parametrize(("kind", "there"), [("directory", False), ("file", False), ("file", True)])
def test_a_rename_that_was_done_is_no_failure_whatever_the_host_remembers(tmp_path, monkeypatch, kind, there):
    """The server did it and its answer was lost. Until the folder is listed, the host sees what the name was before."""
    final, staged, listed = tmp_path / "final", tmp_path / "staged", []
    for path in (final, staged) if there else (staged,):
        folder(path, path.name) if kind == "directory" else path.write_text(path.name)
    lstat, listdir = os.lstat, os.listdir
    before = lstat(final) if there else None

    def remembered(path, **options):
        if os.fspath(path) != str(final) or listed:
            return lstat(path, **options)
        if before is None:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return before

    def without_an_answer(rename):
        def done(source, target):
            rename(source, target)
            if os.fspath(target) == str(final):
                raise OSError(5, "Input/output error", str(source))

        return done

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, without_an_answer(getattr(os, name)))
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    monkeypatch.setattr(os, "lstat", remembered)
    durable.publish(staged, final, lambda: tmp_path / "aside")
    assert (final / "f" if kind == "directory" else final).read_text() == "staged"


def test_a_rename_that_was_refused_is_refused_also_in_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    """One may have the right to go through it and none to read it: nothing was committed, and nobody says that it may be."""
    folder(tmp_path / "staged", "new")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError):
        durable.publish(tmp_path / "staged", tmp_path / "final", lambda: tmp_path / "aside")


def test_a_copy_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    """Across a mount, onto a full disk: no temporary file stays beside the final name."""

    def cross(source, target):
        raise OSError(18, "Invalid cross-device link", str(source))

    def full(source, target):
        target.write_text("half")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", cross)
    monkeypatch.setattr(durable.shutil, "copyfile", full)
    (tmp_path / "staged").write_text("new")
    (tmp_path / "to").mkdir()
    with pytest.raises(OSError, match="No space"):
        durable.publish_file(tmp_path / "staged", tmp_path / "to/final")
    assert os.listdir(tmp_path / "to") == []


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_rename_that_the_disk_does_not_confirm_is_taken_back(tmp_path, monkeypatch, can_exchange, there):
    """fsync of the parent fails after the new name is there: what had the name has it again, and the new one is in pending."""
    if not can_exchange:
        exchange_no_names(monkeypatch)
    final, staged = tmp_path / "final", folder(tmp_path / "staged", "new")
    if there:
        folder(final, "old")
    real = durable.sync_directory

    def flaky(path):
        if path == str(tmp_path) and final.exists() and (final / "f").read_text() == "new":
            raise OSError(5, "Input/output error", path)
        real(path)

    monkeypatch.setattr(durable, "sync_directory", flaky)
    with pytest.raises(OSError, match="Input/output"):
        durable.publish_directory(staged, final, tmp_path / "aside")
    assert (final / "f").read_text() == "old" if there else not final.exists()
    assert (staged / "f").read_text() == "new"
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    monkeypatch.setattr(durable, "sync_directory", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        durable.publish_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith(".old")) == []


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_what_was_taken_back_is_durable_or_its_outcome_is_unknown(tmp_path, monkeypatch, can_exchange, there, again):
    """The new one is deleted next. So that a power cut does not bring its name back without its files, both folders are synced
    behind the way back; where the disk refuses that, too, nothing may be deleted.
    """
    if not can_exchange:
        exchange_no_names(monkeypatch)
    for name in ("pending", "trash"):
        (tmp_path / name).mkdir()
    final, staged, seen, before = tmp_path / "final", folder(tmp_path / "pending/staged", "new"), [], []
    if there:
        folder(final, "old")
    real = durable.sync_directory

    def flaky(path):
        if path == str(tmp_path):
            seen.append((final / "f").read_text() if final.exists() else None)
            if again or seen == ["new"]:
                raise OSError(5, "Input/output error", path)
        elif path == str(staged.parent):
            before.append(len(seen))
        real(path)

    monkeypatch.setattr(durable, "sync_directory", flaky)
    with pytest.raises(OSError, match="Input/output") as caught:
        durable.publish_directory(staged, final, tmp_path / "trash/aside")
    assert seen == ["new", "old" if there else None]
    assert before == ([] if again else [2])
    assert isinstance(caught.value, durable.HalfCommittedError) == again


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("old", ["file", "directory"])
def test_a_file_and_a_directory_replace_each_other(tmp_path, monkeypatch, can_exchange, old):
    """A single-file checkpoint takes the name of a sharded one and the other way round; nothing is left beside it."""
    if not can_exchange:
        exchange_no_names(monkeypatch)
    final, staged = tmp_path / "final", tmp_path / "staged"
    for path, is_file in ((final, old == "file"), (staged, old == "directory")):
        if is_file:
            path.write_text(path.name)
        else:
            folder(path, path.name)
    durable.publish(staged, final, lambda: tmp_path / ".final.old")
    assert (final if old == "directory" else final / "f").read_text() == "staged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final"]


def test_a_directory_gets_a_further_name(tmp_path):
    """Its files are hard links; a file that had the name is replaced."""
    folder(tmp_path / "a", "new")
    (tmp_path / "last").write_text("old")
    link = durable.Link(path=tmp_path / "last")
    durable.publish_link(tmp_path / "a", tmp_path / "staged", link, lambda: tmp_path / ".last.old")
    assert os.path.samefile(tmp_path / "a/f", tmp_path / "last/f")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "last"]


@pytest.mark.skipif(not durable.is_in_memory(Path("/dev/shm")), reason="no file system in memory here")
def test_what_is_free_in_memory_is_what_the_host_and_the_control_group_have_left(tmp_path, monkeypatch):
    """A tmpfs says that half of the host is free: who takes it is killed. On a disk memory is not asked."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    on_disk = durable.free_bytes(tmp_path)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert durable.free_bytes(Path(folder)) == 1000
        with pytest.raises(NotEnoughSpaceError) as caught:
            durable.require_space(Path(folder), 1001, "why")
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (1001, 1000)
    assert durable.is_in_memory(tmp_path) or on_disk > 1000
    for unlimited in (None, 1 << 60):
        monkeypatch.setattr(machine, "available_bytes", lambda left=unlimited: left)
        assert durable.free_bytes(Path("/dev/shm")) == shutil.disk_usage("/dev/shm").free


def test_the_kind_of_a_file_system_is_that_of_its_device(tmp_path):
    """Mounts are told by their numbers: a path may be anything, and other lines say nothing of it."""
    device = os.stat(tmp_path).st_dev
    number, other = f"{os.major(device)}:{os.minor(device)}", "0:9999"
    line = "{} 1 {} / /a rw,relatime shared:1 - {} source rw"
    for rows, expected in (
        ([line.format(20, other, "tmpfs"), line.format(21, number, "ext4")], False),
        ([line.format(20, other, "ext4"), "broken", line.format(21, number, "tmpfs")], True),
        ([line.format(21, number, "ramfs")], True),
        ([line.format(21, number, "tmpfs").replace("shared:1 ", "")], True),
        ([], False),
    ):
        table = tmp_path / "table"
        table.write_text("\n".join(rows))
        assert durable.is_in_memory(tmp_path, table) is expected
