"""Everything that gives a name, beside the saves of ``sweep.py``: what each row of the sweep of power cuts does and finds.

A row is a scenario of ``sweep.py``: its second save is at stake. ``find`` begins as the next job does, and says which save is
there: 0 for none; it raises for a mix, for half of one, and for what was there and is gone.
"""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from unittest import mock

import torch
from safetensors.torch import load_file
from sweep import CONFIG, TIMES, Accelerated, Directories, Numbered, number_of, request_of, state

from kit import inside
from safe_ckpt import (
    Checkpointer,
    consolidate_offloaded,
    publishing,
    restore_offloaded,
    set_up_directory,
)
from safe_ckpt.adapters.one_shot import save_archive, sequence_beside
from safe_ckpt.core.formats.manifest import FileEntry, read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.home import HIDDEN, Pointer
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.names import NamedHomes
from safe_ckpt.core.saving.request import Destination
from safe_ckpt.core.storage import durable
from safe_ckpt.extensions.mirror import fetching
from safe_ckpt.tools.inspection import fetch as fetched


@contextlib.contextmanager
def without_links():
    """A file system with neither hard nor symbolic links, and copies of which a trace has the bytes."""

    def refuse(*_, **__):
        raise OSError(errno.ENOTSUP, "no links")

    with (
        mock.patch.object(os, "link", refuse),
        mock.patch.object(os, "symlink", refuse),
        mock.patch.object(shutil, "_USE_CP_SENDFILE", False),
    ):
        yield


@contextlib.contextmanager
def held(folder):
    """As the next job holds a directory that holds checkpoints: what an earlier one left is repaired and swept."""
    home = FileHome(folder, lease_s=60)
    home.open()
    try:
        yield home
    finally:
        home.close()


def begun_again(path):
    """As the next job that replaces ``path`` begins."""
    engine = Engine(CONFIG)
    try:
        NamedHomes(engine).hold(path)
    finally:
        engine.close()


def words(number):
    """Files of one number, one of them in a folder."""
    return {"f": f"{number}" * 1000, "deep/f": f"{number}" * 3000}


def write_words(folder, number):
    for name, text in words(number).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def number_in(folder):
    """Which number's files these are; 0 where nothing has the name."""
    if not os.path.lexists(folder):
        return 0
    for number in (1, 2):
        if all(
            (folder / name).is_file() and (folder / name).read_text() == text for name, text in words(number).items()
        ):
            return number
    raise AssertionError(f"{[(str(path), path.stat().st_size) for path in folder.rglob('*')]}")


class Row(Numbered):
    """See the module.

    Attributes:
        old: whether there is a first save.
        before: what may be found before the second one was reported.
        after: what may be found behind that.
        least: how often each is found at least.
        keeps_lock: whether what becomes of the lock file is part of it.
    """

    least = 3

    def __init__(self, *, old):
        self.old = old

    def outside(self, folder, name):
        """What lies on another disk, which keeps what it has."""
        return folder.parent / "outside" / name


class FurtherName(Row):
    """A name such as last, as a link, as hard links, and as a copy."""

    def __init__(self, how, kind, *, old):
        super().__init__(old=old)
        self.how, self.kind = how, kind

    def make(self, path, number):
        if self.kind == "file":
            path.write_text(words(number)["f"])
        else:
            write_words(path, number)

    def prepare(self, folder):
        folder.mkdir()
        self.make(folder / "a", 2)
        if self.old:
            self.make(folder / "last", 1)

    def act(self, folder, reported):
        home = FileHome(folder, lease_s=60)
        home.open()
        staged = home.make_pending("op") / "link0-last"
        durable.sync_directory(str(home.pending))
        link = durable.Link(path=folder / "last", target="a" if self.how == "symbolic links" else None)
        with without_links() if self.how == "copies" else contextlib.nullcontext():
            durable.publish_link(folder / "a", staged, link, lambda: home.aside("op", folder / "last"))
        reported()
        home.drop_pending("op")
        home.close()

    def find(self, folder):
        with held(folder):
            pass
        last = folder / "last"
        if self.kind == "directory" or not last.exists():
            return number_in(last)
        return {words(number)["f"]: number for number in (1, 2)}[last.read_text()]


class Pointed(Row):
    """A small file that names the newest one, as DeepSpeed's ``latest``; the one before is removed."""

    def save(self, folder, number, reported=lambda: None):
        engine = Engine(CONFIG)
        name = f"step={number}"
        try:
            root = engine.hold(folder)
            to_delete = [path for path in folder.glob("step=*") if path.name != name]
            destination = Destination(home=root, path=folder / name, kind="directory")
            pointers = [Pointer(path=folder / "latest", data=name.encode())]
            engine.save(request_of(destination, "a.ckpt", number, to_delete, pointers=pointers)).result()
            reported()
        finally:
            engine.close()

    def find(self, folder):
        with held(folder):
            pass
        if not (folder / "latest").exists():
            return 0
        named = folder / (folder / "latest").read_text()
        verify_files(named, read_manifest(named))
        return number_of(torch.load(named / "a.ckpt", weights_only=True))


def copied_from(store):
    """In the place of what fetches from a store: the files of a checkpoint on another disk, and nothing made durable."""

    def fetch_verified(source, entries, into, *, limit_s):
        for entry in entries:
            (into / entry.path).parent.mkdir(parents=True, exist_ok=True)
            (into / entry.path).write_bytes((store / entry.path).read_bytes())

    return fetch_verified


class FromMirror(Row):
    """What a resume fetches from a mirror, to its place in the directory."""

    def __init__(self, *, old, single=False):
        super().__init__(old=old)
        self.single = single

    def prepare(self, folder):
        folder.mkdir()
        for number, run in ((1, folder), (2, self.outside(folder, "store"))):
            if number == 2 or self.old:
                if self.single:
                    run.mkdir(parents=True, exist_ok=True)
                    save_archive(state(number), run / "a.ckpt", sequence=sequence_beside(run / "a.ckpt"))
                else:
                    with Checkpointer(run, CONFIG) as ckpt:
                        ckpt.save(1, state(number)).result()

    def act(self, folder, reported):
        store = self.outside(folder, "store")
        manifest = read_manifest(store / "a.ckpt" if self.single else store / "step-00000001")
        if self.single:
            size = (store / "a.ckpt").stat().st_size
            entry = FileEntry(path="a.ckpt", size_bytes=size, xxh3_128="0" * 32, rank=0)
            facts = {"name": "a.ckpt", "single": True}
            manifest = dataclasses.replace(manifest, files=(entry,), notes={fetching.MIRRORED: facts})
        store /= "" if self.single else "step-00000001"
        with held(folder) as home, mock.patch.object(fetching, "fetch_verified", copied_from(store)):
            fetching.fetch_into(home, store, manifest, timeouts=TIMES)
            reported()

    def find(self, folder):
        if self.single:
            with held(folder):
                pass
            return archive_in(folder / "a.ckpt")
        return Directories(old=self.old).find(folder)


def archive_in(path):
    """The number of one file; 0 where nothing has the name."""
    if not path.exists():
        return 0
    verify_files(path, read_manifest(path))
    return number_of(torch.load(path, weights_only=True))


class FetchedByHand(FromMirror):
    """``safe-ckpt fetch``: nothing is replaced."""

    def __init__(self):
        super().__init__(old=False)

    def act(self, folder, reported):
        store = self.outside(folder, "store/step-00000001")
        notes = {fetching.MIRRORED: {"name": "step-00000001"}}
        manifest = dataclasses.replace(read_manifest(store), notes=notes)
        with (
            mock.patch.object(fetched, "_copy_at", return_value=manifest),
            mock.patch.object(fetched, "fetch_verified", copied_from(store)),
        ):
            fetched.fetch(store, folder)
        reported()

    def find(self, folder):
        return Directories(old=False).find(folder)


class Published(Row):
    """A folder that any saver has written, which is published: its files are on the disk by then."""

    def save(self, folder, number, reported=lambda: None):
        with publishing(folder, number, config=CONFIG) as pending:
            write_words(pending, number)
        reported()

    def find(self, folder):
        with held(folder):
            pass
        left = sorted(path for path in folder.iterdir() if path.name.startswith("step-"))
        for path in left:
            verify_files(path, read_manifest(path))
        return max(map(number_in, left), default=0)


class Exported(Row):
    """Weights alone, in a directory that is replaced with the user's files in it."""

    def __init__(self, *, old, exchange=True, links=True):
        super().__init__(old=old)
        self.exchange, self.links = exchange, links

    def prepare(self, folder):
        folder.mkdir()
        if self.old:
            self.save(folder, 1)
            (folder / "out/deep").mkdir()
            (folder / "out/deep/notes.txt").write_text("the user's")

    def save(self, folder, number, reported=lambda: None):
        exchange = durable.exchange if self.exchange else lambda *_: False
        with (
            Checkpointer(self.outside(folder, "run"), CONFIG) as ckpt,
            mock.patch.object(durable, "exchange", exchange),
            contextlib.nullcontext() if self.links else without_links(),
        ):
            ckpt.export(state(number)["model"], folder / "out").result()
            reported()

    def find(self, folder):
        begun_again(folder / "out")
        if not (folder / "out").exists():
            return 0
        verify_files(folder / "out", read_manifest(folder / "out"))
        found = load_file(folder / "out/model.safetensors")
        if self.old and (folder / "out/deep/notes.txt").read_text() != "the user's":
            raise AssertionError("a file of the user's")
        (number,) = {float(v) for v in found["w"].unique()} | {-float(v) for v in found["b"].unique()}
        return int(number)


class Consolidated(Row):
    """Folders of files that become one directory."""

    def save(self, folder, number, reported=lambda: None):
        write_words(self.outside(folder, f"nvme{number}"), number)
        consolidate_offloaded({"optimizer": self.outside(folder, f"nvme{number}")}, folder / "out")
        reported()

    def prepare(self, folder):
        folder.mkdir()
        super().prepare(folder)

    def find(self, folder):
        begun_again(folder / "out")
        if not (folder / "out").exists():
            return 0
        verify_files(folder / "out", read_manifest(folder / "out"))
        return number_in(folder / "out/optimizer")


class GivenBack(Row):
    """Consolidated files go to a rank's folder again, one by one: a call that was cut off is made once more."""

    def prepare(self, folder):
        folder.mkdir()
        write_words(self.outside(folder, "nvme"), 2)
        consolidate_offloaded({"optimizer": self.outside(folder, "nvme")}, self.outside(folder, "whole"))
        if self.old:
            write_words(folder / "target", 1)

    def act(self, folder, reported):
        restore_offloaded(self.outside(folder, "whole"), {"optimizer": folder / "target"})
        reported()

    def find(self, folder):
        whole = []
        for name in words(2):
            path = folder / "target" / name
            text = path.read_text() if path.exists() else ""
            whole.append({words(2)[name]: 2, words(1)[name]: 1, "": 0}[text] if path.exists() else 0)
        if self.old and 0 in whole:
            raise AssertionError(f"a file is gone: {whole}")
        return min(whole)


class OneFile(Row):
    """One file that is written at once, outside of a running pipeline."""

    def save(self, folder, number, reported=lambda: None):
        save_archive(state(number), folder / "a.ckpt", sequence=sequence_beside(folder / "a.ckpt"))
        reported()

    def prepare(self, folder):
        folder.mkdir()
        super().prepare(folder)

    def find(self, folder):
        return archive_in(folder / "a.ckpt")


class Weights(Row, Accelerated):
    """``save_model`` into a directory in which other things may lie: file by file, other numbers of files before and now."""

    def __init__(self, *, old, parts=(1, 2)):
        super().__init__(old=old)
        self.parts = parts

    def prepare(self, folder):
        (folder / "weights/state" / HIDDEN).mkdir(parents=True)  # such a directory is not replaced as a whole
        super().prepare(folder)

    def save(self, folder, number, reported=lambda: None):
        with self.registered(self.outside(folder, "run"), number) as (live, _, handle):
            limit = "1GB" if self.parts[number - 1] == 1 else 12_000
            handle.save_model(live.model, folder / "weights", max_shard_size=limit)
            reported()

    def find(self, folder):
        """As every loader of this layout reads it: the one file if it is there, else what the index refers to."""
        weights = folder / "weights"
        index, single = weights / "model.safetensors.index.json", weights / "model.safetensors"
        if not index.exists() and not single.exists():
            return 0
        if single.exists():
            found = load_file(single)
        else:
            places = json.loads(index.read_text())["weight_map"]
            found = {name: load_file(weights / file)[name] for name, file in places.items()}
        (number,) = {float(v) for v in found["w"].unique()} | {-float(v) for v in found["b"].unique()}
        return int(number)


class Overwritten(Row):
    """``mode="overwrite"``: what was there is moved away at once, and never comes back beside the new one."""

    before = (0, 1, 2)
    least = 1

    def __init__(self):
        super().__init__(old=True)

    def save(self, folder, number, reported=lambda: None):
        set_up_directory(folder / "run", mode="overwrite", timeout_s=20)
        with Checkpointer(folder / "run", CONFIG) as ckpt:
            ckpt.save(1, state(number)).result()
            reported()

    def prepare(self, folder):
        folder.mkdir()
        super().prepare(folder)

    def find(self, folder):
        return Directories(old=True).find(folder / "run") if (folder / "run").exists() else 0


class Quarantined(Row):
    """A damaged one is moved away: it stands at one of both places, whole, and what was found is found again."""

    after = (1, 2)

    def __init__(self):
        super().__init__(old=True)

    def prepare(self, folder):
        folder.mkdir()
        write_words(folder / "a", 1)

    def act(self, folder, reported):
        with held(folder) as home:
            home.quarantine(folder / "a")
            reported()

    def find(self, folder):
        with held(folder) as home:
            there = [path for path in (folder / "a", *home.quarantined()) if path.exists()]
        (path,) = there
        if number_in(path) != 1:
            raise AssertionError(f"{path} is empty")
        return 1 if path.parent == folder else 2


class StartedOver(Row):
    """The start of a job that finds what an earlier one left: a replacement in half, and what is only to be swept."""

    before = after = (1,)

    def __init__(self, *, formerly=False, quarantined=False):
        super().__init__(old=True)
        self.formerly, self.quarantined = formerly, quarantined

    def prepare(self, folder):
        with Checkpointer(folder, CONFIG) as ckpt:
            ckpt.save(1, state(1)).result()
        hidden = folder / HIDDEN
        pending = hidden / ("staging" if self.formerly else "pending")
        (pending / "op/step-00000001").mkdir(parents=True)
        (pending / "op/step-00000001/half").write_text("half of one")
        if self.quarantined:
            moving = hidden / "quarantine/.moving-x"
            moving.parent.mkdir(parents=True)
            os.rename(pending / "op", moving)
            return
        (hidden / "trash/op").mkdir(parents=True)
        os.rename(folder / "step-00000001", hidden / "trash/op/step-00000001")
        (hidden / "trash/deleted").mkdir()
        (hidden / "trash/deleted/f").write_text("x")

    def act(self, folder, reported):
        with held(folder):
            reported()

    def find(self, folder):
        return Directories(old=True).find(folder)


class Locked(Row):
    """The lock of a job that is dead is taken over, and given back; whatever is left, the next job takes it."""

    before = after = (1,)
    keeps_lock = True

    def __init__(self, *, links=True):
        super().__init__(old=True)
        self.links = links

    def prepare(self, folder):
        (folder / HIDDEN).mkdir(parents=True)
        inside.lock_in(folder / HIDDEN).acquire()  # by a process that ends now

    def act(self, folder, reported):
        with contextlib.nullcontext() if self.links else without_links():
            lock = inside.lock_in(folder / HIDDEN)
            lock.acquire()
            reported()
            lock.release()

    def find(self, folder):
        lock = inside.lock_in(folder / HIDDEN)
        lock.acquire(0.5)
        lock.confirm()
        lock.release()
        return 1


HOWS = ("symbolic links", "hard links", "copies")
ROWS = {
    **{
        f"a further name, {how}, {kind}{', taken' if old else ''}": FurtherName(how, kind, old=old)
        for how in HOWS
        for kind in ("file", "directory")
        for old in (False, True)
    },
    "a pointer, a first one": Pointed(old=False),
    "a pointer, replaced": Pointed(old=True),
    "fetched from a mirror": FromMirror(old=False),
    "fetched from a mirror, replaces": FromMirror(old=True),
    "fetched from a mirror, one file": FromMirror(old=False, single=True),
    "fetched from a mirror, one file, replaces": FromMirror(old=True, single=True),
    "fetched by hand": FetchedByHand(),
    "published, a first one": Published(old=False),
    "published, the next": Published(old=True),
    "exported": Exported(old=False),
    "exported, replaces": Exported(old=True),
    "exported, replaces by two renames": Exported(old=True, exchange=False),
    "exported, replaces where there are no links": Exported(old=True, links=False),
    "consolidated": Consolidated(old=False),
    "consolidated, replaces": Consolidated(old=True),
    "given back": GivenBack(old=False),
    "given back, replaces": GivenBack(old=True),
    "one file": OneFile(old=False),
    "one file, replaces": OneFile(old=True),
    "save_model": Weights(old=False),
    "save_model, two files after one": Weights(old=True, parts=(1, 2)),
    "save_model, one file after two": Weights(old=True, parts=(2, 1)),
    "save_model, two files after two": Weights(old=True, parts=(2, 2)),
    "mode overwrite": Overwritten(),
    "quarantined": Quarantined(),
    "a start that repairs": StartedOver(),
    "a start that repairs what an earlier version left": StartedOver(formerly=True),
    "a start that finds half of a quarantine": StartedOver(quarantined=True),
    "the lock": Locked(),
    "the lock, without hard links": Locked(links=False),
}
