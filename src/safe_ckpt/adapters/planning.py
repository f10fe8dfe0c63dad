"""Plans of what one rank adds to a save, made before anything is written, and what goes wrong with that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from typing_extensions import Self

from safe_ckpt.adapters.pickles import warn_if_refused
from safe_ckpt.core.formats import torch_archive
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.refusals import changed_meanwhile
from safe_ckpt.core.saving.request import Payload, PlanningFailed, Snapshot, Streamed
from safe_ckpt.core.sharding.dtensor import load_keeping_types, own_state_dict, warn_of_rounded
from safe_ckpt.core.state.overlap import OverlapPlan
from safe_ckpt.core.state.planner import Models
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.errors import CoordinationError

if TYPE_CHECKING:
    from safe_ckpt.core.saving.engine import Engine


class Attempt:
    """A context that keeps what this rank raises while it plans a save: the other ranks must learn of it first.

    It also keeps what says that other ranks did not come: the user's code may meet them by itself. Use ``meeting`` around
    agreements of this save.

    Attributes:
        error: the first error; None so far.

    Example:
        ```python
        attempt, files = Attempt(), []
        with attempt:  # a state_dict() of the user's may raise anything
            files = [torch_file("model.pt", model.state_dict())]
        planned = Planned(files=files, error=attempt.error)  # with an error every rank raises it
        ```
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.keep(error)
        return isinstance(error, Exception)

    def keep(self, error: Exception) -> None:
        """Keep what went wrong; the first error counts."""
        self.error = self.error or changed_meanwhile(error, "the state of the training") or error

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """The same for a block in which all ranks meet: what they raise because they did not meet is raised at once."""
        try:
            yield
        except CoordinationError:
            raise
        except Exception as error:
            self.keep(error)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Files of one rank. ``folders`` and ``notes`` are the same on all ranks.

    Attributes:
        files: the files to write.
        copies: the files that are copied as they are.
        folders: below the checkpoint, for both.
        notes: further entries of the manifest.
        error: why this rank could not plan; every rank raises it.

    Example:
        ```python
        planned = Planned(files=[torch_file("model.pt", model.state_dict())], notes={"epoch": 3})
        content = planned.payload()  # for Saver.save
        ```
    """

    files: Sequence[FilePlan] = ()
    copies: Sequence[FileCopy] = ()
    folders: Sequence[str] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def payload(self, *, overlap: OverlapPlan | None = None, streamed: bool = False) -> Payload:
        """The payload of a ``SaveRequest``.

        Args:
            overlap: which tensors may be copied after the save has returned; None for none.
            streamed: write the files while the caller waits, without a copy in memory.
        """
        if self.error is not None:
            return PlanningFailed(error=self.error)
        if streamed:
            return Streamed(files=self.files)
        return Snapshot(files=self.files, copies=self.copies, folders=self.folders, overlap=overlap)

    @classmethod
    def joined(cls, parts: Iterable[Planned]) -> Planned:
        """Several as one. Of files of one name the last counts, of errors the first."""
        files: dict[str, FilePlan] = {}
        copies: list[FileCopy] = []
        notes: dict[str, Any] = {}
        folders: set[str] = set()
        error: Exception | None = None
        for part in parts:
            files.update((file.path, file) for file in part.files)
            copies += part.copies
            folders.update(part.folders)
            for key, value in part.notes.items():
                notes[key] = {**notes.get(key, {}), **value} if isinstance(value, Mapping) else value
            error = error or part.error
        return cls(files=list(files.values()), copies=copies, folders=sorted(folders), notes=notes, error=error)


def torch_file(path: str, state: object, *, key: str | None = None) -> FilePlan:
    """Plan a file that ``torch.load`` reads. Warns if a resume would refuse it.

    Args:
        path: within the checkpoint.
        state: its content. Tensors are copied when the save is started, not here.
        key: what an error calls ``state``; None for ``path``.

    Raises:
        StateError: something in ``state`` cannot be saved; names where it is.

    Example:
        ```python
        plan = torch_file("model.pt", {"model": model.state_dict(), "step": 100})
        print(plan.path, len(plan.tensors))
        ```

        ```text
        model.pt 2
        ```
    """
    file = torch_archive.torch_plan(path, state, strict=False, key=key or path)
    warn_if_refused(path, file.pieces[-1][1], key or path)
    return file


def note_models(engine: Engine, modules: Callable[[], Iterable[torch.nn.Module]]) -> None:
    """Before each save: tell which tensors may be infinite by design, and which are trained, by the models that it saves."""
    engine.note_models(Models(lambda: _by_name(modules())))


def go_on(engine: Engine, modules: Callable[[], Iterable[Any]]) -> None:
    """After a resume, as soon as training begins: have it warn if other parameters of these models are trained."""
    engine.extensions.ask("a resume", lambda one: one.training(lambda: _by_name(modules())))


def _by_name(modules: Iterable[Any]) -> dict[str, torch.nn.Module]:
    listed = list(modules)
    return {"": listed[0]} if len(listed) == 1 else {str(number): module for number, module in enumerate(listed)}


def states_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Names to states: of a Stateful its ``state_dict()``, of anything else what it is."""
    states = {}
    for name, one in state_dict.items():
        if isinstance(one, torch.optim.Optimizer):
            states[name] = own_state_dict(one)
        else:
            states[name] = one.state_dict() if isinstance(one, Stateful) else one
    return states


def give_back(states: Mapping[str, Any], state_dict: MutableMapping[str, Any]) -> None:
    """Give every Stateful its state, and put everything else in its place; a name that is not there is left out."""
    warn_of_rounded(states)
    for name, loaded in states.items():
        if name not in state_dict:
            continue
        one = state_dict[name]
        if isinstance(one, torch.optim.Optimizer):
            load_keeping_types(one, loaded)
        elif isinstance(one, Stateful):
            one.load_state_dict(loaded)
        else:
            state_dict[name] = loaded


def versions_of_buffers(module: torch.nn.Module) -> list[int]:
    """How often each was changed, as torch counts it: other numbers than before say that a forward pass has changed some."""
    return [one._version for one in module.buffers() if not one.is_inference()]
