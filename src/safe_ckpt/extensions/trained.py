"""Notes at each save which parameters are trained, and compares them where training goes on from it.

What a schedule has unfrozen is frozen again in a fresh model, and no ``state_dict`` says so. The comparison waits for the first
step of each optimizer: until then callbacks may set what they set. What is frozen when training goes on, and trained by then,
was unfrozen by a schedule that works. Only the parameters of that optimizer are compared, because those of others may be
switched off meanwhile, as in the training of two networks against each other.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim.optimizer import register_optimizer_step_pre_hook

from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest, read_manifest
from safe_ckpt.core.formats.names import plain_names
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.saving.extension import Extension, Run
from safe_ckpt.core.saving.request import SaveRequest
from safe_ckpt.core.state.planner import Models
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.text import listed

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_MOST_NAMES = 4096
_MOST_TOLD = 5
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_expecting: tuple[Trained, ...] = ()
_hooked = False


class Trained(Extension):
    """Notes and compares, on rank 0; other ranks note and expect nothing. Used on the thread that trains."""

    name: ClassVar[str] = "trained"

    def __init__(self) -> None:
        self._view: object = None
        self._noted: list[str] | None = None
        self._is_fresh = False
        self._before: frozenset[str] | None = None
        self._path: Place | None = None
        self._modules: Callable[[], Mapping[str, torch.nn.Module]] = dict
        self._waiting: frozenset[str] = frozenset()
        self._stepped: set[int] = set()

    def opened(self, run: Run) -> None:
        """See ``Extension``."""
        self._rank = run.rank

    def models(self, models: Models) -> None:
        """See ``Extension``."""
        if self._rank != 0:
            return
        if self._noted is None or models.view != self._view:
            self._view, self._noted = models.view, _frozen(models.modules)
        self._is_fresh = bool(models.modules)

    def deciding(self, request: SaveRequest) -> Mapping[str, Any]:
        """See ``Extension``. The names of what is not trained, once after each ``models``; ``*`` stands for every number."""
        fresh, self._is_fresh = self._is_fresh, False
        known = fresh and self._noted is not None and len(self._noted) <= _MOST_NAMES
        return {"frozen": self._noted} if known else {}

    def remembers(self, manifest: Manifest | None) -> Any:
        """See ``Extension``."""
        return manifest.frozen if manifest is not None else None

    def resumed(self, home: Home, info: CheckpointInfo, remembered: Any, verified: Manifest | None) -> None:
        """See ``Extension``."""
        self._recall(remembered, info.path)

    def named(self, path: Place) -> None:
        """See ``Extension``."""
        if self._rank != 0:
            return
        try:
            self._recall(read_manifest(path).frozen, path)
        except (OSError, SafeCheckpointError):
            self._recall(None, path)

    def training(self, modules: Callable[[], Mapping[str, torch.nn.Module]]) -> None:
        """See ``Extension``. Warn at the first steps if other parameters of these models are trained."""
        global _expecting, _hooked  # noqa: PLW0603 - the hook is the process's, so is what it looks at
        self.closed()
        if self._before is None or self._rank != 0:
            return
        compared = self._compared(modules())
        self._waiting = frozenset(name for name, was_trained, p in compared if not was_trained | p.requires_grad)
        self._modules, self._stepped = modules, set()
        if not _hooked:
            register_optimizer_step_pre_hook(_before_step)  # for good: see ``overlap``
            _hooked = True
        _expecting = (*_expecting, self)

    def closed(self) -> None:
        """See ``Extension``. Nothing is expected any more."""
        global _expecting  # noqa: PLW0603
        _expecting = tuple(one for one in _expecting if one is not self)
        self._modules = dict

    def _recall(self, frozen: Sequence[str] | None, path: Place) -> None:
        self._path, self._before = path, None if frozen is None else frozenset(frozen)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the parameters of an optimizer that is about to step."""
        try:
            if id(optimizer) in self._stepped:
                self.closed()  # all of them have stepped
                return
            self._stepped.add(id(optimizer))
            frozen, thawed = self._differences(optimizer)
        except Exception as error:
            logger.warning("which parameters are trained is not known: %s", error)
            self.closed()
            return
        if frozen or thawed:
            self.closed()
            told = [
                f"{listed(names, _MOST_TOLD)} {word}"
                for names, word in ((frozen, "no longer"), (thawed, "now"))
                if names
            ]
            logger.warning(
                "training goes on from %s with other trained parameters (requires_grad) than at its save: %s. "
                "What froze or unfroze them has to do so again after a resume",
                self._path,
                "; ".join(told),
            )

    def _differences(self, optimizer: torch.optim.Optimizer) -> tuple[list[str], list[str]]:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        compared = self._compared(self._modules())
        # One that has copies of its own, such as DeepSpeed's, trains all.
        compared = [one for one in compared if id(one[2]) in own] or compared
        frozen = [name for name, was_trained, p in compared if was_trained and not p.requires_grad]
        thawed = [name for name, was_trained, p in compared if p.requires_grad and not was_trained]
        return frozen, [name for name in thawed if name not in self._waiting]

    def _compared(self, modules: Mapping[str, torch.nn.Module]) -> list[tuple[str, bool, torch.nn.Parameter]]:
        """The name of each parameter, whether it was trained, and itself."""
        before = self._before or frozenset()
        named = [one for key, module in modules.items() for one in _named(key, module)]
        return [(name, before.isdisjoint((name, _NUMBER.sub("*", name))), p) for name, p in named]


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in _expecting:
        one.look(optimizer)


def _named(key: str, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    before, named = f"{key}." if key else "", dict(module.named_parameters())
    plain = plain_names(named, module)
    return [(before + plain[name], parameter) for name, parameter in named.items()]


def _frozen(modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """The names of what is not trained, those that differ in numbers only as one if all of them are."""
    flags = {name: p.requires_grad for key, module in modules.items() for name, p in _named(key, module)}
    trained = Counter(_NUMBER.sub("*", name) for name, is_trained in flags.items() if is_trained)
    frozen = [name for name, is_trained in flags.items() if not is_trained]
    return sorted({name if _NUMBER.sub("*", name) in trained else _NUMBER.sub("*", name) for name in frozen})
