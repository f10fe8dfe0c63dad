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
from typing import Any, Literal, TypeAlias

from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.fields import build, check_values, deviations, limits

_LONGEST_S = 365 * 24 * 3600  # longer is a slip, and some waits take no more
_SIGNAL = r"^SIG(?!KILL$|STOP$)[A-Z0-9]+$"


class _Checked:
    """Settings that are checked when they are built."""

    def __post_init__(self) -> None:
        check_values(self)


def _require(condition: bool, key: str, message: str) -> None:
    if not condition:
        raise ConfigError(key=key, message=message)


@dataclass(frozen=True, kw_only=True)
class Timeouts(_Checked):
    """How long anything may take. All values are in seconds, above zero and at most a year.

    Example:
        ```python
        config = CheckpointConfig(timeouts=Timeouts(lengthy_s=2 * 3600, barrier_s=600))
        ```
    """

    lengthy_s: float = field(default=3600.0, metadata=limits(above=0, at_most=_LONGEST_S))
    """How long one save may take, from the call until every rank knows the outcome, as long as all ranks are alive."""
    barrier_s: float = field(default=300.0, metadata=limits(above=0, at_most=_LONGEST_S))
    """How long a rank waits for the other ranks to make the same call."""
    writer_stall_s: float = field(default=60.0, metadata=limits(above=0, at_most=_LONGEST_S))
    """How long the writer process may write nothing before it is replaced. If it was killed, it is replaced at once; if it
    was stopped (SIGSTOP), after 3 s."""
    fsync_stall_s: float = field(default=300.0, metadata=limits(above=0, at_most=_LONGEST_S))
    """How long one fsync may take, or one write while the kernel reports that it waits for the disk."""
    peer_stall_s: float = field(default=30.0, metadata=limits(above=0, at_most=_LONGEST_S))
    """How long a rank may send no heartbeat before the others count it as lost."""
    shutdown_s: float = field(default=120.0, metadata=limits(above=0, at_most=_LONGEST_S))
    """How long ``close``, and the end of the program, wait for a save that makes no progress."""


@dataclass(frozen=True, kw_only=True)
class Retention(_Checked):
    """Which committed checkpoints to keep. The others are deleted after each commit. Without a rule all are kept.

    Example:
        ```python
        rules = Retention(keep_last=3, keep_best=1, metric="loss", keep_every_steps=1000)
        with Checkpointer("runs/exp", CheckpointConfig(retention=rules)) as ckpt:
            ckpt.save(100, {"model": model}, metrics={"loss": 0.25})
        ```
    """

    keep_last: int | None = field(default=None, metadata=limits(at_least=1))
    """Keep this many of the newest checkpoints."""
    keep_best: int | None = field(default=None, metadata=limits(at_least=1))
    """Keep this many of the best checkpoints, by ``metric``. A checkpoint without it is not among the best. Until one has it as
    a finite number, all are kept."""
    metric: str | None = None
    """The metric that ``keep_best`` compares: a name from ``metrics=`` of ``save``."""
    mode: Literal["min", "max"] = "min"
    """Whether a lower (``"min"``) or a higher (``"max"``) metric is better."""
    keep_every_steps: int | None = field(default=None, metadata=limits(at_least=1))
    """Keep every checkpoint whose step is a multiple of this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.keep_best is None or bool(self.metric), "metric", "keep_best needs the name of a metric")


@dataclass(frozen=True, kw_only=True)
class WriterConfig(_Checked):
    """How bytes reach the disk.

    Example:
        ```python
        config = CheckpointConfig(writer=WriterConfig(direct_io="off", niceness=19))
        ```
    """

    direct_io: Literal["auto", "off"] = "auto"
    """``"auto"``: write past the page cache (O_DIRECT) if the file system can. ``"off"``: never."""
    chunk_bytes: int = field(default=8 << 20, metadata=limits(at_least=4096, multiple_of=4096))
    """The size of one write."""
    flush_every_bytes: int = field(default=64 << 20, metadata=limits(at_least=4096))
    """Without direct I/O: flush after this many bytes, so that the last fsync is short. Not below ``chunk_bytes``."""
    niceness: int = field(default=10, metadata=limits(at_least=0, at_most=19))
    """How much the niceness of the writer process is raised above that of training."""
    max_respawns: int = field(default=2, metadata=limits(at_least=0))
    """How often one save replaces a writer process that died or stalled. After that the save fails."""
    inline_bytes: int = field(default=2 << 20, metadata=limits(at_least=0))
    """A rank that writes at most this much in one save writes it in a thread, without the writer process. 0: always use the
    writer process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.flush_every_bytes >= self.chunk_bytes, "flush_every_bytes", "must not be below chunk_bytes")


@dataclass(frozen=True, kw_only=True)
class Network(_Checked):
    """Where the ranks reach rank 0 while they save. The traffic of training does not go here.

    Example:
        ```python
        config = CheckpointConfig(network=Network(interface="ib0", port=29600))
        ```
    """

    interface: str | None = None
    """The network interface of rank 0's host on which rank 0 listens, such as ``ib0``, or one of its addresses. Null: all
    interfaces, or only the loopback if torchrun says that all ranks run on one host."""
    port: int = field(default=0, metadata=limits(at_least=0, at_most=65520))
    """The first of 16 ports; rank 0 takes a free one of them. 0: any port."""


@dataclass(frozen=True, kw_only=True)
class StorageConfig(_Checked):
    """How object stores are reached: for a directory that is an address (``s3://``, ``gs://``, ``az://``), and for ``mirror``.

    Credentials, endpoint and region come from the environment as obstore reads it: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
    ``AWS_REGION``, ``AWS_ALLOW_HTTP``, ``AZURE_STORAGE_ACCOUNT_NAME``, ``GOOGLE_APPLICATION_CREDENTIALS`` and the like, or from
    the role of the machine.

    Example:
        ```python
        storage = StorageConfig(options=("region=eu-central-1",), parts_in_flight=8)
        config = CheckpointConfig(storage=storage)  # for Checkpointer("s3://bucket/run", config)
        ```
    """

    options: tuple[str, ...] = field(
        default=(), repr=False, metadata=limits(pattern=r"^[A-Za-z][A-Za-z0-9_]*=", words="name=value", secret=True)
    )
    """Settings of the store as ``name=value``, with obstore's names, such as ``endpoint=https://minio.example:9000`` or
    ``region=eu-central-1``. They replace what the environment says. Listings show no value, and errors show no key, token or
    password."""
    part_bytes: int = field(default=8 << 20, metadata=limits(at_least=5 << 20, multiple_of=1 << 20))
    """The size of one part of an upload, and of one read."""
    parts_in_flight: int = field(default=4, metadata=limits(at_least=1, at_most=64))
    """How many parts each rank sends or reads at a time."""
    request_timeout_s: float = field(default=60.0, metadata=limits(above=0, at_most=_LONGEST_S))
    """How long one request may take, that of a part included. A request that fails is tried again until ``lengthy_s``."""
    cache_dir: str | None = field(default=None, metadata=limits(pattern=r"^/", words="an absolute path"))
    """The directory into which the ranks of a host fetch a checkpoint, and in which a framework writes its files when its
    directory is an address. Null: a checkpoint is fetched into memory (``/dev/shm``) if there is room, everything else goes to
    the directory for temporary files."""
    unfenced: bool = False
    """Use a store that cannot create or replace an object on a condition. Two jobs can then commit into one directory."""


@dataclass(frozen=True, kw_only=True)
class Mirror(_Checked):
    """A second place for committed checkpoints, in an object store or another directory. They go there in the background.

    Example:
        ```python
        mirror = Mirror(url="s3://bucket/run", keep_last=2, required=True)
        config = CheckpointConfig(mirror=mirror, retention=Retention(keep_last=3))
        ```
    """

    url: str | None = field(
        default=None,
        metadata=limits(
            pattern=r"^((s3|gs|az)://[^/@?]+(/[^@]*)?|~?/.*[^/].*)$",
            words="s3://, gs:// or az:// with a bucket, and no user or password; or the full path of a directory",
        ),
    )
    """Where the copies go, such as ``s3://bucket/run`` or ``/lustre/me/run``. Null: no mirror."""
    keep_last: int | None = field(default=None, metadata=limits(at_least=1))
    """Keep this many of the newest copies. Null: keep all."""
    keep_every_steps: int | None = field(default=None, metadata=limits(at_least=1))
    """Keep every copy whose step is a multiple of this."""
    required: bool = False
    """Retention deletes a local checkpoint only after it, or a newer one, was uploaded."""
    follow: bool = False
    """When retention deletes a local checkpoint, delete its copy too."""
    near: Literal["shared", "per-host"] = "shared"
    """``"per-host"``: the directory lies on each host's own disk, such as NVMe or ``/dev/shm``, and holds what its ranks have
    written. For ``Checkpointer``, Accelerate and Transformers. ``"shared"``: all ranks see one directory."""
    max_behind: int | None = field(default=None, metadata=limits(at_least=1))
    """A save that finds more committed ones than this with neither a copy nor a newer one there raises ``MirrorBehindError`` on
    every rank, and stays committed. Null: a mirror that is behind is no error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keep_last", "keep_every_steps", "required", "follow", "near", "max_behind"):
            given = self.url is None and getattr(self, name) not in (None, False, "shared")
            _require(not given, name, "does nothing without mirror.url: set that, too")


@dataclass(frozen=True, kw_only=True)
class Health(_Checked):
    """Rules for an unhealthy checkpoint: one with NaN or Inf in its tensors.

    Example:
        ```python
        health = Health(action="stop", ignore=("*.mask",))
        with Checkpointer("runs/exp", CheckpointConfig(health=health)) as ckpt:
            ckpt.save(100, {"model": model})  # with a NaN in it the next call raises UnhealthyStateError
        ```
    """

    action: Literal["mark", "stop", "warn", "off"] = "mark"
    """``"mark"``: commit it and mark it as unhealthy; ``resume`` skips it unless you name it, and retention does not count it.
    ``"stop"``: the same, then every rank raises ``UnhealthyStateError``. ``"warn"``: log a warning; it counts like any other.
    ``"off"``: do not check."""
    norm_jump: float | None = field(default=None, metadata=limits(above=1))
    """A checkpoint is also unhealthy if the norm of one of its files has grown by more than this factor since the save
    before. Null: the norm may grow freely."""
    ignore: tuple[str, ...] = ()
    """Patterns of tensor names that are not checked, such as ``"*.mask"``."""


@dataclass(frozen=True, kw_only=True)
class Unchanged(_Checked):
    """Rules for files that have the same bytes as in the checkpoint before.

    Example:
        ```python
        config = CheckpointConfig(unchanged=Unchanged(full_every=100))
        ```
    """

    share: bool = True
    """Do not write them again: the new checkpoint gets a hard link. Frozen weights go to files of their own."""
    full_every: int | None = field(default=None, metadata=limits(at_least=1))
    """Write a file anew that was last written this many saves ago, so that not all checkpoints depend on the same blocks of
    the disk. Null: never."""


@dataclass(frozen=True, kw_only=True)
class Telemetry(_Checked):
    """Where events are recorded and exported. No save fails because of it, and rank 0 alone does it.

    Example:
        ```python
        telemetry = Telemetry(prometheus_textfile="/var/lib/node_exporter/safe_ckpt.prom")
        config = CheckpointConfig(telemetry=telemetry)
        ```
    """

    record_bytes: int = field(default=16 << 20, metadata=limits(at_least=4096))
    """How large ``events.jsonl`` may grow. Then it becomes ``events.jsonl.1``, and a new file is begun."""
    record_files: int = field(default=3, metadata=limits(at_least=0))
    """How many of these older files are kept."""
    logger_scalars: bool = True
    """In Lightning and Accelerate: log ``ckpt/stall_s``, ``ckpt/write_gbps`` and the like with your loggers and trackers."""
    prometheus_textfile: str | None = field(
        default=None, metadata=limits(pattern=r"\.prom$", words="a path that ends in .prom")
    )
    """A file for the textfile collector of node_exporter, replaced as a whole each time. Null: none."""
    opentelemetry: bool = False
    """Make a span of every save, and count with the global meter. Needs ``opentelemetry-api``."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_Checked):
    """All settings. Each has a default.

    Example:
        ```python
        config = CheckpointConfig(
            retention=Retention(keep_last=3),
            timeouts=Timeouts(barrier_s=600),
            save_on_signals=("SIGTERM",),
        )
        print(config.deviations())
        ```

        ```text
        retention.keep_last=3, save_on_signals=('SIGTERM',), timeouts.barrier_s=600.0
        ```
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
    """When the state is copied. ``"eager"``: before ``save`` returns. ``"overlapped"``: parameters and optimizer state are
    copied while training goes on, and the next step of the optimizer waits for the copy; nothing else may change them until
    then. ``"auto"``: today the same as ``"eager"``."""
    max_host_bytes: int | None = field(default=None, metadata=limits(at_least=1 << 20))
    """The most host memory that the copy of one save may take on a rank. Null: as much as the state needs. A larger state is
    written from its tensors without a copy, and ``save`` returns when all of it is on the disk."""
    max_in_flight: int = field(default=1, metadata=limits(at_least=1))
    """How many saves may be in flight. Each takes host memory of the size of the state."""
    on_busy: Literal["wait", "skip"] = "wait"
    """When that many are in flight, ``save`` waits for the oldest (``"wait"``), or skips the new one (``"skip"``)."""
    on_failure: Literal["raise", "warn"] = "raise"
    """When a save failed, raise its error (``"raise"``), or log it and go on (``"warn"``)."""
    max_consecutive_failures: int = field(default=3, metadata=limits(at_least=1))
    """With ``"warn"``: raise the error after this many failed saves in a row."""
    save_on_signals: tuple[str, ...] = field(
        default=(), metadata=limits(pattern=_SIGNAL, words="the name of a signal that can be handled")
    )
    """Signals, such as ``["SIGTERM", "SIGUSR1"]``, after which every rank saves and stops at the same step. Lightning and the
    Transformers Trainer do so by themselves; a loop of your own looks at ``stop_requested`` of the ``Checkpointer``, or of the
    handle of ``register`` (Accelerate) or ``install`` (DeepSpeed). Your own handler still runs, the default action does not.
    A program that does not react is ended by the same signal after ``signal_grace_s``."""
    signal_grace_s: float = field(default=60.0, metadata=limits(above=0, at_most=_LONGEST_S))
    """How long the job may run after such a signal. A save that is not done by then is given up."""
    lease_s: float = field(default=60.0, metadata=limits(at_least=1, at_most=3600))
    """Takeover: how long the lock of a job on another host must show no sign of life before a new job takes its directory."""
    record_events: bool = True
    """Append one line per event to ``.safe_ckpt/events.jsonl`` beside the checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.save_on_signals:
            _require(name in signal.Signals.__members__, "save_on_signals", f"there is no signal {name!r} here")

    def deviations(self) -> str:
        """Every setting that is no default, such as ``retention.keep_last=3, timeouts.barrier_s=25.0``, or ``the defaults``.

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
        """The settings where no ``config`` is given: variables, over the YAML file that ``SAFE_CKPT_CONFIG`` names.

        ``SAFE_CKPT__RETENTION__KEEP_LAST=3`` sets one key; values are written as in YAML. The defaults where nothing is set.

        Raises:
            ConfigError: as ``from_yaml``, or a variable that begins with ``SAFE_CKPT__`` is unknown.
        """
        from safe_ckpt.settings.sources import load_effective

        return load_effective(cls, os.environ).settings


ConfigLike: TypeAlias = CheckpointConfig | Mapping[str, Any] | str | os.PathLike[str]
"""Settings as a door takes them: these, a mapping of their keys, or the path of a YAML file."""


def settings_of(given: ConfigLike | None, key: str = "config") -> CheckpointConfig | None:
    """The settings that ``given`` stands for; None where it is None. Of this process alone.

    Args:
        given: what a door was given.
        key: the name of the argument there.

    Raises:
        ConfigError: it is none of these, and what was meant, if that is known; or what it holds is not allowed.
    """
    if given is None or isinstance(given, CheckpointConfig):
        return given
    if isinstance(given, Mapping):
        return CheckpointConfig.from_mapping(given, source=key)
    if isinstance(given, str | os.PathLike):
        return CheckpointConfig.from_yaml(given)
    raise ConfigError(key=key, message=_meant(given))


def _meant(given: object) -> str:
    kind = type(given).__name__
    if type(given) in _SECTIONS:
        return f"got a {kind}: write CheckpointConfig({_SECTIONS[type(given)]}={kind}(...))"
    hint = "; a process group is given as group=" if hasattr(given, "group_name") else ""
    expected = "a CheckpointConfig, a mapping of its keys, the path of a YAML file, or None"
    return f"expected {expected}, got {kind}{hint}"


_SECTIONS: Mapping[type, str] = {
    Timeouts: "timeouts",
    Retention: "retention",
    WriterConfig: "writer",
    Network: "network",
    Telemetry: "telemetry",
    StorageConfig: "storage",
    Mirror: "mirror",
    Health: "health",
    Unchanged: "unchanged",
}
