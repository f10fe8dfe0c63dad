"""Settings: frozen, validated when built, readable from YAML.

Units are in the names: ``_s`` seconds, ``_bytes`` bytes. ``Retention`` says what to keep, ``Timeouts`` how long to wait,
``WriterConfig`` how bytes reach the disk, ``Telemetry`` who is told, and ``CheckpointConfig`` holds one of each.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import signal
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from safe_ckpt.errors import ConfigError

_T = TypeVar("_T")
_CLOCK = re.compile(r"^(?:(\d+):)?(\d{1,2}):(\d{2}(?:\.\d+)?)$")
CONFIG_VARIABLE = "SAFE_CKPT_CONFIG"


def _check_types(settings: Any) -> None:
    """Refuse values of the wrong type, so that what comes after may rely on it."""
    hints = typing.get_type_hints(type(settings))
    for item in dataclasses.fields(settings):
        hint, value = hints[item.name], getattr(settings, item.name)
        if dataclasses.is_dataclass(hint):
            _require(isinstance(value, typing.cast("type", hint)), item.name, f"expected {hint}, got {value!r}")
        elif hint is float:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(number and abs(value) < float("inf"), item.name, f"expected a finite number, got {value!r}")
        else:
            _coerce(hint, value, item.name)


def _require(condition: bool, key: str, message: str) -> None:
    if not condition:
        raise ConfigError(key=key, message=message)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long anything may take. All in seconds, all finite, all above zero.

    Attributes:
        lengthy_s: one save from agreement to verdict, however large, as long as its ranks are alive.
        barrier_s: how long a rank waits for the others to make the same call.
        writer_stall_s: how long the writer process may move no byte.
        fsync_stall_s: how long one fsync may take.
        peer_stall_s: how long a rank may show no sign of life before it counts as lost.
        shutdown_s: how long ``close`` and interpreter exit may wait for what makes no progress.
    """

    lengthy_s: float = 3600.0
    barrier_s: float = 300.0
    writer_stall_s: float = 60.0
    fsync_stall_s: float = 300.0
    peer_stall_s: float = 30.0
    shutdown_s: float = 120.0

    def __post_init__(self) -> None:
        _check_types(self)
        for item in dataclasses.fields(self):
            _require(getattr(self, item.name) > 0, item.name, f"expected above 0, got {getattr(self, item.name)!r}")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which committed checkpoints to keep. What no rule keeps is deleted; with no rule at all everything is kept.

    Attributes:
        keep_last: keep this many of the newest.
        keep_best: keep this many of the best by ``metric``.
        metric: name of the metric given to ``save``; needed by ``keep_best``.
        mode: ``"min"`` when lower is better, ``"max"`` when higher is.
        keep_every_steps: keep every checkpoint whose step is a multiple of this.
    """

    keep_last: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    keep_every_steps: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        for key in ("keep_last", "keep_best", "keep_every_steps"):
            value = getattr(self, key)
            _require(value is None or value >= 1, key, f"expected at least 1, or null for no such rule, got {value!r}")
        _require(self.keep_best is None or bool(self.metric), "metric", "keep_best needs the name of a metric")


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """How bytes reach the disk.

    Attributes:
        direct_io: write past the page cache where the file system can (``"auto"``), or never (``"off"``).
        chunk_bytes: the size of one write, a multiple of 4096.
        flush_every_bytes: without direct I/O, flush after so many bytes so that the last fsync is short.
        niceness: added to the niceness of the writer process, 0 to 19.
        max_respawns: how often a dead or stalled writer process is replaced within one save.
    """

    direct_io: Literal["auto", "off"] = "auto"
    chunk_bytes: int = 8 << 20
    flush_every_bytes: int = 64 << 20
    niceness: int = 10
    max_respawns: int = 2

    def __post_init__(self) -> None:
        _check_types(self)
        _require(
            self.chunk_bytes >= 4096 and self.chunk_bytes % 4096 == 0,
            "chunk_bytes",
            f"expected a multiple of 4096, got {self.chunk_bytes!r}",
        )
        _require(self.flush_every_bytes >= self.chunk_bytes, "flush_every_bytes", "must not be below chunk_bytes")
        _require(0 <= self.niceness <= 19, "niceness", f"expected 0 to 19, got {self.niceness!r}")
        _require(self.max_respawns >= 0, "max_respawns", f"expected 0 or more, got {self.max_respawns!r}")


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """Who is told what happens. Observing never fails a save, and none of it needs more than rank 0.

    Attributes:
        record_bytes: how large ``events.jsonl`` may grow before it is renamed to ``events.jsonl.1`` and begun anew.
        record_files: how many such older files are kept.
        logger_scalars: in Lightning and Accelerate, give ``ckpt/stall_s``, ``ckpt/write_gbps`` and their like to the loggers
            and trackers that are there.
        prometheus_textfile: a file ending in ``.prom`` that node_exporter's textfile collector reads; replaced in one step.
            Null for none.
        opentelemetry: make a span of every save and count with the global meter; needs ``opentelemetry-api``.
    """

    record_bytes: int = 16 << 20
    record_files: int = 3
    logger_scalars: bool = True
    prometheus_textfile: str | None = None
    opentelemetry: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        _require(self.record_bytes >= 4096, "record_bytes", f"expected at least 4096, got {self.record_bytes!r}")
        _require(self.record_files >= 0, "record_files", f"expected 0 or more, got {self.record_files!r}")
        _require(
            self.prometheus_textfile is None or self.prometheus_textfile.endswith(".prom"),
            "prometheus_textfile",
            f"expected a path that ends in .prom, for nothing else is collected, got {self.prometheus_textfile!r}",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Everything that can be set.

    Attributes:
        timeouts: how long anything may take.
        retention: which committed checkpoints to keep.
        writer: how bytes reach the disk.
        telemetry: who is told what happens.
        snapshot: ``"eager"``: the state is copied before ``save`` returns. ``"overlapped"``: parameters and optimizer state
            are copied while training goes on, and the optimizer's next step waits for the copy; nothing else may change them
            until then. ``"auto"``: eager, as long as nothing proves that overlapping is safe.
        max_host_bytes: the most host memory that one snapshot may take on a rank, at least 1 MiB; None for as much as the
            state. A larger state is written straight from its tensors, and ``save`` returns when that is done.
        max_in_flight: how many snapshots may be held at a time; each takes host memory of the state's size.
        on_busy: what ``save`` does when that many are in flight: ``"wait"`` for the oldest, or ``"skip"`` this one.
        on_failure: ``"raise"`` the error of a failed save, or ``"warn"`` and go on.
        max_consecutive_failures: with ``"warn"``: raise after so many failed saves in a row.
        save_on_signals: signals, such as ``("SIGTERM", "SIGUSR1")``, after which every rank is told at the same step to save
            and stop: ``Checkpointer.stop_requested``, or by itself in Lightning. The handler that was there before still runs;
            the default action does not. A program that does not react ends at the same signal after ``signal_grace_s``.
        signal_grace_s: how long the job may live after such a signal; a save that is not done by then is given up.
        lease_s: how long the record of a job on another host must stay unchanged before its directory is taken over.
        record_events: append one line per event to ``.safe_ckpt/events.jsonl`` beside the checkpoints.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    retention: Retention = field(default_factory=Retention)
    writer: WriterConfig = field(default_factory=WriterConfig)
    telemetry: Telemetry = field(default_factory=Telemetry)
    snapshot: Literal["auto", "eager", "overlapped"] = "auto"
    max_host_bytes: int | None = None
    max_in_flight: int = 1
    on_busy: Literal["wait", "skip"] = "wait"
    on_failure: Literal["raise", "warn"] = "raise"
    max_consecutive_failures: int = 3
    save_on_signals: tuple[str, ...] = ()
    signal_grace_s: float = 60.0
    lease_s: float = 60.0
    record_events: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        _require(
            self.max_host_bytes is None or self.max_host_bytes >= 1 << 20,
            "max_host_bytes",
            f"expected at least 1048576 (1 MiB), or null for no limit, got {self.max_host_bytes!r}",
        )
        _require(self.max_in_flight >= 1, "max_in_flight", f"expected at least 1, got {self.max_in_flight!r}")
        _require(self.max_consecutive_failures >= 1, "max_consecutive_failures", "expected at least 1")
        for name in self.save_on_signals:
            known = name in signal.Signals.__members__ and name not in ("SIGKILL", "SIGSTOP")
            _require(known, "save_on_signals", f"{name!r} is no signal that can be handled")
        _require(self.signal_grace_s > 0, "signal_grace_s", f"expected above 0, got {self.signal_grace_s!r}")
        _require(self.lease_s >= 1, "lease_s", f"expected at least 1, got {self.lease_s!r}")

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, source: str = "") -> CheckpointConfig:
        """Build from plain data, such as parsed YAML.

        Raises:
            ConfigError: a key is unknown, or a value of the wrong type or out of range; names the key's path.
        """
        try:
            return _build(cls, data, "")
        except ConfigError as error:
            prefix = f"{source}: " if source else ""
            raise ConfigError(key=f"{prefix}{error.key}", message=error.message) from None

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> CheckpointConfig:
        """Read a YAML file: the keys at top level, or under ``safe_ckpt:``. Durations are seconds or ``HH:MM:SS``.

        Raises:
            ConfigError: the file cannot be read or parsed, a key is unknown, or a value is not allowed.
        """
        import yaml  # here and not at the top: most users configure in Python

        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(key=str(path), message=f"cannot be read as YAML: {error}") from error
        if isinstance(data, Mapping) and "safe_ckpt" in data:
            data = data["safe_ckpt"]
        return cls.from_mapping({} if data is None else data, source=str(path))

    @classmethod
    def from_environment(cls) -> CheckpointConfig:
        """Read the YAML file that ``SAFE_CKPT_CONFIG`` names; the defaults when it is not set."""
        path = os.environ.get(CONFIG_VARIABLE)
        return cls.from_yaml(path) if path else cls()


def parse_duration(value: object, key: str) -> float:
    """Seconds from a number, ``"90"``, ``"1:30"`` or ``"01:00:00"``.

    YAML 1.1 reads an unquoted 1:00:00 as the integer 3600 and a quoted one as text, so both arrive here.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        clock = _CLOCK.match(value.strip())
        if clock:
            hours, minutes, seconds = clock.groups()
            return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)
        try:
            return float(value)
        except ValueError:
            pass
    raise ConfigError(key=key, message=f'expected seconds or "HH:MM:SS", got {value!r}')


def _build(kind: type[_T], data: object, path: str) -> _T:
    if not isinstance(data, Mapping):
        raise ConfigError(key=path, message=f"expected keys with values, got {data!r}")
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else f"; known here: {', '.join(hints)}"
            raise ConfigError(key=_joined(path, key), message=f"unknown key{hint}")
        values[key] = _coerce(hints[key], value, _joined(path, key))
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(key=_joined(path, error.key), message=error.message) from None


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _coerce(hint: Any, value: object, key: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, key)
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _coerce(next(arg for arg in typing.get_args(hint) if arg is not type(None)), value, key)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(key=key, message=f"expected one of {', '.join(map(repr, choices))}, got {value!r}")
        return value
    if origin is tuple:
        return _names(value, key)
    return parse_duration(value, key) if hint is float else _plain(hint, value, key)


def _plain(hint: type, value: object, key: str) -> object:
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(key=key, message=f"expected {hint.__name__}, got {value!r}")
    return value


def _names(value: object, key: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError(key=key, message=f"expected a list of names, got {value!r}")
    return tuple(value)
