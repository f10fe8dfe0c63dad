"""Bugs that are planted when the modules are loaded: each leaves out, or turns round, one thing on which a promise rests.

Whoever changes the modules may have to change a patch here: it says so when it fits no more. A bug that no history finds is a
finding about the simulator.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from sim.hosts import FIRST as FIRST_OF_HOSTS
from sim.hosts import has_hosts
from sim.mirror_plans import has_mirror
from sim.object_plans import in_a_store
from sim.readers import FIRST, has_readers

Patch = Callable[[str], str]


def _swap(old: str, new: str) -> Patch:
    return lambda text: text.replace(old, new, 1)


def _both(*patches: Patch) -> Patch:
    def patch(text: str) -> str:
        for one in patches:
            changed = one(text)
            if changed == text:
                raise ValueError("a part of a planted bug does not fit any more")
            text = changed
        return text

    return patch


_HOME, _LOCK, _LEASE = "safe_ckpt.core.home.file_home", "safe_ckpt.core.home.file_lock", "safe_ckpt.core.home.lease"
_DURABLE, _COMMIT = "safe_ckpt.core.storage.durable", "safe_ckpt.core.saving.one_save"
_NAME = """        with _undone_by(lambda: os.rename(final, staged), final, staged):
            sync_directory(str(final.parent))
"""
_WRITE = "            durable.write_durably(self._pending / MANIFEST_NAME, manifest.to_bytes())\n        elif entries"
_NAMED = '        if self._new.kind == "directory" or entries:\n            self._give_final_name()\n'
_LATE = _NAMED + "            durable.write_durably(self._final / MANIFEST_NAME, manifest.to_bytes())\n"
_ONE_WAY = _swap("            for name in names:\n", "            for name in ():\n")
_SWEPT = _swap("if folder == self.pending and left.is_dir()", "if False and left.is_dir()")
_EXCHANGE = "    if _settled(lambda: exchange(staged, final), staged, final) is not False:"
_EARLY = """    if (catalog := turn.job.request.on_commit.catalog) is not None and turn.job.request.on_commit.retention:
        turn.job.home.discard([one.path for one in catalog.committed])
    return turn.job.publication.commit("""

PLANTED: dict[str, dict[str, Patch]] = {
    "the lock is not confirmed before a commit": {
        _HOME: _swap(
            "        self._home.confirm()\n        durable.publish(self._pending",
            "        durable.publish(self._pending",
        )
    },
    "nothing is swept at the start": {_HOME: _swap("                self._sweep()\n", "")},
    "nothing is repaired at the start": {_HOME: _swap("                self._repair()\n", "")},
    "files are not synced": {
        "safe_ckpt.core.storage.direct_io": _swap(
            '            progress.entered("fsync")\n            os.fsync(fd)\n', ""
        )
    },
    "the manifest is not synced": {
        _DURABLE: _swap(
            "            view = view[os.write(fd, view) :]\n        os.fsync(fd)\n",
            "            view = view[os.write(fd, view) :]\n",
        )
    },
    "the new name is not synced": {_DURABLE: _swap(_NAME, "")},
    "the name comes before the manifest": {_HOME: _both(_swap(_WRITE, "        elif entries"), _swap(_NAMED, _LATE))},
    "the lease runs on during an outage": {
        _LEASE: _both(
            _swap("outage=overslept or seen.was_out", "outage=False"),
            _swap("self.seconds += min(now - before, period_s)", "self.seconds += now - before"),
        )
    },
    "one read is believed": {
        "safe_ckpt.core.resuming.candidate": _swap("            if differed and (", "            if True or (")
    },
    "a verdict that did not come is a failure": {
        _COMMIT: _swap(
            'raise CommitOutcomeUnknown(name=turn.job.name, cause=cause, phase="commit") from error\n    except',
            'raise SaveError(name=turn.job.name, cause=cause, phase="commit") from error\n    except',
        )
    },
    "keys of a save are used again": {
        "safe_ckpt.core.coordination.rounds": _swap('f"op/{op_id}", writers, "write"', '"op/save", writers, "write"')
    },
    "retention comes before the commit": {_COMMIT: _swap("    return turn.job.publication.commit(", _EARLY)},
    "a holder's signs of life are ignored": {
        _LEASE: _both(
            _swap("if silence.is_broken_by(seen):", "if False:"),
            _swap("or seen.state != self.before.state:", "or False:"),
            _swap('        if fate == "alive":\n            raise', "        if False:\n            raise"),
        )
    },
    "the old one is deleted, then replaced": {
        _DURABLE: _swap(
            _EXCHANGE,
            "    remove_tree(final)\n    os.rename(staged, final)\n    sync_directory(str(final.parent))\n    return\n"
            + _EXCHANGE,
        )
    },
    "the clock alone decides the order": {
        "safe_ckpt.core.home.home": _swap("max(last + 1, int(time.time() * 1000))", "int(time.time() * 1000)")
    },
    "the others' reports are left out": {
        _COMMIT: _swap("info = _commit(turn, {**own, **others})", "info = _commit(turn, own or others)")
    },
    "a commit whose sync failed stays": {
        _DURABLE: _swap(
            "        with _undone_by(lambda: os.rename(final, staged), final, staged):\n",
            "        with contextlib.nullcontext():\n",
        )
    },
    "a checkpoint is deleted where it stands": {
        _HOME: _swap("            os.rename(path, bin_ / path.name)\n", "            durable.remove_tree(path)\n")
    },
    "a lost answer of a rename is a failure": {
        _DURABLE: _swap(
            "        if not moved.st_ino or (there.st_dev, there.st_ino) != (moved.st_dev, moved.st_ino):\n",
            "        if True:\n",
        )
    },
    # What histories found, and what was mended then.
    "folders that a killed job made are not synced": {
        _DURABLE: _both(
            _swap("    for folder in path.parents:\n", "    for folder in [one.parent for one in missing]:\n"),
            _swap("    _sync_above(path)\n", "    _sync_above(path, missing)\n"),
            _swap("_sync_above(path: Path)", "_sync_above(path: Path, missing: list[Path])"),
        )
    },
    "a writer whose parent is gone ends by an error": {
        "safe_ckpt.core.writer.process": _swap(
            "            return  # the parent is gone", "            raise  # the parent is gone"
        )
    },
    "who waits believes one read of a lock": {
        _LEASE: _swap("while (seen := self._sure_look(silence)) is", "while (seen := self._look()) is")
    },
    "what a host remembers of a name is believed": {
        _DURABLE: _swap("    os.listdir(final.parent)  # makes", "    pass  # makes")
    },
    "a holder believes one read of its lock": {
        "safe_ckpt.core.home.file_lock": _swap(
            "        look_again(self._directory)\n        return self._read()\n", "        return holder\n"
        )
    },
    "a late store is asked without a pause": {
        "safe_ckpt.core.coordination.store": _swap("if left_s > 0 else _SLICE_S)", "if left_s > 0 else 0.0)")
    },
    "the folder of a save is not durable when the old one goes": {
        _HOME: _swap(
            "for folder in (home.pending, home.trash, home.hidden):", "for folder in (home.trash, home.hidden):"
        )
    },
    "another format is believed at one read": {
        "safe_ckpt.core.home.candidates": _swap(
            "except (CorruptCheckpointError, UnsupportedFormatError) as", "except CorruptCheckpointError as"
        ),
        "safe_ckpt.core.resuming.candidate": _swap(
            "except (CorruptCheckpointError, UnsupportedFormatError) as", "except CorruptCheckpointError as"
        ),
    },
    "another format is believed behind a read that said something else": {
        "safe_ckpt.core.resuming.candidate": _swap(
            "if differed and (isinstance(error", "if differed and (True or isinstance(error"
        )
    },
    "a lost answer of moving aside is a failure": {
        _DURABLE: _swap(
            "    _settled(lambda: os.rename(final, aside), final, aside)\n", "    os.rename(final, aside)\n"
        )
    },
    "a name that was taken back is not durable when the files are deleted": {_DURABLE: _ONE_WAY, _HOME: _SWEPT},
    "what was set aside is deleted before the folder of its save": {
        _DURABLE: _ONE_WAY,
        _HOME: _both(
            _swap("            if replaced:\n", "            if False:\n"),
            _swap("if lefts and folder == self.trash:", "if False:"),
            _SWEPT,
            _swap("if not entries_in(new.parent) and not _is_complete(old):", "if False:"),
        ),
    },
}

_OBJECTS, _HEAD = "safe_ckpt.core.home.objects.home", "safe_ckpt.core.home.objects.head"
_CREATE = "        if not self._unfenced:\n            bucket.create(path.key, data)\n            return\n"
IN_STORES: dict[str, dict[str, Patch]] = {
    "no tombstone is set": {
        _OBJECTS: _swap(
            "if self._set_tombstone(self.path / name, self.path.bucket)]", "if has_manifest(self.path / name)]"
        )
    },
    "a manifest is put whatever is there": {
        _OBJECTS: _swap(
            _CREATE,
            "        if not self._unfenced:\n            bucket.overwrite(path.key, data)\n            return\n",
        )
    },
    "the head is replaced whatever it is": {
        "safe_ckpt.core.home.objects.lock": _swap(
            "        if self._unfenced:\n            self._version", "        if True:\n            self._version"
        )
    },
    "one list is believed": {_HEAD: _swap("        if not lacking:\n", "        if True:\n")},
    "one read of a manifest is believed": {
        "safe_ckpt.core.storage.objects.second_look": _swap(
            "    second = _read(near.afresh(), place.key)\n", "    second = first\n"
        )
    },
    "a lost answer of a creation is a failure": {
        "safe_ckpt.core.storage.objects.bucket": _swap(
            "                if found != data:\n                    raise\n", "                raise\n"
        )
    },
    "a save is not announced": {_HEAD: _swap("pending=(*self.pending, folder), ", "")},
    "a deletion is not noted": {
        _OBJECTS: _swap("self._owner.update(lambda head: head.deleting([folder.name for folder in some]))", "pass")
    },
    # What histories found, and what was mended then.
    "the owner sleeps long after an outage": {
        "safe_ckpt.core.storage.objects.bucket": _swap("pause_s, self._longest_pause_s)", "pause_s, _LONGEST_PAUSE_S)")
    },
    "another owner's tombstone is deleted": {
        _OBJECTS: _swap(
            "        self._delete_folder(folder, spare=MANIFEST_NAME)\n", "        self._delete_folder(folder)\n"
        )
    },
    "a rank that gives up says that nothing is saved": {
        _COMMIT: _swap("        if rank_0_has_error:\n            raise\n", "        raise\n")
    },
}
"""Those of object stores: histories with a directory on a disk do not meet them."""

_MIRROR, _FETCH = "safe_ckpt.extensions.mirror.mirror", "safe_ckpt.extensions.mirror.fetching"
IN_MIRRORS: dict[str, dict[str, Patch]] = {
    "retention does not wait for the mirror": {
        _MIRROR: _swap("        if not self._config.mirror.required:\n", "        if True:\n")
    },
    "what was uploaded is not compared": {
        "safe_ckpt.extensions.mirror.tier": _swap(
            "        if (known.size_bytes, known.xxh3_128) != (entry.size_bytes, entry.xxh3_128):\n",
            "        if False:\n",
        )
    },
    "two looks at what was fetched are believed": {
        "safe_ckpt.core.storage.objects.second_look": _swap("for _ in range(2):", "for _ in range(1):")
    },
    "what was fetched is not compared": {
        _FETCH: _swap("            verify_entry(into, entry, cached=True)\n", "            pass\n")
    },
    "an empty directory is a new run": {
        "safe_ckpt.core.resuming.one_resume": _both(
            _swap(
                "        usable = by_commit(self._list())\n",
                "        usable = by_commit(self._list())\n        return\n",
            ),
            _swap(
                '        """Fetch the next one whose',
                '        return None\n        """Fetch the next one whose',
            ),
        )
    },
    "the end does not wait for uploads": {
        _MIRROR: _both(
            _swap(
                "            self._background.drain(\n                lambda: self.progress() + self.elsewhere(), limit_s, "
                "extend=within_s is None, is_over=self._is_late\n            )\n",
                "            pass\n",
            ),
            _swap("        if left:\n            logger.warning", "        if False:\n            logger.warning"),
        )
    },
}
"""Those of a mirror."""

_HOLD, _RECORD, _FOLLOW = (
    "safe_ckpt.core.home.pins.hold",
    "safe_ckpt.core.home.pins.record",
    "safe_ckpt.following",
)
BESIDE_READERS: dict[str, dict[str, Patch]] = {
    "retention does not heed what a reader holds": {
        _RECORD: _swap("            if one.name == pin.holds:\n", "            if False:\n")
    },
    "a reader gives no signs of life": {
        _HOLD: _swap(
            "                if not self._stop.is_set():\n                    self.change()\n", "                pass\n"
        )
    },
    "what a reader has not seen is not kept": {
        _RECORD: _swap("unseen = pin.seen is not None and", "unseen = False and")
    },
    "a pin has ended at the second look": {
        _RECORD: _swap("if now - self._heard[name][1] > ttl_s", "if now - self._heard[name][1] > 0")
    },
    "a reader's signs of life are ignored": {
        _RECORD: _swap("is not None and before[0] == data else (data, now)", "is not None else (data, now)")
    },
    "what a reader wants later is not written down": {
        _FOLLOW: _swap("return tuple(name for one in self._book.waiting if", "return tuple(name for one in [] if")
    },
    "a reader takes its pin for the checkpoint": {
        _HOLD: _swap(
            "if (not is_written or self._waited_for_deletions(name)) and is_there():", "if is_written or is_there():"
        )
    },
    "the pins are looked at once": {
        _HOME: _swap(
            "        if (pins := self._observed()) is not None and (why", "        if False and (pins := None) and (why"
        )
    },
}
"""Those of histories with readers."""

_HOSTS, _FILES = "safe_ckpt.core.home.host_home", "safe_ckpt.core.resuming.host_reader"
ON_HOSTS: dict[str, dict[str, Patch]] = {
    "hosts are not asked what they have committed": {
        _HOSTS: _swap(
            "self._committed = {op_id for op_ids in told.values() for op_id in op_ids}", "self._committed = set()"
        )
    },
    "a sealed part is swept": {
        _HOSTS: _swap("if manifest is None or manifest.op_id not in self._committed:", "if True:")
    },
    "every sealed part gets its name": {
        _HOSTS: _swap("if manifest is None or manifest.op_id not in self._committed:", "if manifest is None:")
    },
    "other hosts give the name first": {
        _HOSTS: _swap(
            "        info = self._publish(manifest, entries)\n",
            '        self._home.call("finish", {"attempt": self._new.attempt})\n'
            "        info = self._publish(manifest, entries)\n",
        )
    },
    "no part is sealed elsewhere": {
        _HOSTS: _swap(
            '        publication.seal_as(manifest, self._additions.get(args["attempt"], Additions()).keep_foreign)\n',
            "",
        ),
    },
    "a part is sealed without a sync": {
        _HOME: _swap(
            "        for folder in (*self.folders, str(self._own)):\n            durable.sync_directory(folder)\n", ""
        )
    },
    "a name that is late elsewhere is a failure": {
        _HOSTS: _swap(
            '            logger.warning("%s is committed, and has not',
            '            raise\n            logger.warning("%s is committed, and has not',
        )
    },
    "a disk that refuses after the commit is a failure": {
        _HOSTS: _swap(
            "        with contextlib.suppress(SafeCheckpointError, OSError):\n            names",
            "        with contextlib.suppress(SafeCheckpointError):\n            names",
        )
    },
    "files are not spread": {
        _HOSTS: _swap(
            "        for file, leaders in lacking.items():\n            source",
            "        for file, leaders in ():\n            source",
        )
    },
    "other hosts keep what rank 0 deleted": {
        _HOSTS: _swap(
            '        if gone:\n            self.call("discard"', '        if False:\n            self.call("discard"'
        )
    },
    "a host deletes all that is older": {
        _HOSTS: _swap("one.manifest is not None and one.path.name not in kept]", "one.manifest is not None]")
    },
    "rank 0 alone fetches": {
        _HOSTS: _swap('        self.call("fetch", asked, limit_s=self._timeouts.lengthy_s)\n', "")
    },
    "hosts delete before the commit": {
        _HOSTS: _swap(
            "        info = self._publish(manifest, entries)\n",
            '        self._home.call("clean up", {"attempt": "none", "names": [], "sequence": manifest.sequence})\n'
            "        info = self._publish(manifest, entries)\n",
        )
    },
    "a new host gets no folder": {_HOSTS: _swap("        if new:\n", "        if False:\n")},
    "what is spread gets no name": {_HOSTS: _swap("        durable.publish_file(staged, target)\n", "")},
    "other hosts are not looked at": {
        _HOSTS: _swap(
            "found = {0: self.verified_here(name, manifest.op_id), **told}",
            "found = {rank: self.verified_here(name, manifest.op_id) for rank in (0, *told)}",
        )
    },
    "other hosts delete all": {
        _HOSTS: _swap(
            'FileHome.discard(self, self._there(args["names"]))',
            "FileHome.discard(self, [one.path for one in self.look()])",
        )
    },
    "nothing is prepared elsewhere": {_HOSTS: _swap('        self._home.call("prepare", asked)\n', "")},
    "all hosts fetch what rank 0 needs": {
        _HOSTS: _swap("sorted(needed.get(leader, entries))", "sorted(needed.get(0, entries))")
    },
}
"""Those of directories on each host's own disk."""
PLANTED |= IN_STORES | IN_MIRRORS | BESIDE_READERS | ON_HOSTS


def _may_meet(name: str, seed: int) -> bool:
    if name in BESIDE_READERS:
        return has_readers(seed)
    if name in ON_HOSTS:
        return has_hosts(seed)
    if name in IN_STORES:
        return in_a_store(seed)
    return has_mirror(seed) if name in IN_MIRRORS else True


def first_seed(
    name: str, most: int, first: int = 0, within_s: float | None = None
) -> tuple[int | None, list[str], int]:
    """The first seed that finds a planted bug, what it violates, and how many histories that took."""
    from sim import history
    from sim.loader import Slots

    slots, began = Slots(PLANTED[name]), time.process_time()
    first += FIRST if name in BESIDE_READERS else FIRST_OF_HOSTS if name in ON_HOSTS else 0
    for number, seed in enumerate(range(first, first + most)):
        if not _may_meet(name, seed):
            continue
        result = history.run(seed, slots)
        if result.violations:
            return seed, list(dict.fromkeys(result.violations)), number + 1
        if number % 25 == 24:
            gc.collect()
        if within_s is not None and time.process_time() - began > within_s:
            return None, [], number + 1
    return None, [], most


def _find(arguments: tuple[str, int]) -> tuple[str, int | None, list[str], int]:
    name, most = arguments
    return (name, *first_seed(name, most))


def print_table(names: list[str], most: int, processes: int) -> int:
    """Find them, and print which seed finds each. Returns how many were not found."""
    chosen = [name for name in PLANTED if not names or any(one in name for one in names)]
    missed = 0
    print("| Planted bug | Seed | Violates |\n|---|---|---|", flush=True)
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        found: Any
        for found in pool.imap(_find, [(name, most) for name in chosen]):
            name, seed, violations, _ = found
            missed += seed is None
            what = ", ".join(sorted({one.partition(":")[0] for one in violations}))
            print(f"| {name} | {seed if seed is not None else f'none of {most}'} | {what} |", flush=True)
    return missed
