"""A training job that saves to an object store, and what must be there whatever happened to it.

Each save has a number of its own, in every byte and in its metrics; one step is saved twice. One item is not trained, so the
store copies it from save to save. What a job is told it says as words: ``("SAVING", 3)``, ``("COMMITTED", 3)``,
``("FAILED", 3, "SaveError", "...")``, ``("UNKNOWN", 3, "...")`` and so on.
"""

import dataclasses
import json
import os
import threading
from pathlib import Path

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Health, Retention, SafeCheckpointError, Timeouts, WriterConfig
from safe_ckpt.config import StorageConfig
from safe_ckpt.core.home.objects.head import TOMBSTONE
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import CommitOutcomeUnknown

FLOATS = 1_330_000  # a bit more than one part of 5 MiB
STEP_OF = {1: 1, 2: 2, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: 7}
FIRST, SECOND, CHECK = (1, 2, 3, 4, 5), (6,), 7
KEPT = 2
TIMES = Timeouts(lengthy_s=30, barrier_s=30, writer_stall_s=10, fsync_stall_s=20, peer_stall_s=5, shutdown_s=5)
_BASE = torch.arange(FLOATS, dtype=torch.float32)
_APART = 1_500_000.0

RANDOM = Health(action="warn")  # of the bytes that are saved some look like NaN


def options_of(server, endpoint=None):
    """How a server is reached, as ``StorageConfig.options``; by another address where one stands for it."""
    prefix = "azure_storage_" if server.is_azure else "aws_"
    found = []
    for name, value in server.environment(endpoint).items():
        short = name.lower().removeprefix(prefix).removeprefix("azure_")
        found.append(f"{'endpoint' if short == 'endpoint_url' else short.removeprefix('aws_')}={value}")
    return tuple(found)


def config_of(server, endpoint=None, *, inline=True, lease_s=60.0, times=TIMES, request_timeout_s=1.0, **storage):
    """Settings of a job; ``inline``: no writer process."""
    return CheckpointConfig(
        health=RANDOM,
        timeouts=times,
        retention=Retention(keep_last=KEPT),
        writer=WriterConfig(inline_bytes=64 << 20) if inline else WriterConfig(),
        storage=StorageConfig(
            options=options_of(server, endpoint),
            part_bytes=5 << 20,
            parts_in_flight=2,
            request_timeout_s=request_timeout_s,
            **storage,
        ),
        record_events=False,
        lease_s=lease_s,
    )


def content(number):
    """What belongs to a save: no element is equal in two of them."""
    return _BASE + number * _APART


def frozen(*, blank=False):
    """A module that is not trained."""
    module = torch.nn.Linear(600, 600, bias=False).requires_grad_(requires_grad=False)
    module.weight.copy_(torch.zeros(600, 600) if blank else _BASE[:360_000].view(600, 600))
    return module


_FROZEN = frozen()


def state(number):
    """The same, in two files, and what is equal in all saves."""
    return {"m": {"w": content(number)}, "n": number, "f": _FROZEN}


def blank():
    """For ``resume``."""
    return {"m": {"w": torch.zeros(FLOATS)}, "n": 0, "f": frozen(blank=True)}


def number_of(found):
    """Which save this is; an error if it is a mix of two, or not what was saved."""
    if not torch.equal(found["m"]["w"].view(torch.int32), content(found["n"]).view(torch.int32)):
        raise AssertionError(f"a mix, or other bytes: {found['n']}, {found['m']['w'][:3]}")
    if not torch.equal(found["f"].weight, _FROZEN.weight):
        raise AssertionError(f"other bytes of what is not trained: {found['f'].weight[0, :3]}")
    return found["n"]


def train(url, config, say, numbers, *, resumes=False):
    """One job: opens, perhaps resumes, saves these numbers, closes. Named errors are told."""
    try:
        ckpt = Checkpointer(url, config)
    except SafeCheckpointError as error:
        say("REFUSED", type(error).__name__, str(error))
        return
    say("OPENED")
    try:
        if resumes:
            found = blank()
            say("RESUMED", number_of(found) if ckpt.resume(found) is not None else 0)
        for number in numbers:
            save(ckpt, number, say)
    finally:
        ckpt.close()
    say("CLOSED")


def save(ckpt, number, say):
    """Save it, and tell what came of it."""
    say("SAVING", number)
    try:
        ckpt.save(STEP_OF[number], state(number), metrics={"number": float(number)}).result()
    except CommitOutcomeUnknown as error:
        say("UNKNOWN", number, str(error))
    except SafeCheckpointError as error:
        say("FAILED", number, type(error).__name__, str(error))
    else:
        say("COMMITTED", number)


def lead(url, config, lines, numbers, resumes):
    """The same in a process of its own, which says it to a file, line by line."""
    torch.set_num_threads(1)  # see tests/faults/conftest.py
    descriptor = os.open(lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(*words):
        os.write(descriptor, (json.dumps(words) + "\n").encode())  # one write: a killed process says a line or does not

    try:
        train(url, config, say, numbers, resumes=resumes)
    except BaseException as error:
        say("ERROR", repr(error))
        os._exit(1)


def said_in(lines):
    """What a process has said."""
    path = Path(lines)
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


class Told:
    """What a job said, summed up."""

    def __init__(self, said):
        self.said = list(said)
        self.committed = [words[1] for words in said if words[0] == "COMMITTED"]
        self.failed = {words[1] for words in said if words[0] == "FAILED"}
        self.last = max(self.committed, default=0)
        begun = {words[1] for words in said if words[0] == "SAVING"}
        self.open = {number for number in begun - set(self.committed) - self.failed if number > self.last}

    @property
    def allowed(self):
        """Which saves may be the newest: the last one that was reported, and later ones of unknown outcome."""
        return {self.last} | self.open


class Store:
    """What lies below one prefix on a server, looked at past the proxy, and whether it is as promised."""

    def __init__(self, server, prefix):
        self.server, self.prefix = server, prefix
        self.url = server.url(prefix)
        self._manifests = {}
        self._lock = threading.Lock()

    def keys(self):
        """Of all objects, with their sizes, named below the prefix."""
        return {key.removeprefix(f"{self.prefix}/"): size for key, size in self.server.keys(f"{self.prefix}/").items()}

    def manifests(self, keys):
        """Folders to what their manifests say, tombstones among them. Read once: they do not change."""
        found = {}
        for key in keys:
            folder, _, name = key.rpartition("/")
            if name == "manifest.json":
                with self._lock:
                    if folder not in self._manifests:
                        self._manifests[folder] = json.loads(self.server.read(f"{self.prefix}/{key}"))
                    found[folder] = self._manifests[folder]
        return found

    def live(self, keys):
        """The committed checkpoints: their numbers to their folders, and what is wrong with them."""
        numbers, wrong = {}, []
        for folder, facts in self.manifests(keys).items():
            if facts["format"] == TOMBSTONE:
                continue
            for entry in facts["files"]:
                size = keys.get(f"{folder}/{entry['path']}")
                if size != entry["size_bytes"]:
                    wrong.append(f"{folder}/{entry['path']} has {size} bytes, not {entry['size_bytes']}")
            numbers[int(facts["metrics"]["number"])] = folder
        return numbers, wrong

    def hidden(self):
        """The folders that are being deleted."""
        try:
            return set(json.loads(self.server.read(f"{self.prefix}/.safe_ckpt/head"))["trash"])
        except Exception:  # there is none yet
            return set()

    def leftovers(self):
        """Whatever is neither the head, nor of a committed checkpoint, nor a tombstone."""
        keys = self.keys()
        manifests = self.manifests(keys)
        found = []
        for key in keys:
            folder, _, name = key.rpartition("/")
            own = [entry["path"] for entry in manifests.get(folder, {}).get("files", [])]
            if key != ".safe_ckpt/head" and name not in [*own, *(["manifest.json"] if folder in manifests else [])]:
                found.append(key)
        return found

    def wipe(self):
        """Free the server's memory."""
        place = open_place(self.url, StorageOptions(options=options_of(self.server)))
        place.bucket.delete([f"{self.prefix}/{key}" for key in self.keys()])


class Watch:
    """Looks at the store after each deletion: what was reported is there, whole, until something newer is."""

    def __init__(self, store, said):
        self._store, self._said = store, said
        self.problems = []
        self.looks = 0

    def on_answer(self, record):
        """For the proxy."""
        deletes = record.method == "DELETE" and "uploadId" not in record.path
        if deletes or (record.method == "POST" and ("delete" in record.path or "comp=batch" in record.path)):
            self.look(f"after request {record.number} {record.method} {record.path[-60:]}")

    def look(self, where):
        """Look now."""
        told = Told(self._said())
        keys = self._store.keys()
        # A delayed request may bring a manifest back: nobody sees what the head says is deleted.
        hidden = self._store.hidden()
        numbers, wrong = self._store.live({k: n for k, n in keys.items() if k.rpartition("/")[0] not in hidden})
        self.looks += 1
        if wrong:
            self.problems.append(f"{where}: {wrong}")
        if told.last and max(numbers, default=0) < told.last:
            self.problems.append(f"{where}: {told.last} was reported, there are {sorted(numbers)}")
        steps = {STEP_OF[number] for number in told.committed}
        if len({STEP_OF[number] for number in numbers}) < min(KEPT, len(steps)):
            self.problems.append(f"{where}: {told.committed} were reported, there are {sorted(numbers)}")


def check(store, said, *, problems=()):
    """A start without faults: goes on from what was reported, with every byte; nothing is left over. Returns its number."""
    told = Told(said)
    assert not problems, (problems, told.said)
    assert not [words for words in said if words[0] == "ERROR"], told.said
    found = blank()
    config = config_of(store.server, request_timeout_s=20.0)
    with Checkpointer(store.url, config) as ckpt:
        info = ckpt.resume(found)
        number = number_of(found) if info is not None else 0
        assert number in told.allowed, f"resumed {number}, allowed {told.allowed}: {told.said}"
        left = store.leftovers()
        assert not left, f"left over: {left}; {told.said}"
        later = []
        save(ckpt, CHECK, lambda *words: later.append(words))
        assert later[-1] == ("COMMITTED", CHECK), later
    left = store.leftovers()
    assert not left, f"left over at the end: {left}; {told.said}"
    keys = store.keys()
    numbers, wrong = store.live(keys)
    assert not wrong, wrong
    kept = sorted(numbers)
    assert len(kept) <= KEPT, f"kept {numbers}: {told.said}"
    assert {CHECK, number} - {0} <= set(kept), f"kept {numbers}: {told.said}"
    found_folders = [facts for facts in store.manifests(keys).values() if facts["format"] != TOMBSTONE]
    assert len(found_folders) == len(kept), f"a step is there twice: {sorted(store.manifests(keys))}; {told.said}"
    assert not set(numbers.values()) & store.hidden(), numbers
    return number


def outcome(said):
    """In a word."""
    words = [one for one in said if one[0] in ("FAILED", "UNKNOWN", "REFUSED")]
    return f"told: {words[0][0].lower()}" if words else "nothing was lost, and nobody noticed"


def impatient(seconds):
    """Timeouts for outages."""
    return dataclasses.replace(TIMES, lengthy_s=seconds, barrier_s=seconds, shutdown_s=seconds)
