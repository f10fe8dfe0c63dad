"""Settings: frozen, validated when built, readable from YAML.

Units are in the names: ``_s`` seconds, ``_bytes`` bytes. ``Retention`` says what to keep, ``Timeouts`` how long to wait,
``WriterConfig`` how bytes reach the disk, ``Network`` where the ranks meet, ``Telemetry`` where events go,
``StorageConfig`` how object stores are reached, ``Mirror`` where copies go, ``Health`` what is done about bad numbers,
``Unchanged`` what about bytes that did not change, and ``CheckpointConfig`` holds one of each.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.fields import build, check, deviations, limits

_LONGEST_S = 365 * 24 * 3600  # longer is a slip, and some waits take no more
_SIGNAL = r"^SIG(?!KILL$|STOP$)[A-Z0-9]+$"


class _Checked:
    """Settings that are checked when they are built."""

    def __post_init__(self) -> None:
        check(self)


def _require(condition: bool, key: str, message: str) -> None:
    if not condition:
        raise ConfigError(key=key, message=message)


@dataclass(frozen=True, kw_only=True)
class Timeouts(_Checked):
    """How long anything may take. All in seconds, all above zero and at most a year.

    Attributes:
        lengthy_s: one save from agreement to verdict, however large, as long as its ranks are alive.
        barrier_s: how long a rank waits for the others to make the same call.
        writer_stall_s: how long the writer process may move no byte. One that ended is replaced at once, and one that was
            stopped (SIGSTOP) after 3 s.
        fsync_stall_s: how long one fsync may take, and one write for which the kernel says that it waits for the disk.
        peer_stall_s: how long a rank may show no sign of life before it counts as lost.
        shutdown_s: how long ``close`` and interpreter exit may wait for what makes no progress.
    """

    lengthy_s: float = field(default=3600.0, metadata=limits(above=0, at_most=_LONGEST_S))
    barrier_s: float = field(default=300.0, metadata=limits(above=0, at_most=_LONGEST_S))
    writer_stall_s: float = field(default=60.0, metadata=limits(above=0, at_most=_LONGEST_S))
    fsync_stall_s: float = field(default=300.0, metadata=limits(above=0, at_most=_LONGEST_S))
    peer_stall_s: float = field(default=30.0, metadata=limits(above=0, at_most=_LONGEST_S))
    shutdown_s: float = field(default=120.0, metadata=limits(above=0, at_most=_LONGEST_S))


@dataclass(frozen=True, kw_only=True)
class Retention(_Checked):
    """Which committed checkpoints to keep. What no rule keeps is deleted; with no rule at all everything is kept.

    Attributes:
        keep_last: keep this many of the newest.
        keep_best: keep this many of the best by ``metric``.
        metric: name of the metric given to ``save``; needed by ``keep_best``.
        mode: ``"min"`` when lower is better, ``"max"`` when higher is.
        keep_every_steps: keep every checkpoint whose step is a multiple of this.
    """

    keep_last: int | None = field(default=None, metadata=limits(at_least=1))
    keep_best: int | None = field(default=None, metadata=limits(at_least=1))
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    keep_every_steps: int | None = field(default=None, metadata=limits(at_least=1))

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.keep_best is None or bool(self.metric), "metric", "keep_best needs the name of a metric")


@dataclass(frozen=True, kw_only=True)
class WriterConfig(_Checked):
    """How bytes reach the disk.

    Attributes:
        direct_io: write past the page cache where the file system can (``"auto"``), or never (``"off"``).
        chunk_bytes: the size of one write, a multiple of 4096.
        flush_every_bytes: without direct I/O, flush after so many bytes so that the last fsync is short.
        niceness: added to the niceness of the writer process, 0 to 19.
        max_respawns: how often a dead or stalled writer process is replaced within one save.
        inline_bytes: a rank that writes at most this much in one save writes it with a thread of its own process, without the
            writer process. 0: the writer process writes everything.
    """

    direct_io: Literal["auto", "off"] = "auto"
    chunk_bytes: int = field(default=8 << 20, metadata=limits(at_least=4096, multiple_of=4096))
    flush_every_bytes: int = field(default=64 << 20, metadata=limits(at_least=4096))
    niceness: int = field(default=10, metadata=limits(at_least=0, at_most=19))
    max_respawns: int = field(default=2, metadata=limits(at_least=0))
    inline_bytes: int = field(default=2 << 20, metadata=limits(at_least=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.flush_every_bytes >= self.chunk_bytes, "flush_every_bytes", "must not be below chunk_bytes")


@dataclass(frozen=True, kw_only=True)
class Network(_Checked):
    """Where the ranks reach rank 0, for what they agree on while they save. Training's own traffic does not go here.

    Attributes:
        interface: the network interface of rank 0's host on which it listens, such as ``ib0``, or one of its addresses. Null
            for all of them, or for the loopback where torchrun says that all ranks run on one host.
        port: the first of 16 ports of which a free one is taken; 0 for any.
    """

    interface: str | None = None
    port: int = field(default=0, metadata=limits(at_least=0, at_most=65520))


@dataclass(frozen=True, kw_only=True)
class StorageConfig(_Checked):
    """How object stores are reached: for directories that are given as ``s3://``, ``gs://`` or ``az://``, and for ``mirror``.

    Credentials, endpoint and region come from the environment as obstore reads it: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
    ``AWS_REGION``, ``AWS_ALLOW_HTTP``, ``AZURE_STORAGE_ACCOUNT_NAME``, ``GOOGLE_APPLICATION_CREDENTIALS`` and their like, or
    from the machine's own role.

    Attributes:
        options: what is to hold instead of the environment, as ``name=value`` in obstore's names, such as
            ``endpoint=https://minio.example:9000`` or ``region=eu-central-1``. Listings show no value, and errors show no key,
            token or password.
        part_bytes: the size of one part of an upload, and of one read.
        parts_in_flight: how many are under way at a time, for each rank.
        request_timeout_s: how long one request may take, a part included. What fails is tried again until ``lengthy_s``.
        cache_dir: where ranks that share a host fetch a checkpoint to (null: memory (``/dev/shm``) where there is room, else
            the directory for temporary files), and where a framework's files lie if its directory is an address (null: the
            directory for temporary files). An absolute path.
        unfenced: use a store that cannot create or replace an object on a condition. Two jobs may then commit into one
            directory.
    """

    options: tuple[str, ...] = field(
        default=(), repr=False, metadata=limits(pattern=r"^[A-Za-z][A-Za-z0-9_]*=", words="name=value", secret=True)
    )
    part_bytes: int = field(default=8 << 20, metadata=limits(at_least=5 << 20, multiple_of=1 << 20))
    parts_in_flight: int = field(default=4, metadata=limits(at_least=1, at_most=64))
    request_timeout_s: float = field(default=60.0, metadata=limits(above=0, at_most=_LONGEST_S))
    cache_dir: str | None = field(default=None, metadata=limits(pattern=r"^/", words="an absolute path"))
    unfenced: bool = False


@dataclass(frozen=True, kw_only=True)
class Mirror(_Checked):
    """A second place for committed checkpoints, in an object store. They are uploaded in the background.

    Attributes:
        url: where to, such as ``s3://bucket/run``; null for no mirror.
        keep_last: how many of the newest to keep there; null for all that were uploaded.
        keep_every_steps: keep every checkpoint there whose step is a multiple of this.
        required: local retention deletes a checkpoint only when it, or a newer one, has been uploaded.
        follow: what local retention deletes is deleted there, too.
    """

    url: str | None = field(
        default=None,
        metadata=limits(
            pattern=r"^(s3|gs|az)://[^/@?]+(/[^@]*)?$",
            words="s3://, gs:// or az:// with a bucket, and no user or password",
        ),
    )
    keep_last: int | None = field(default=None, metadata=limits(at_least=1))
    keep_every_steps: int | None = field(default=None, metadata=limits(at_least=1))
    required: bool = False
    follow: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keep_last", "keep_every_steps", "required", "follow"):
            given = self.url is None and getattr(self, name) not in (None, False)
            _require(not given, name, "does nothing without mirror.url: set that, too")


@dataclass(frozen=True, kw_only=True)
class Health(_Checked):
    """What is done about a checkpoint with numbers that are NaN or infinite.

    Attributes:
        action: ``"mark"``: it is committed and marked; ``resume`` passes over it unless it is asked for by name, and retention
            does not count it. ``"stop"``: the same, then all ranks raise ``UnhealthyStateError``. ``"warn"``: a warning, and
            it counts like any other. ``"off"``: the numbers are not looked at.
        norm_jump: by which factor the norm of a file's numbers may grow between two saves, above 1; null for any.
        ignore: patterns of names of tensors that are not looked at, such as ``"*.mask"``.
    """

    action: Literal["mark", "stop", "warn", "off"] = "mark"
    norm_jump: float | None = field(default=None, metadata=limits(above=1))
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unchanged(_Checked):
    """What is done about files that have the bytes of the checkpoint before.

    Attributes:
        share: do not write them again: they get a further name (a hard link). What is not trained goes to files of its own.
        full_every: what was written so many saves ago is written anew, so that not all checkpoints depend on the same blocks of
            the disk; null for never.
    """

    share: bool = True
    full_every: int | None = field(default=None, metadata=limits(at_least=1))


@dataclass(frozen=True, kw_only=True)
class Telemetry(_Checked):
    """Where events are recorded and exported. Observing never fails a save, and none of it needs more than rank 0.

    Attributes:
        record_bytes: how large ``events.jsonl`` may grow before it is renamed to ``events.jsonl.1`` and begun anew.
        record_files: how many such older files are kept.
        logger_scalars: in Lightning and Accelerate, give ``ckpt/stall_s``, ``ckpt/write_gbps`` and their like to the loggers
            and trackers that are there.
        prometheus_textfile: a file ending in ``.prom`` that node_exporter's textfile collector reads; replaced in one step.
            Null for none.
        opentelemetry: make a span of every save and count with the global meter; needs ``opentelemetry-api``.
    """

    record_bytes: int = field(default=16 << 20, metadata=limits(at_least=4096))
    record_files: int = field(default=3, metadata=limits(at_least=0))
    logger_scalars: bool = True
    prometheus_textfile: str | None = field(
        default=None, metadata=limits(pattern=r"\.prom$", words="a path that ends in .prom")
    )
    opentelemetry: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_Checked):
    """Everything that can be set.

    Attributes:
        timeouts: how long anything may take.
        retention: which committed checkpoints to keep.
        writer: how bytes reach the disk.
        network: where the ranks reach rank 0.
        telemetry: where events are recorded and exported.
        storage: how object stores are reached.
        mirror: a second place for committed checkpoints.
        health: what is done about numbers that are NaN or infinite.
        unchanged: what is done about files that have the bytes of the checkpoint before.
        snapshot: ``"eager"``: the state is copied before ``save`` returns. ``"overlapped"``: parameters and optimizer state
            are copied while training goes on, and the optimizer's next step waits for the copy; nothing else may change them
            until then. ``"auto"``: eager, as long as nothing proves that overlapping is safe.
        max_host_bytes: the most host memory that one snapshot may take on a rank, at least 1 MiB; None for as much as the
            state. A larger state is written straight from its tensors, and ``save`` returns when that is done.
        max_in_flight: how many snapshots may be held at a time; each takes host memory of the state's size.
        on_busy: what ``save`` does when that many are in flight: ``"wait"`` for the oldest, or ``"skip"`` this one.
        on_failure: ``"raise"`` the error of a failed save, or ``"warn"`` and go on.
        max_consecutive_failures: with ``"warn"``: raise after so many failed saves in a row.
        save_on_signals: signals, such as ``("SIGTERM", "SIGUSR1")``, after which every rank saves and stops at the same
            step: ``Checkpointer.stop_requested``, or by itself in Lightning. The handler that was there before still runs;
            the default action does not. A program that does not react ends at the same signal after ``signal_grace_s``.
        signal_grace_s: how long the job may live after such a signal; a save that is not done by then is given up.
        lease_s: how long the record of a job on another host must stay unchanged before its directory is taken over.
        record_events: append one line per event to ``.safe_ckpt/events.jsonl`` beside the checkpoints.
    """

    removed = MappingProxyType(
        {
            "health.recheck": "memory is not compared between saves any more. Take the key out",
            "loops": "every start takes the newest healthy checkpoint. Take the section out",
        }
    )

    timeouts: Timeouts = field(default_factory=Timeouts)
    retention: Retention = field(default_factory=Retention)
    writer: WriterConfig = field(default_factory=WriterConfig)
    network: Network = field(default_factory=Network)
    telemetry: Telemetry = field(default_factory=Telemetry)
    storage: StorageConfig = field(default_factory=StorageConfig)
    mirror: Mirror = field(default_factory=Mirror)
    health: Health = field(default_factory=Health)
    unchanged: Unchanged = field(default_factory=Unchanged)
    snapshot: Literal["auto", "eager", "overlapped"] = "auto"
    max_host_bytes: int | None = field(default=None, metadata=limits(at_least=1 << 20))
    max_in_flight: int = field(default=1, metadata=limits(at_least=1))
    on_busy: Literal["wait", "skip"] = "wait"
    on_failure: Literal["raise", "warn"] = "raise"
    max_consecutive_failures: int = field(default=3, metadata=limits(at_least=1))
    save_on_signals: tuple[str, ...] = field(
        default=(), metadata=limits(pattern=_SIGNAL, words="the name of a signal that can be handled")
    )
    signal_grace_s: float = field(default=60.0, metadata=limits(above=0, at_most=_LONGEST_S))
    lease_s: float = field(default=60.0, metadata=limits(at_least=1, at_most=3600))
    record_events: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.save_on_signals:
            _require(name in signal.Signals.__members__, "save_on_signals", f"there is no signal {name!r} here")

    def deviations(self) -> str:
        """What differs from the defaults, such as ``retention.keep_last=3, timeouts.barrier_s=25.0``, or ``the defaults``.

        Equal for equal settings, different for different ones. What is longer than 600 characters ends in a hash of all of it.
        """
        return deviations(self)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, source: str = "") -> CheckpointConfig:
        """Build from plain data, such as parsed YAML. Durations are seconds or ``HH:MM:SS``.

        Args:
            data: names to values, nested as the settings are.
            source: what an error is to call the data.

        Raises:
            ConfigError: a key is unknown, or a value of the wrong type or out of range; names the key's path.
        """
        try:
            return build(cls, data)
        except ConfigError as error:
            raise ConfigError(key=error.key, message=error.message, source=source) from None

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> CheckpointConfig:
        """Read a YAML file: the keys at top level, or under ``safe_ckpt:``. The environment changes nothing of it.

        Raises:
            ConfigError: the file cannot be read or parsed, a key is unknown or given twice, or a value is not allowed; names
                file, line and key.
        """
        # Here and not at the top: most users configure in Python.
        from safe_ckpt.settings.sources import load, read_yaml

        return load(cls, [read_yaml(path)]).settings

    @classmethod
    def from_environment(cls) -> CheckpointConfig:
        """What holds where no ``config`` is given: variables, over the YAML file that ``SAFE_CKPT_CONFIG`` names.

        ``SAFE_CKPT__RETENTION__KEEP_LAST=3`` sets one key; values are written as in YAML. The defaults where nothing is set.

        Raises:
            ConfigError: as ``from_yaml``, or a variable that begins with ``SAFE_CKPT__`` is unknown.
        """
        from safe_ckpt.settings.sources import load_effective

        return load_effective(cls, os.environ).settings
