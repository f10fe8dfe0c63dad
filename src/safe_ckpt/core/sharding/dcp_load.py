"""Loading into a state dict as ``torch.distributed.checkpoint.load`` does it: in place, planned by its planners, by any ranks.

``dcp_read`` restores objects, and compares more. Here the checkpoint's own names count, and nothing else: what the state dict
has must be there, what the checkpoint has besides is left alone. Nothing here is a collective.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType

from safe_ckpt.core.formats.manifest import DCP_METADATA
from safe_ckpt.core.formats.torch_reading import load_data
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dcp_read import StraightReader, read_metadata
from safe_ckpt.errors import HostileCheckpointError, RestoreError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

logger = logging.getLogger(__name__)
ADMITTED: tuple[type, ...] = (io.BytesIO,)
"""Besides what ``torch.load(weights_only=True)`` admits and arrays: classes of which making one runs their own code alone."""
_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None), torch.Tensor, torch.nn.Parameter})
_judged: set[type] = set()
_MISFITS = (RuntimeError, ValueError, KeyError, AssertionError)


class Loading:
    """A load of one checkpoint, compared with the state dict on this rank. Nothing was read into that yet.

    Args:
        folder: with ``.metadata`` and ``*.distcp``, verified where that was possible.
        state: names to tensors, nested state dicts and other values. Its meta tensors get memory here.
        planner: says what goes where; None for torch's own.
        is_coordinator: whether this rank is the first one.

    Raises:
        RestoreError: the checkpoint has nothing for a name, or a tensor of another shape.
        HostileCheckpointError: what is asked for cannot be read without running code.
        CorruptCheckpointError: ``.metadata`` cannot be read.
        OSError: a file could not be read.
    """

    def __init__(
        self, folder: Path, state: dict[str, Any], planner: LoadPlanner | None = None, *, is_coordinator: bool = False
    ) -> None:
        metadata = read_metadata(folder)
        self._folder = folder
        self._planner = planner if planner is not None else DefaultLoadPlanner()
        self._reader = StraightReader(folder)
        try:
            self._planner.set_up_planner(state, metadata, is_coordinator)
            self._reader.set_up_storage_reader(metadata, is_coordinator)
            self._plan: LoadPlan = self._planner.finish_plan(
                self._reader.prepare_local_plan(self._planner.create_local_plan())
            )
        except _MISFITS as error:
            raise RestoreError(path=str(folder), message=str(error)) from error
        objects = [item for item in self._plan.items if item.type == LoadItemType.BYTE_IO]
        if objects:
            self._read(dataclasses.replace(self._plan, items=objects), _Checks(folder))

    def read(self) -> None:
        """Read what belongs to this rank, into place.

        Raises:
            OSError: a file could not be read.
            RestoreError: the planner refuses what was read.
        """
        try:
            self._read(self._plan, _Checks(self._folder, self._planner))
        except _MISFITS as error:
            raise RestoreError(path=str(self._folder), message=str(error)) from error

    def _read(self, plan: LoadPlan, checks: _Checks) -> None:
        self._reader.read_data(plan, cast("LoadPlanner", checks)).wait()


def warn_of_refused(state: object) -> None:
    """Log, once for each class, that ``Loading`` will refuse what is saved."""
    for leaf in dtensor.leaves(state):
        kind = type(leaf)
        if kind in _PLAIN or kind in _judged or isinstance(leaf, torch.Tensor):
            continue
        _judged.add(kind)
        buffer = io.BytesIO()
        try:
            torch.save(leaf, buffer)
            buffer.seek(0)
            load_data(buffer, ADMITTED)
        except pickle.UnpicklingError:
            text = (
                "the state has a %s.%s, which a load will refuse, as reading it runs code of its class. If that is yours, "
                "call torch.serialization.add_safe_globals([...]) with it at the start of the script, or leave it out"
            )
            logger.warning(text, kind.__module__, kind.__qualname__)
        except Exception as error:  # the save itself says what is wrong
            logger.debug("%s was not looked at: %s", kind, error)


class _Checks:
    """A planner before which each object is read once without running anything; without a planner that is all.

    Args:
        folder: of the checkpoint, for errors.
        planner: gets what is in order.
    """

    def __init__(self, folder: Path, planner: LoadPlanner | None = None) -> None:
        self._folder = folder
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See ``LoadPlanner``."""
        try:
            load_data(value, ADMITTED)
        except pickle.UnpicklingError as error:
            text = " ".join(str(error).split())[:600]
            message = (
                f"{read_item.storage_index.fqn} cannot be read without running code: {text}. Nothing of it was run. If its "
                "class is yours, call torch.serialization.add_safe_globals([...]) with it before you load"
            )
            raise HostileCheckpointError(path=str(self._folder), file=DCP_METADATA, message=message) from error
        value.seek(0)
        if self._planner is not None:
            self._planner.load_bytes(read_item, value)
