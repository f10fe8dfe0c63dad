"""One handle of ours on one object of a framework. An earlier handle is removed before a new one is attached.

What is done to the object is undone as a whole: when the handle is removed, and where its constructor fails.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from typing_extensions import Self

from safe_ckpt.adapters.patch import MARK, Patch
from safe_ckpt.adapters.saver import Saver
from safe_ckpt.config import CheckpointConfig, ConfigLike
from safe_ckpt.core.coordination.agreed_config import agree_on_settings
from safe_ckpt.errors import ClosedError


def begin(owner: Any, config: ConfigLike | None, check: Callable[[Any, CheckpointConfig], None]) -> CheckpointConfig:
    """Agree on the settings, check them, and remove an earlier handle from ``owner``. Every rank calls this.

    What is refused changes nothing: the earlier handle stays in use.

    Args:
        owner: the framework's object.
        config: the user's settings; None for those of the environment.
        check: refuses an ``owner`` or settings that are not covered.

    Raises:
        ConfigError: a setting, or what ``check`` looked at, is not allowed; on every rank, also where it is so on one alone.
        DesyncError: the ranks were given different settings.
        SafeCheckpointError: a save of the earlier handle failed, and its error was not raised yet. That handle is removed.
    """
    settings, _ = agree_on_settings(config, functools.partial(check, owner))
    earlier = getattr(owner, MARK, None)
    if earlier is not None:
        earlier.remove()
    return settings


class AttachedHandle:
    """A handle on a framework's object, some of whose attributes it replaces.

    As a context manager it finishes what is in flight and leaves the object as it was.

    A subclass, and nobody else, uses ``_whole_or_nothing`` and ``_attach`` in its constructor, ``_call`` around each call of
    the user's, and ``_undo`` for what it changes besides: it leaves the object as it was, the last change first.

    Args:
        owner: the framework's object.
        saver: saves; closed when the handle ends.

    Attributes:
        config: the settings.
        saver: as given.
        ended: how this handle ended, one of ``endings``; "" while it is in use.
        endings: how a handle can end -> the message of ``ClosedError``: what happened and what to do.

    Example:
        ```python
        class Handle(AttachedHandle):
            def __init__(self, trainer, config):
                super().__init__(trainer, Saver(config, "toy"))
                with self._whole_or_nothing():
                    self._attach({"save": lambda: print("saved by the adapter")})


        with Handle(trainer, CheckpointConfig()):
            trainer.save()
        ```

        ```text
        saved by the adapter
        ```
    """

    endings: Mapping[str, str] = {"remove": "remove() was called: this handle saves nothing any more"}

    def __init__(self, owner: Any, saver: Saver) -> None:
        self.config = saver.config
        self._owner = owner
        self.saver = saver
        self.ended = ""
        self._undo = Patch()

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """The rest of a subclass's constructor: if it fails, the engine is closed and the object is as it was."""
        try:
            yield
        except BaseException:
            try:
                self.saver.close(quiet=True)
            finally:
                self._undo.give_back()
            raise

    def _attach(self, replacements: Mapping[str, Any]) -> None:
        """Replace attributes of the object; name -> what takes its place. From now on signals are watched."""
        self.saver.engine.watch_signals()
        self._undo.put(self._owner, {**replacements, MARK: self})

    @property
    def stop_requested(self) -> bool:
        """Whether to save and leave the loop: a signal of ``save_on_signals`` reached some rank.

        Look once per step, on every rank, on the thread that trains; all ranks get the same answer at the same step.

        Raises:
            ClosedError: the handle has ended.
            RendezvousTimeout: rank 0 has not looked as often as this rank.
            PeerLostError: rank 0 died or stopped.
        """
        self._refuse_ended("stop_requested")
        return self.saver.engine.stop_requested()

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait until everything in flight is committed. Every rank calls this.

        Args:
            mirrored: wait, too, until each save or a newer one has its copy in the mirror: for ``lengthy_s`` at most.

        Raises:
            ConfigError: there is no mirror.
            MirrorBehindError: the copies did not come; the same on every rank.
            SafeCheckpointError: a save failed, and its error was not raised yet; the same on every rank.
        """
        self.saver.wait(mirrored=mirrored)

    def remove(self) -> None:
        """Finish what is in flight and leave the object as it was. Again: nothing happens.

        Raises:
            SafeCheckpointError: a save failed, and its error was not raised yet. The object is as it was all the same.
        """
        try:
            self._end("remove")
        finally:
            self._detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end("remove", quiet=error is not None)
        finally:
            self._detach()

    @property
    def closed(self) -> bool:
        """Whether this handle has ended, and saves nothing any more."""
        return bool(self.ended)

    @contextlib.contextmanager
    def _call(self, name: str) -> Iterator[None]:
        """All agreements within are parts of one call of the user's.

        Raises:
            ClosedError: the handle has ended.
        """
        self._refuse_ended(name)
        with self.saver.engine.together(name):
            yield

    def _refuse_ended(self, call: str) -> None:
        """Raise ``ClosedError`` if this handle has ended."""
        if self.ended:
            raise ClosedError(message=f"{call}: {self.endings[self.ended]}")

    def _end(self, by: str, *, quiet: bool = False) -> None:
        """Finish what is in flight and give the directories back; with ``quiet`` another exception is on its way."""
        if self.ended:
            return
        self.ended = by
        self.saver.close(quiet=quiet)

    def _detach(self) -> None:
        """Leave the object as it was, if this handle is on it."""
        if vars(self._owner).get(MARK) is self:
            self._undo.give_back()
