"""DeepSpeed, FSDP and models sharded at load under a Trainer: the files that all processes write together.

The code of the Trainer, of Accelerate and of DeepSpeed decides what each file holds. While it runs, its requests are noted.
They are planned when all processes have reached the end. What is the Trainer's own way with models that are sharded when
they are loaded is in ``at_load``.

DeepSpeed and FSDP are not offered on CPUs. All were run here on two gloo processes whose Accelerate was set by hand that
it has accelerators; on GPUs they were never run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers.trainer as upstream

from safe_ckpt.accelerate import handle as accelerate
from safe_ckpt.accelerate.strategies import is_first_version, restoring_optimizers
from safe_ckpt.adapters import Attempt, Engine, Patch, Planned
from safe_ckpt.adapters.extras import reraise
from safe_ckpt.adapters.strategy import Sharded
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.errors import ConfigError, CoordinationError
from safe_ckpt.transformers import at_load
from safe_ckpt.transformers.contents import Catch


def check(trainer: Any, config: CheckpointConfig) -> None:
    """Refuse what is not covered.

    Raises:
        ConfigError: names the setting.
    """
    if getattr(trainer, "is_fsdp_xla_enabled", False):
        message = "FSDP of XLA is not covered: use the Trainer without SafeCheckpointMixin"
        raise ConfigError(key="TrainingArguments.fsdp_config['xla']", message=message)
    if is_shared(trainer):
        accelerate.check(trainer.accelerator, config)
    if is_first_version(trainer.accelerator):
        form = trainer.accelerator.state.fsdp_plugin.state_dict_type.name
        if form != "SHARDED_STATE_DICT":
            message = f"{form} of FSDP 1 is gathered by torch alone, which nobody watches: use SHARDED_STATE_DICT, or version 2"
            raise ConfigError(key="TrainingArguments.fsdp_config['state_dict_type']", message=message)
    if at_load.came_in_parts(trainer):
        at_load.check(trainer)


def is_shared(trainer: Any) -> bool:
    """Whether several processes have parts of the model or of the optimizer."""
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled) or at_load.came_in_parts(trainer)


def _gathers(trainer: Any) -> bool:
    """Whether a state dict of the model is a collective: with ZeRO 0 to 2 each process has all of it, and may ask alone."""
    if not trainer.is_deepspeed_enabled:
        return bool(trainer.is_fsdp_enabled)
    parallel = trainer.accelerator.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0)
    return bool(trainer.model_wrapped.zero_optimization_partition_weights()) or parallel > 1


class Sharing:
    """Plans the files that the processes write together. Every process calls every method.

    Args:
        core: where they meet.
    """

    def __init__(self, core: Engine) -> None:
        self._core = core
        self._sharded = Sharded(core)

    @contextlib.contextmanager
    def loading(self, trainer: Any) -> Iterator[None]:
        """While this is entered, loading restores what DeepSpeed leaves out with NVMe offload, and Accelerate with FSDP."""
        if trainer.is_fsdp_enabled:
            with restoring_optimizers(upstream):
                yield
            return
        if not trainer.is_deepspeed_enabled:
            yield
            return
        from safe_ckpt.deepspeed import directories, nested

        stock: Callable[..., None] = vars(upstream)["deepspeed_load_checkpoint"]

        @functools.wraps(stock)
        def load(engine: Any, checkpoint: str, *args: Any, **kwargs: Any) -> None:
            path = Path(checkpoint)
            # Rank 0 decides: all processes do what follows, or none.
            tag = self._core.agree("latest", must_match={"path": path}, decide=lambda _: directories.latest_tag(path))
            writes = nested.EngineWrites(self._core, {tag: engine} if tag else {})
            with writes.loading(path, optimizer_states=True):
                stock(engine, checkpoint, *args, **kwargs)

        with Patch(upstream, {"deepspeed_load_checkpoint": load}):
            yield

    def besides(self, trainer: Any) -> tuple[str, ...]:
        """Files that the Trainer would write into a checkpoint's folder and that are not in ours."""
        return at_load.NOT_WRITTEN if at_load.came_in_parts(trainer) else ()

    @contextlib.contextmanager
    def noting(self, trainer: Any, folder: Path) -> Iterator[Noted]:
        """While this is entered, nothing that the processes write together into ``folder`` is written."""
        noted = Noted(self._core, folder)
        with Patch() as patch:
            if _gathers(trainer):
                gathers = {"get_state_dict": noted.after_meeting(trainer.accelerator.get_state_dict)}
                patch.put(trainer.accelerator, gathers)
            if at_load.came_in_parts(trainer):
                gather = functools.partial(at_load.gathered, self._core)
                at_load.gather_with(patch, trainer, noted.after_meeting(gather))
            if trainer.is_fsdp_enabled:
                names = ("save_fsdp_model", "save_fsdp_optimizer")
                patch.put(upstream, {name: noted.after_meeting(getattr(upstream, name)) for name in names})
            if trainer.is_deepspeed_enabled:
                engine = trainer.model_wrapped
                instead = {"save_checkpoint": noted.of(engine)}
                if _gathers(trainer):  # a PEFT model's is asked for without Accelerate
                    from safe_ckpt.deepspeed.nested import ZERO3_GATHER

                    instead[ZERO3_GATHER] = noted.after_meeting(getattr(engine, ZERO3_GATHER))
                patch.put(engine, instead)
            yield noted

    def plan(self, trainer: Any, noted: Noted, caught: Catch, problem: Exception | None) -> Planned:
        """Plan what was noted, unless a process has failed: then that error is in the result, on all of them.

        Args:
            trainer: whose.
            noted: from ``noting``.
            caught: what the Trainer wrote meanwhile.
            problem: what went wrong on this process.

        Raises:
            CoordinationError: the processes did not meet.
        """
        if not is_shared(trainer):
            return Planned(error=problem)
        problem = noted.end(problem)
        if problem is not None:
            return Planned(error=problem)
        attempt = Attempt()  # what it gets is the same on all processes
        if trainer.is_fsdp_enabled:
            return self._sharded.plan(caught.shards, attempt, dict.fromkeys(caught.shards, trainer.model))
        if at_load.came_in_parts(trainer):
            states: dict[str, Any] = {}
            with attempt:
                states = at_load.states_by_folder(trainer)
            return self._sharded.plan(states, attempt, {at_load.MODEL_FOLDER: trainer.model})
        from safe_ckpt.deepspeed.nested import EngineWrites

        return EngineWrites(self._core, dict.fromkeys(noted.tags, trainer.model_wrapped)).plan(noted.tags, attempt)


class Noted:
    """The requests of one save, and the agreements between the processes before collectives.

    Args:
        core: where they meet.
        folder: what the Trainer writes into.

    Attributes:
        tags: DeepSpeed's name of a checkpoint -> how it is to be saved.
    """

    def __init__(self, core: Engine, folder: Path) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self._core = core
        self._folder = folder
        self._failed: Exception | None = None

    def after_meeting(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """``action``, a collective, preceded by an agreement: it would never end if a process has failed before it."""

        @functools.wraps(action)
        def act(*args: Any, **kwargs: Any) -> Any:
            self._meet(None)
            return action(*args, **kwargs)

        return act

    def of(self, engine: Any) -> Callable[..., bool]:
        """Return the stand-in for ``engine.save_checkpoint``."""
        from safe_ckpt.deepspeed.arguments import default_tag

        save = engine.save_checkpoint

        signature = inspect.signature(save)

        @functools.wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> bool:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if Path(os.path.abspath(given["save_dir"])) != self._folder:
                return bool(save(*args, **kwargs))
            name = default_tag(engine) if given["tag"] is None else str(given["tag"])
            self.tags.pop(name, None)  # ``latest`` names the one that was saved last
            options = {key: given[key] for key in ("save_latest", "exclude_frozen_parameters")}
            self.tags[name] = {"client_state": dict(given["client_state"] or {}), **options}
            return True

        return save_checkpoint

    def end(self, problem: Exception | None) -> Exception | None:
        """Learn what went wrong on any process; None where nothing did.

        Raises:
            CoordinationError: the processes did not meet.
        """
        if self._failed is None:
            with contextlib.suppress(Exception):
                self._meet(problem)
        if isinstance(self._failed, CoordinationError):
            raise self._failed
        return problem or self._failed

    def _meet(self, problem: Exception | None) -> None:
        try:
            # One name for all these places: a process that failed is at the last of them, the others at any.
            local, phase = reraise(problem), "planning the save"
            self._core.agree("write", must_match={"path": self._folder}, local=local, phase=phase)
        except Exception as error:
            self._failed = error
            raise
