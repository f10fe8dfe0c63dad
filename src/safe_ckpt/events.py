"""Events as frozen facts. The core emits them, and hooks receive them.

Every hook is called on one background thread, on the rank on which the event happened. A hook that raises is logged and
dropped, and one that does not return is named in the log and not waited for: observing never fails a save. Hooks that are
ready to use are in ``safe_ckpt.hooks``.

For one save a rank emits, in this order: ``Agreed``, ``Snapshotted``, ``Written``, then ``Committed`` or ``Failed``, and on
rank 0 after a commit ``Removed`` and ``Retained``. What does not happen on a rank, such as writing, it does not emit.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all events: its rank, and when it happened (seconds since the epoch), which may be before its delivery."""

    rank: int
    at: float = field(default_factory=time.time)

    @property
    def kind(self) -> str:
        """The event's name in lower case, as in ``events.jsonl``."""
        return type(self).__name__.lower()

    def facts(self) -> dict[str, Any]:
        """Its kind, as ``event``, and its fields: JSON-able data."""
        return {"event": self.kind, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Agreed(Event):
    """All ranks agreed that this save begins, ``seconds`` after the call of ``save``. The copy is not taken yet.

    ``optimizer_steps`` are those that torch's optimizers had made by then in this process; None where nobody counts them, such
    as on other ranks than 0.
    """

    name: str
    step: int
    seconds: float
    optimizer_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Alive(Event):
    """A sign of life of rank 0, every 30 s from the first step of an optimizer on.

    ``optimizer_steps`` are those that torch's optimizers have made so far in this process. In ``events.jsonl`` it takes the
    place of the sign before it where nothing else was recorded in between.
    """

    optimizer_steps: int


@dataclass(frozen=True, kw_only=True)
class Snapshotted(Event):
    """The copy is complete and the caller may go on. ``stall_s`` is how long the call held the caller.

    ``mode`` is ``"eager"``; ``"overlapped"`` where the caller went on before the copy was complete; ``"streamed"`` where there
    was no copy and the caller waited for the disk.
    """

    name: str
    step: int
    size_bytes: int
    stall_s: float
    mode: Literal["eager", "overlapped", "streamed"] = "eager"


@dataclass(frozen=True, kw_only=True)
class Written(Event):
    """This rank's files are durable in the pending directory."""

    name: str
    step: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """The checkpoint has its final name. ``seconds`` counts from the call to ``save``.

    ``size_bytes`` are those of all ranks; 0 where a file was only given another name. ``weights_only``: training cannot
    resume from it.
    """

    name: str
    step: int
    path: str
    sequence: int
    size_bytes: int
    seconds: float
    weights_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Unhealthy(Event):
    """The checkpoint was committed, and has numbers that are NaN or infinite: ``what`` names the worst tensors."""

    name: str
    step: int
    path: str
    what: str
    marked: bool


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The save failed on every rank, and nothing was committed, unless ``outcome_unknown``: then it may be, as a resume sees.

    ``phase`` is where, ``seconds`` counts from the call to ``save``, ``missing`` are the ranks that did not come or were lost.
    """

    name: str
    step: int
    error: str
    phase: str = ""
    seconds: float = 0.0
    missing: tuple[int, ...] = ()
    outcome_unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class Respawned(Event):
    """The writer process was replaced and the same snapshot is written again; ``name`` is that of the checkpoint."""

    pid: int
    ended: str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """A signal on rank ``by_rank``: every rank saves and stops after this step.

    ``forecast_s`` is when a save begun now should be done, going by how long the last one took and by what is in flight; 0
    when there was none. Above ``left_s`` it will hardly be done; the save is tried nevertheless, which endangers nothing.
    """

    signal: str
    by_rank: int
    left_s: float
    forecast_s: float


@dataclass(frozen=True, kw_only=True)
class Removed(Event):
    """A checkpoint was deleted after its successor was committed."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Retained(Event):
    """Retention after a commit: the newest ten names in ``kept``, oldest first, and the deleted paths in ``removed``.

    A checkpoint that could not be deleted is in neither. ``kept_count`` counts all that stay. Not emitted under Lightning,
    where ModelCheckpoint manages retention. ``seconds`` is how long choosing and deleting took, in the background.
    """

    kept: tuple[str, ...]
    kept_count: int
    removed: tuple[str, ...]
    freed_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Quarantined(Event):
    """A checkpoint whose bytes are wrong was moved away, not deleted."""

    path: str
    moved_to: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A checkpoint was verified on all ranks and chosen."""

    path: str
    step: int
    seconds: float
    rejected: int


@dataclass(frozen=True, kw_only=True)
class Mirrored(Event):
    """A committed checkpoint was uploaded to the mirror, or could not be.

    Attributes:
        path: where it is.
        url: where its copy is; of one that failed, where it should be.
        size_bytes: how much was uploaded.
        seconds: how long it took.
        error: why it is not there; "" when it is.
    """

    path: str
    url: str
    size_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Fetched(Event):
    """A checkpoint was brought from the mirror into its directory.

    Attributes:
        path: where it is now.
        url: where it was.
        size_bytes: how much was fetched.
        seconds: how long it took.
    """

    path: str
    url: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TimeoutsRaised(Event):
    """Collectives of ``groups`` (each with what it was before) may take ``seconds`` from now on."""

    groups: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TimeoutsRestored(Event):
    """The timeouts of ``groups`` are what they were before."""

    groups: tuple[str, ...]


class Hook(Protocol):
    """Anything that is called with events.

    Example:
        ```python
        from safe_ckpt.events import Committed


        def say(event):
            if isinstance(event, Committed):
                print(f"{event.name} is committed")


        with Checkpointer("runs/exp", hooks=[say]) as ckpt:
            ckpt.save(100, {"model": model})
        ```

        ```text
        step-00000100 is committed
        ```
    """

    def __call__(self, event: Event) -> None:
        """Take one event. Called on one background thread."""
