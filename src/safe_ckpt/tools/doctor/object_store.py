"""Checks whether a directory in an object store is fit for safe checkpoints: what the store promises, and how fast it is."""

from __future__ import annotations

import errno
import logging
import os
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import xxhash

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.home.objects.head import in_parallel, missing_condition
from safe_ckpt.core.staging.worker_thread import StuckError, bounded
from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.core.storage.objects.clients import ExistsError
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.storage.objects.second_look import DISAGREED
from safe_ckpt.core.storage.reader import digest_of
from safe_ckpt.text import bytes_text, duration, rate
from safe_ckpt.tools.doctor.check import (
    PREFIX,
    CheckOptions,
    CheckResult,
    Checks,
    Figure,
    Report,
    at_a_price,
    fail,
    held_by,
    not_made,
    ok,
    run_checks,
    warn_if,
)
from safe_ckpt.tools.doctor.examination import on_machine
from safe_ckpt.tools.inspection.files import place_at
from safe_ckpt.tools.inspection.listing import holders_of, read_listing

logger = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 20
_PASS_S = 10.0
_ROUNDS = 10
_RIVALS = 8
_SLOW_BYTES_PER_S = 50e6
_SLOW_CREATE_S = 2.0
_RULE = "set a lifecycle rule that aborts unfinished uploads (AbortIncompleteMultipartUpload) after a week"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The input of a check.

    Attributes:
        directory: what was asked about.
        scratch: a folder below it, for this examination alone.
        probe_bytes: how much is written and read to measure the speed; 0 for not at all.
        unfenced: ``storage.unfenced`` is set.
        wrote: set before anything is written.
    """

    directory: ObjectPath
    scratch: ObjectPath
    probe_bytes: int
    unfenced: bool
    wrote: threading.Event = field(default_factory=threading.Event)


def diagnose_store(url: str, options: CheckOptions) -> Report:
    """Examine a directory in an object store, and this machine. On the main thread.

    Args:
        url: its address.
        options: the options of the command.

    Raises:
        ConfigError: it is no address, or the client is not installed.
    """
    config = CheckpointConfig.from_environment()
    directory = place_at(url, config, within_s=min(config.timeouts.barrier_s, options.timeout_s))
    scratch, stop = directory / f"{PREFIX}{uuid.uuid4().hex}", threading.Event()

    def go_on() -> None:
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")

    bucket = directory.bucket.within(directory.bucket.options.give_up_after_s, go_on)
    probe = Probe(
        directory=ObjectPath(bucket, directory.key),
        scratch=ObjectPath(bucket, scratch.key),
        probe_bytes=options.probe_bytes,
        unfenced=config.storage.unfenced,
    )
    try:
        findings = run_checks(probe, _CHECKS, _of_store, limit_s=options.timeout_s)
    finally:
        stop.set()
        if probe.wrote.is_set():
            _remove(scratch, options.timeout_s)
    newest = next((finding.figures.get("newest_bytes") for finding in findings if finding.check == "held by"), None)
    size = options.state_bytes if options.state_bytes is not None else newest
    here = on_machine(size if isinstance(size, int) else None, options)
    return Report(directory=directory, findings=(ok("directory", str(directory)), *findings, *here))


def check_owner(probe: Probe) -> list[CheckResult]:
    """The job that owns the directory, and what is in it."""
    infos = [candidate.info for candidate in read_listing(probe.directory).standing.usable]
    newest_bytes = infos[0].size_bytes if infos and infos[0] else None
    figures: dict[str, Figure] = {"checkpoints": len(infos), "newest_bytes": newest_bytes}
    return held_by(holders_of(probe.directory), "that job is not disturbed", **figures)


def conditions(probe: Probe) -> list[CheckResult]:
    """Check whether the store creates and replaces objects on a condition: without it two jobs could both commit."""
    probe.wrote.set()
    problem = missing_condition(probe.scratch) or _race(probe.scratch)
    if not problem:
        text = f"creates an object only where there is none, also for one of {_RIVALS} at a time; replaces only what was read"
        return [ok("conditions", text)]
    text = f"it {problem}: two jobs could both commit"
    if probe.unfenced:
        return [
            at_a_price(
                "conditions", text, "storage.unfenced is set: let no two jobs use the directory at the same time"
            )
        ]
    return [fail("conditions", text, "refused as a directory unless storage.unfenced is set: use another store")]


def _race(folder: ObjectPath) -> str:
    """Let several create one object at the same time. Returns what is wrong, or ""."""
    place = folder / "race"

    def create(rival: int) -> bool:
        try:
            place.bucket.create(place.key, b"%d" % rival)
        except ExistsError:
            return False
        return True

    won = sum(in_parallel(create, range(_RIVALS)))
    return "" if won == 1 else f"let {won} of {_RIVALS} create one object"


def listing(probe: Probe) -> list[CheckResult]:
    """A new object is listed and read, a part of it too, and a deleted one is gone, at once."""
    place, data = probe.scratch / "small/one", os.urandom(100_000)
    bucket = place.bucket
    bucket.overwrite(place.key, data)

    def written(at: Bucket) -> str:
        if [(entry.key, entry.size_bytes) for entry in at.entries(place.parent.key)] != [(place.key, len(data))]:
            return "a new object is not listed, or with another size"
        if at.list_folders(probe.scratch.key).count("small") != 1:
            return "the folder of a new object is not listed"
        if bytes(at.read_range(place.key, 1_000, 5_000)) != data[1_000:6_000] or at.read(place.key)[0] != data:
            return "an object, or a part of it, does not read as it was written"
        return ""

    def deleted(at: Bucket) -> str:
        return "a deleted object is still listed" if at.entries(place.parent.key) else ""

    wrong = _twice("listing", written, bucket, "use another store")
    if not wrong or wrong[0].state != "fail":
        bucket.delete([place.key])
        wrong += _twice("listing", deleted, bucket, "use another store")
    return wrong or [
        ok("listing", "what is written is listed and read at once, parts of it too; what is deleted is gone")
    ]


def _twice(check: str, look: Callable[[Bucket], str], bucket: Bucket, advice: str) -> list[CheckResult]:
    """Look twice, over two connections. A fault that the second look does not find is no more than a warning."""
    first = look(bucket)
    if not first:
        return []
    if second := look(bucket.afresh()):
        return [fail(check, second, advice)]
    return [
        at_a_price(
            check, f"{first}, and at a second look it is right: {DISAGREED}", "look at the network and the store"
        )
    ]


def latency(probe: Probe) -> list[CheckResult]:
    """Measure how long the creation of a small object takes: each commit waits for three or four."""
    seconds = []
    for number in range(_ROUNDS):
        place, since = probe.scratch / f"latency-{number}", time.monotonic()
        place.bucket.create(place.key, b"1")
        seconds.append(time.monotonic() - since)
    middle = statistics.median(seconds)
    text = f"{duration(middle)} to create a small object (median of {_ROUNDS}, worst {duration(max(seconds))})"
    advice = "use a store, or a region, that is nearer"
    return [warn_if(middle > _SLOW_CREATE_S, "latency", text, advice, median_s=middle, worst_s=max(seconds))]


def store_speed(probe: Probe) -> list[CheckResult]:
    """Upload an object in parts, and read it back by ranges."""
    if probe.probe_bytes <= 0:
        return [not_made("speed", "not measured: --mebibytes 0")]
    place, load = probe.scratch / "parts", _Load(probe.probe_bytes)
    since = time.monotonic()
    place.upload(probe.probe_bytes, load.pieces)
    put_s = time.monotonic() - since
    size = load.moved
    since = time.monotonic()
    spent: list[float] = []

    def differs(at: Bucket) -> str:
        same = at.size_of(place.key) == size and digest_of(ObjectPath(at, place.key), size) == load.digest.hexdigest()
        spent.append(time.monotonic() - since)
        return "" if same else "what was read back is not what was uploaded"

    if wrong := _twice("speed", differs, place.bucket, "do not keep checkpoints there"):
        return wrong
    get_s = spent[0]
    put, get = size / max(put_s, 1e-9), size / max(get_s, 1e-9)
    text = f"put {rate(put / 1e9)}, get {rate(get / 1e9)} ({bytes_text(size)} in parts of "
    text += f"{bytes_text(place.options.part_bytes)})"
    advice = "save less often, or use a store, or a region, that is nearer: training continues meanwhile"
    figures = {"put_bytes_per_s": round(put), "get_bytes_per_s": round(get)}
    return [warn_if(min(put, get) < _SLOW_BYTES_PER_S, "speed", text, advice, **figures)]


def uploads(probe: Probe) -> list[CheckResult]:
    """The fate of uploads that a killed job leaves unfinished, which are charged for."""
    if probe.directory.bucket.scheme == "az":
        return [ok("unfinished uploads", "the store drops them by itself after a week")]
    return [
        ok("unfinished uploads", "what a killed job leaves of one stays until a rule of the bucket aborts it", _RULE)
    ]


_CHECKS: Checks[Probe] = (
    ("held by", check_owner),
    ("conditions", conditions),
    ("listing", listing),
    ("latency", latency),
    ("speed", store_speed),
    ("unfinished uploads", uploads),
)


def _of_store(name: str, error: OSError) -> tuple[CheckResult, str]:
    """The finding of an error. Where it shows that the store cannot be used, no other check is made."""
    advice, why = "use another store, or look at what it says", "the store cannot be used"
    if isinstance(error, StuckError | TimeoutError):
        advice = "look at the endpoint, the region and the network; --timeout-s gives a slow store longer"
    elif isinstance(error, PermissionError):
        advice = "give these credentials the right to get, put, list and delete there"
    elif isinstance(error, FileNotFoundError):
        advice = "create the bucket, or look at its name and region"
    else:
        why = ""
    return fail(name, error.strerror or str(error), advice), why


class _Load:
    """The bytes that are uploaded to measure the speed: at most so many, for at most ``_PASS_S``."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._block = os.urandom(_BLOCK_BYTES)
        self.moved, self.digest = 0, xxhash.xxh3_128()

    def pieces(self) -> Iterator[bytes]:
        """The pieces, from the first on each time this is called."""
        self.moved, self.digest = 0, xxhash.xxh3_128()
        until = time.monotonic() + _PASS_S
        while self.moved < self._most_bytes and (not self.moved or time.monotonic() < until):
            piece = self.moved.to_bytes(8, "little") + self._block[8:]  # no two are alike
            self.digest.update(piece)
            self.moved += len(piece)
            yield piece


def _remove(folder: ObjectPath, limit_s: float) -> None:
    try:
        bounded(lambda: folder.bucket.delete([entry.key for entry in folder.bucket.entries(folder.key)]), limit_s)
    except OSError as error:
        logger.warning("%s may not be gone, delete it by hand: %s", folder, error.strerror or error)
