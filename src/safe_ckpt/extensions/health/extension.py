"""Saves with NaN or infinite numbers: what is known of each file, what the writer is told, and what follows from what it finds.

Pure decisions are in ``verdict``; the writer's observer is in ``examine``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from safe_ckpt import events
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest, describe_unhealthy
from safe_ckpt.core.formats.names import plain_name, plain_names
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.saving.extension import Conclusion, Extension, Outcome, Run
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.state.planner import Models
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.errors import SafeCheckpointError, UnhealthyStateError
from safe_ckpt.extensions.health import examine
from safe_ckpt.extensions.health.verdict import Expectation, of_checkpoint

if TYPE_CHECKING:
    import torch


class HealthExtension(Extension):
    """Has the numbers of each file looked at, and marks a checkpoint of which they are not as they should be."""

    name: ClassVar[str] = examine.NAME
    imports: ClassVar[Sequence[str]] = (examine.AHEAD,)

    def __init__(self) -> None:
        self._known = Known()
        self._found: dict[str, Mapping[str, Mapping[str, Any]]] = {}  # of saves that are not over, by ``op_id``

    def opened(self, run: Run) -> None:
        """See ``Extension``."""
        self._run = run
        self._settings = run.config.health

    def models(self, models: Models) -> None:
        """See ``Extension``."""
        self._known.look(models)

    def writing(self, job: SaveJob, path: str, plan: FilePlan) -> Any:
        """See ``Extension``."""
        settings, unexamined = self._settings, job.request.facts.unexamined
        if settings.action == "off" or "*" in unexamined:
            return None
        usual = Expectation(
            ignored=(*settings.ignore, *unexamined),
            norm_jump=settings.norm_jump,
            action=settings.action,
        )
        return examine.told(plan, self._known.expectation(path, usual))

    def written(self, job: SaveJob, results: Mapping[str, WrittenFile]) -> Any:
        """See ``Extension``."""
        found = {path: one.observed[self.name] for path, one in results.items() if self.name in one.observed}
        self._found[job.op_id] = found
        return found

    def concluding(self, job: SaveJob, reports: Mapping[int, Any]) -> Conclusion:
        """See ``Extension``."""
        found = {path: facts for rank in sorted(reports) for path, facts in reports[rank].items()}
        health = of_checkpoint(found, self._settings.action)
        return Conclusion(fields={"health": health}, summary=describe_unhealthy(health))

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """See ``Extension``."""
        found, info = self._found.pop(job.op_id, {}), outcome.info
        if info is None:
            return None
        what = outcome.summary.get(self.name) or ""
        self._known.learn(found, healthy=not what)
        if not what:
            return None
        facts: dict[str, Any] = {"name": info.name, "step": info.step, "path": str(info.path), "what": what}
        self._run.emit(events.Unhealthy(rank=self._run.rank, marked=info.marked, **facts))
        stops = self._settings.action == "stop"
        return UnhealthyStateError(path=str(info.path), step=info.step, what=what) if stops else None

    def remembers(self, manifest: Manifest | None) -> Any:
        """See ``Extension``. All files of it: which of them this rank writes next is not known."""
        return manifest.health if manifest is not None else {}

    def resumed(self, home: Home, info: CheckpointInfo, remembered: Any, verified: Manifest | None) -> None:
        """See ``Extension``."""
        self._known.recall(remembered or {})


class Known:
    """The knowledge of one rank about the files that it writes.

    Attributes:
        fixed: names of buffers, and of parameters that are not trained: they may be infinite, if they stay so.
        trained: names of the other parameters.
        there: what the models consist of, of which these are the names.
    """

    def __init__(self) -> None:
        self.fixed: Sequence[str] = ()
        self.trained: Sequence[str] = ()
        self.there: object = None
        self._files: dict[str, Mapping[str, Any]] = {}

    def look(self, models: Models) -> None:
        """Note which tensors of the models may be infinite by design. What came since, or is trained now, is noted, too."""
        if models.view != self.there:
            modules = models.modules.values()
            self.fixed, self.trained, self.there = fixed_names(modules), sorted(_trained(modules)), models.view

    def recall(self, health: Mapping[str, Any]) -> None:
        """Take over what the manifest of a checkpoint says, which training goes on from."""
        self._files = {}
        self.learn(health.get("files", {}), healthy=bool(health.get("healthy", True)))

    def learn(self, files: Mapping[str, Mapping[str, Any]], *, healthy: bool) -> None:
        """Take over what was found at a save that was committed."""
        for path, facts in files.items():
            before = self._files.get(path, {})
            norm = facts.get("norm", 0.0) if healthy else before.get("norm")
            known = {"learnt": dict(facts.get("learnt", {})), "layout": facts.get("layout", "")}
            self._files[path] = {**known, "norm": norm}

    def expectation(self, path: str, usual: Expectation) -> Expectation:
        """The expectation of one file, by its path in the checkpoint; ``usual`` is what the settings say of every file."""
        known = self._files.get(path, {})
        return replace(usual, first=not known, fixed=self.fixed, trained=self.trained, **known)


def _plain(module: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, set[str]]]:
    """Each name, and its plain ones: a file may have been given them with data parallelism around, or without it."""
    for name, plain in plain_names(names, module).items():
        yield name, {plain, plain_name(name)}


def fixed_names(modules: Iterable[torch.nn.Module]) -> list[str]:
    """The names of buffers, and of parameters that need no gradient.

    Names that could be taken for that of a trained parameter, in whichever file, are left out.
    """
    modules, found = list(modules), set[str]()
    for module in modules:
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        buffers = [name for name, _ in module.named_buffers()]
        found.update(*(plain for _, plain in _plain(module, [*buffers, *frozen])))
    for name in _trained(modules):
        ending = name
        while ending:  # the name, and what is left of it behind each dot
            found.discard(ending)
            ending = ending.partition(".")[2]
    return sorted(found)


def _trained(modules: Iterable[torch.nn.Module]) -> set[str]:
    found = set[str]()
    for module in modules:
        parameters = dict(module.named_parameters())
        found.update(*(plain for name, plain in _plain(module, parameters) if parameters[name].requires_grad))
    return found
