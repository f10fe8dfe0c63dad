"""Another job takes the directory over at every moment of what a job does in it: what it did not know of changes nothing.

The job that takes over does so for real: it has the lock, and has moved away, repaired and swept what lay there, before the
first one goes on. A row for each thing that gives a name in a directory, or takes one away; the source says whether all are
here.
"""

import contextlib
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kit import names
from kit.inside import exchange_no_names, lock_in, lock_of
from kit.limits import QUICK
from kit.manifests import checkpoint
from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.file_lock import JobLock
from safe_ckpt.core.home.home import HIDDEN, Additions, NewCheckpoint, Pointer
from safe_ckpt.core.home.lease import own_lease
from safe_ckpt.core.storage.durable import Link
from safe_ckpt.errors import SafeCheckpointError

# Which functions of the room need no row, with the reason.
EXCUSED = {
    "core.home.file_lock:_put_back": "the lock itself: tests/unit/home/test_lock.py",
    "core.home.file_lock:JobLock._waited_s": "a record of how long somebody has waited",
    "core.home.extra_files:keep_foreign": "names in the folder of the save, which a job that takes over moves away: commit",
    "core.home.file_lock:JobLock._sweep": "what is left of locks: tests/unit/home/test_lock.py",
    "core.home.pins.shelf:FileShelf.write": "the word of a reader, which is no job",
    "core.home.pins.shelf:FileShelf.remove": "likewise",
    "core.home.file_home:FilePublication.prepare": "names in the folder of the save, as above",
    "core.home.file_home:FileHome._delete": "of what lies in the trash, or in a save's own folder",
}
# Those of directories on several hosts: tests/multirank/test_hosts_of_their_own.py.
_OF_OTHER_JOBS = (
    "core.home.host_home",
    "core.home.holders",
    "core.home.objects.home",
    "core.home.objects.lock",
    "core.home.objects.head",
)


def opened(path):
    home = FileHome(path, lease_s=60)
    home.open()
    return home


def published(path, *, kind="directory", taken=False, **what):
    """A save that is complete, and what commits it."""
    name = "step-2" if kind == "directory" else "two.ckpt"
    if taken:
        checkpoint(path / name, {"f": b"old"}) if kind == "directory" else (path / name).write_text("old")
    home = opened(path)
    new = NewCheckpoint(
        path=path / name,
        manifest=Manifest(name=name, sequence=9, step=2, world_size=1, files=()),
        op_id="op",
        kind=kind,
        additions=Additions(**what),
    )
    publication = home.begin(new, QUICK)
    publication.prepare()
    entries = checkpoint(path.parent / "written", {name: b"new", "f": b"new"}).files
    if kind == "file":
        (publication.folder / name).write_bytes(b"new")
        entries = [one for one in entries if one.path == name]
    else:
        (publication.folder / "f").write_bytes(b"new")
        entries = [one for one in entries if one.path == "f"]

    def commit():
        info = publication.commit(entries, {}, lambda: None)
        publication.clean_up()
        return info

    return home, commit


def named(path, target=None, *, kind="file", taken=False):
    """A save of one name that has a further one; where that is taken, by what another save made."""
    link = Link(path=path / "last", target=target)
    if taken:
        checkpoint(path / "last", {"f": b"old"}) if kind == "directory" else (path / "last").write_text("old")
    return published(path, kind=kind, links=[link])


def pointing(path):
    (path / "latest").write_text("step-1")
    pointer = Pointer(path=path / "latest", data=b"step-2", is_for_resume=True)
    return published(path, pointers=[pointer])


def discards(path, name):
    home = opened(path)
    return home, lambda: home.discard([path / name])


def discards_what_a_reader_holds_late(path):
    """The pin is not seen before it is moved aside, as on a network file system."""
    home = opened(path)
    home._refuse_held = held_late(home)
    return home, lambda: home.discard([path / "step-1"])


def held_late(home):
    def refuse(path):
        if not path.exists():
            raise OSError(errno.EBUSY, "a reader holds it", str(path))

    return refuse


def aborted(path):
    home, _ = published(path)
    return home, lambda: home.drop_pending("op")


def closed(path):
    home = opened(path)
    return home, home.close


def started(path, *lefts):
    """The start of a job where another one has left this: it is the start itself that is overtaken."""
    for left in lefts:
        checkpoint(path / HIDDEN / left, {"f": b"left"})
    home = FileHome(path, lease_s=60)
    return home, home.open


def locked(path):
    """A lock that is taken where a dead job's lies, and given back."""
    (path / HIDDEN).mkdir()
    left = own_lease(token="left", started_at="2026-01-01T00:00:00+00:00", lease_s=60.0)
    (path / HIDDEN / "lock").write_bytes(replace(left, process_start=1).to_bytes())
    lock = lock_in(path / HIDDEN, subject=path)

    def take_and_release():
        lock.acquire()
        lock.release()

    return None, take_and_release


ROWS = {
    "a new one": published,
    "one that replaces": lambda path: published(path, taken=True),
    "one that replaces by two renames": lambda path: published(path, taken=True),
    "a new file": lambda path: published(path, kind="file"),
    "a file that replaces": lambda path: published(path, kind="file", taken=True),
    "a further name by a symbolic link": lambda path: named(path, "two.ckpt"),
    "a further name by a hard link": named,
    "a further name of a file where one is": lambda path: named(path, taken=True),
    "a further name of a directory": lambda path: named(path, kind="directory"),
    "a further name of a directory where one is": lambda path: named(path, kind="directory", taken=True),
    "a pointer": pointing,
    "a deletion": lambda path: discards(path, "step-1"),
    "a deletion of a file": lambda path: discards(path, "one.ckpt"),
    "a deletion on a full disk": lambda path: discards(path, "one.ckpt"),
    "a deletion that is taken back": discards_what_a_reader_holds_late,
    "a quarantine": lambda path: (home := opened(path), lambda: home.quarantine(path / "step-1")),
    "a save that is given up": aborted,
    "the end of a job": closed,
    "a start": started,
    "a start that sweeps": lambda path: started(
        path, "pending/left", "trash/left", "kept/left", "quarantine/.moving-x"
    ),
    "a start that takes what an earlier version left": lambda path: started(path, "staging/left"),
    "a start that repairs": lambda path: started(path, "pending/op2/step-9", "trash/op2/step-9"),
    "the lock": locked,
}
# Behind the look at the lock nothing can be asked any more, and this is no rename from a folder that a job that takes over
# moves away: the file system is full, and not even a folder can be made.
INHERENT = {"a deletion on a full disk": "os.remove"}


def made(folder, row, patch):
    """A directory with a few checkpoints, and what the row does in it."""
    path = folder / "exp"
    checkpoint(path / "step-1", {"f": b"x"})
    (path / "one.ckpt").write_text("one")
    home, act = ROWS[row](path)
    if row == "one that replaces by two renames":
        exchange_no_names(patch)
    if row == "a deletion on a full disk":
        mkdir = Path.mkdir

        def full(one, *given, **more):
            if home is not None and one.parent == home.trash:
                raise OSError(errno.ENOSPC, "No space left on device", str(one))
            mkdir(one, *given, **more)

        patch.setattr(Path, "mkdir", full)
    return path, home, act


def files_in(path):
    """What has a name, but for the lock and empty folders."""
    return {
        str(one.relative_to(path)): os.readlink(one) if one.is_symlink() else one.read_bytes()
        for one in path.rglob("*")
        if (one.is_symlink() or one.is_file()) and not one.name.startswith("lock")
    }


class Overtaken:
    """Takes the directory over at the n-th thing that the first job does, and saves something of its own."""

    def __init__(self, path, patch, at):
        self.path, self.at, self.events = path, at, []
        self.patch, self.second, self.files = patch, None, {}

    def is_first(self, lock):
        """Whether a lock is that of the first job."""
        return self.second is None or lock is not lock_of(self.second)

    def __call__(self, event):
        self.events.append(event)
        if len(self.events) != self.at:
            return
        with self.patch.context() as whole:
            whole.setattr(Path, "mkdir", _MKDIR)
            (self.path / HIDDEN / "lock").unlink(missing_ok=True)
            self.second = opened(self.path)
            self.second.trash.mkdir(exist_ok=True)
            theirs = self.second.make_pending("theirs") / "step-3"
            checkpoint(theirs, {"f": b"theirs"})
            for name in ("step-4", "step-2"):  # it goes on from the same step, and gives the same names
                if not (self.path / name).exists():
                    checkpoint(self.path / name, {"f": b"theirs"})
            self.files = files_in(self.path)


_MKDIR = Path.mkdir


def overtaken(folder, row, patch, at):
    """Let another job take over at this moment. Returns it, and what the first one said: an error, or what it returned."""
    path, home, act = made(folder, row, patch)
    other = Overtaken(path, patch, at)
    look = FileHome.confirm
    patch.setattr(FileHome, "confirm", lambda self: (other("look") if self is home else None, look(self))[1])
    seen = JobLock.is_seen.fget
    patch.setattr(
        JobLock, "is_seen", property(lambda self: (other("look") if other.is_first(self) else None, seen(self))[1])
    )
    said = None
    with names.hearing(path, other):
        try:
            said = act()
        except (SafeCheckpointError, OSError) as error:
            said = error
    patch.undo()
    return path, home, other, said


@pytest.mark.parametrize("row", ROWS)
def test_who_is_overtaken_at_any_moment_changes_nothing_of_the_next_job(tmp_path, monkeypatch, row):
    """Whatever the first job was about to do: what the one that took over found, made and began is there, as it was."""
    at, moments = 0, None  # the first time nobody takes over: it says how many moments there are
    while moments is None or at < moments:
        at += moments is not None
        folder = tmp_path / str(at)
        folder.mkdir()
        with monkeypatch.context() as patch:
            path, home, other, said = overtaken(folder, row, patch, at)
        if not at:
            moments = len(other.events)
            if home is not None:
                home.close()
            continue
        assert other.second is not None, f"moment {at} of {moments} did not come again"
        where = f"taken over before {other.events[at - 1]}, number {at} of {other.events}, and the first said {said!r}"
        if other.events[at - 1] != INHERENT.get(row):
            left = files_in(path)
            assert {name: left.get(name) for name in other.files} == other.files, where
            new = {name for name in left.keys() - other.files.keys() if not name.startswith(HIDDEN)}
            assert not new, where
            # Empty as it is. Behind the look an empty folder may go: whoever needs it makes it again.
            assert other.second.trash.is_dir() or other.events[at - 1] != "look", where
        other.second.confirm()
        with contextlib.suppress(SafeCheckpointError, OSError):
            if home is not None:
                home.close()
        other.second.confirm()
        other.second.close()
    assert moments > 1


def test_every_function_of_the_room_that_gives_or_takes_a_name_is_overtaken_above(tmp_path, monkeypatch):
    """By the source: one that is new, and that no row above comes through, is found."""
    reached = set()
    for number, row in enumerate(ROWS):
        (tmp_path / str(number)).mkdir()
        with monkeypatch.context() as patch:
            path, home, act = made(tmp_path / str(number), row, patch)
            with names.watched(path, removals=True) as seen:
                act()
        reached |= seen
        if home is not None:
            home.close()
    found = {one for one in names.places(names.removes, "core/home") if not one.startswith(_OF_OTHER_JOBS)}
    assert found - reached - EXCUSED.keys() == set(), "give it a row here"
    assert EXCUSED.keys() - found == set()
