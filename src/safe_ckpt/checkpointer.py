"""The everyday API for plain training loops: ``save``, ``resume``, ``wait``, ``close``. Composes the core."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from safe_ckpt import versions
from safe_ckpt.adapters.export import Exporter
from safe_ckpt.config import CheckpointConfig, ConfigLike
from safe_ckpt.core.coordination.agreed_config import agree_on_settings
from safe_ckpt.core.coordination.process_groups import group_of
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.formats.torch_reading import outside_inference_mode
from safe_ckpt.core.home import retention
from safe_ckpt.core.home.candidates import by_commit, is_of_step, newest_sequence, step_name
from safe_ckpt.core.home.home import Candidate, Home
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.home.visibility import list_patiently
from safe_ckpt.core.resuming import one_resume
from safe_ckpt.core.resuming.items import StoredItems, warn_of_other_ranks
from safe_ckpt.core.resuming.named import not_found, of_frameworks
from safe_ckpt.core.resuming.one_resume import Chosen
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.handle import SaveHandle
from safe_ckpt.core.saving.names import NamedHomes
from safe_ckpt.core.saving.request import (
    Destination,
    Facts,
    OnCommit,
    Payload,
    PlanningFailed,
    SaveRequest,
    Snapshot,
    check_step,
    checked_metrics,
)
from safe_ckpt.core.state.items import Restoring, expected_bytes, items_of, modules_of
from safe_ckpt.core.state.planner import Plan, Planner
from safe_ckpt.core.storage.objects.options import is_url
from safe_ckpt.core.storage.objects.place import Place, place_of
from safe_ckpt.errors import ClosedError, ConfigError, RestoreError
from safe_ckpt.extensions.assemble import assemble
from safe_ckpt.ledger.pace import LEAST_S, MOST_S, Pace, pace_of

if TYPE_CHECKING:
    import torch

    from safe_ckpt.core.coordination.process_groups import ProcessGroup
    from safe_ckpt.core.sharding.dcp_plan import ShardPlanner
    from safe_ckpt.events import Hook

versions.refuse_old_releases()
logger = logging.getLogger(__name__)


_BY_NAME = "resume(state, step=...)"


class Checkpointer:
    """Saves and resumes the state of a training loop in one directory.

    Every method is called on every rank, in the same order, on the thread that trains. Use it as a context manager: leaving
    the block finishes what is in flight.

    Made again for the same directory and ranks in one process, as when a notebook's cell is run again, it takes the directory
    over: the earlier one finishes what is in flight, and raises ``ClosedError`` from then on.

    Args:
        directory: where the checkpoints go, and no checkpoint itself: on a file system that all ranks share, created when
            missing; or the address of an object store, such as ``s3://bucket/run``, which needs obstore.
        config: settings, equal on all ranks: a ``CheckpointConfig``, a mapping of its keys, or the path of a YAML file. None
            takes what the environment says (``SAFE_CKPT_CONFIG``), or the defaults.
        group: the ranks; None means WORLD, or this process alone when there is no process group.
        hooks: called with what happens; see ``safe_ckpt.events``.

    Raises:
        ConfigError: a setting, or what the environment of one rank says, is not allowed. On every rank.
        DirectoryError: the directory cannot be used, or is a checkpoint; names path and rank. On every rank.
        DirectoryInUseError: a live job holds it; names host, pid and start. On every rank.
        SaveError: a save of the earlier one in this process failed, and nobody was told yet; made once more, this opens.
        DirectoryNotSharedError: some ranks do not see the directory that rank 0 sees; names them. On every rank.
        UnsupportedFormatError: it holds a checkpoint of a newer format version. On every rank.
        DesyncError: the ranks were given different directories or settings, or have other versions of torch or safe_ckpt. On
            every rank that came.
        RendezvousTimeout: some ranks did not come within ``barrier_s``; names them. On every rank that came.
        PeerLostError: a rank died or stopped; names it. On every rank that is alive.
        TamperedError: a program that is not of this job wrote to the store of rank 0. On the rank that read it.
        UnexpectedError: another rank met an error that is not ours; names the rank. That rank raises its own.
        ForkedError: an object store cannot be used in a process that was forked from one that uses it. On every rank.

    Example:
        ```python
        with Checkpointer("runs/exp") as ckpt:
            state = {"model": model, "optimizer": optimizer, "step": 0}
            ckpt.resume(state)  # a fresh start when there is no checkpoint
            for step in range(state["step"] + 1, 101):
                train_one_step(model, optimizer)
                if step % 50 == 0:
                    ckpt.save(step, {**state, "step": step})
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: ConfigLike | None = None,
        *,
        group: ProcessGroup | None = None,
        hooks: Iterable[Hook] = (),
    ) -> None:
        self.directory: Place
        self.taken_over = False
        self.config, self.directory = agree_on_settings(config, functools.partial(_place, directory, group), group)
        self._engine = Engine(
            self.config,
            group=group,
            hooks=hooks,
            owner="a Checkpointer; its close() frees it",
            extensions=assemble(self.config),
        )
        try:
            self._home: Home = self._engine.hold(self.directory, per_host=True)
            self._catalog = Catalog()
            # A plain loop may change its parameters between two steps, so "auto" is eager here.
            self._planner = Planner(
                self._engine.rank,
                frozen_apart=self.config.unchanged.share,
                overlapped=self.config.snapshot == "overlapped",
                alone=self._engine.coordinator.size == 1,
            )
            self._shards: ShardPlanner | None = None
            self._exporter: Exporter | None = None
            self._pace: Pace | None = None
            # A checkpoint that is not visible for a moment must still count in the order of commits.
            timeouts = self.config.timeouts
            self._engine.agree(
                "list",
                must_match={"directory": self.directory},
                decide=lambda _: self._list_held(list_patiently(self._home.look, timeouts)),
            )
            self._engine.watch_signals()
            _living.add(self)
        except BaseException:
            self._engine.close(quiet=True)
            raise

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, Any] | None = None) -> SaveHandle:
        """Take a snapshot and write it in the background. When this returns, the state may change.

        If ``max_in_flight`` saves (1 by default) are not durable yet, this waits for the oldest of them first, or skips this
        one: see ``on_busy``.

        With ``snapshot="overlapped"`` parameters and optimizer state may change in an optimizer's step only, until
        ``handle.wait_snapshot()`` has returned.

        Args:
            step: the training step; names the directory. Saving a step again replaces it.
            state: names to Statefuls (modules, optimizers, ...), state dicts, tensors or JSON-able data. What differs
                between ranks is wrapped in ``PerRank``; everything else is taken from rank 0.
            metrics: numbers for ``Retention(keep_best=...)``.

        Returns:
            A handle on the outcome, which is the same on every rank.

        Raises:
            StateError: the step, a metric or an item of the state cannot be saved; names it. On every rank; nothing was
                started.
            SaveError: an earlier save failed, and nobody was told yet; so for ``WriterError``, ``NotEnoughSpaceError``,
                ``CommitOutcomeUnknown``, ``UnhealthyStateError`` and all that ``SaveHandle.result`` raises. On every rank;
                this save was not started.
            DesyncError: the ranks called different things, or differ in step, directory, names or whole items. On every rank
                that came.
            RendezvousTimeout: some ranks did not come within ``barrier_s``; names them. On every rank that came.
            PeerLostError: a rank died or stopped; names it. On every rank that is alive.
            TamperedError: a program that is not of this job wrote to the store of rank 0. On the rank that read it.
            UnexpectedError: another rank met an error that is not ours; names the rank. That rank raises its own.
            ForkedError: this process was forked from the one that opened this. On this rank alone.
            CommitOutcomeUnknown: rank 0 was lost after this rank had answered it. On this rank.
            ClosedError: ``close`` was called. On this rank alone.

        Example:
            ```python
            with Checkpointer("runs/exp") as ckpt:
                state = {"model": model, "optimizer": optimizer, "rng": PerRank(RngState())}
                handle = ckpt.save(100, state, metrics={"loss": 0.25})  # returns when the copy is taken
                train_one_step(model, optimizer)
                print(handle.result().path)  # waits until it is committed
            ```

            ```text
            …runs/exp/step-00000100
            ```
        """
        self._refuse_taken_over("save")
        with self._engine.together("save"):
            return self._save(step, state, metrics or {})

    @outside_inference_mode()
    def _save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> SaveHandle:
        number = step if isinstance(step, int) else -1
        error: Exception | None = None
        planned = Plan()
        shards: list[FilePlan] = []
        numbers: dict[str, float] = {}
        try:
            check_step(step)
            numbers = checked_metrics(metrics)
            planned = self._planner.plan(items_of(state))
        except Exception as problem:  # such as from a state_dict(): the other ranks must learn of it
            error = problem
        path = self.directory / step_name(number)
        must_match = {"names": ", ".join(map(str, state)) if isinstance(state, Mapping) else "?"}
        if error is None:
            self._engine.note_models(planned.models)
        if planned.sharded:
            shards, error = self._plan_shards(planned.sharded, {"step": number, "path": path, **must_match})
        payload: Payload
        if error is not None:
            payload = PlanningFailed(error=error)
        else:
            files = [*planned.files, *shards]
            payload = Snapshot(files=files, folders=list(planned.sharded), overlap=planned.overlap)
        return self._engine.save(
            SaveRequest(
                destination=Destination(home=self._home, path=path, kind="directory"),
                payload=payload,
                facts=Facts(step=number, metrics=numbers, items=planned.described),
                must_match=must_match,
                held=planned.held,
                on_commit=OnCommit(catalog=self._catalog, retention=retention.policy_of(self.config.retention)),
            )
        ).handle

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make host memory for snapshots of ``state`` ready in the background, so that the first save is as quick as the rest.

        ``resume`` does this as well, going by what optimizers are expected to hold after their first step. Worth a call of
        its own where that cannot be known: after the first step. On any rank, at any time.

        Args:
            state: as it will be given to ``save``.
        """
        self._engine.prepare(expected_bytes(state, rank=self._engine.rank))

    def _plan_shards(
        self, states: Mapping[str, Any], view: Mapping[str, object]
    ) -> tuple[list[FilePlan], Exception | None]:
        from safe_ckpt.core.sharding.dcp_plan import ShardPlanner  # DCP takes a while to import

        if self._shards is None:
            barrier_s = self._engine.config.timeouts.barrier_s
            self._shards = ShardPlanner(self._engine.coordinator, barrier_s=barrier_s, together=True)
        parts = self._shards.agree(states, kind="save", must_match=view)
        try:
            return self._shards.lay_out(parts), None
        except Exception as problem:  # on this rank alone: the others learn of it in the agreement on the save
            return [], problem

    def resume(self, state: Mapping[str, Any], *, step: int | None = None) -> CheckpointInfo | None:
        """Restore the newest valid checkpoint into ``state``, in place.

        Every rank reads and verifies what it needs before anything is applied on any rank. All ranks skip a corrupt checkpoint,
        and move it into quarantine once an older one was verified. If a file is missing, they wait for it (half of
        ``barrier_s``, 30 s at most) and then skip the checkpoint, which stays where it is.

        Args:
            state: the same names as given to ``save``, or some of them. Values that cannot change in place, such as
                numbers, are replaced in the mapping.
            step: go back to this step. What is saved from then on counts as newer than the steps that are left behind.

        Returns:
            What was restored; None on a fresh run.

        Raises:
            NoValidCheckpointError: there are checkpoints and none is usable, or all are a framework's; says why, name by name.
                On every rank.
            CheckpointNotFoundError: there is none of ``step``; names those that are there. On every rank.
            RestoreError: the checkpoint does not fit the state; names the item, and those that were restored before it. On
                every rank.
            StateError: the state is not one that ``save`` takes. On every rank.
            DirectoryError: a file could not be read, and the checkpoint is not treated as damaged. On every rank.
            DirectoryNotSharedError: a rank does not see a file that rank 0 sees. On every rank.
            DirectoryInUseError: another job took the directory over before a copy from the mirror was put there. On every
                rank.
            NotEnoughSpaceError: what is fetched from an object store has no room on a host. On every rank.
            UnsupportedFormatError: a checkpoint is of a newer format version. On every rank.
            SaveError: an earlier save failed, and nobody was told yet; so for ``WriterError``, ``NotEnoughSpaceError``,
                ``CommitOutcomeUnknown``, ``UnhealthyStateError`` and all that ``SaveHandle.result`` raises. On every rank.
            DesyncError: the ranks called different things, or differ in directory, names or ``step``. On every rank that
                came.
            RendezvousTimeout: some ranks did not come within ``barrier_s``; names them. On every rank that came.
            PeerLostError: a rank died or stopped; names it. On every rank that is alive.
            TamperedError: a program that is not of this job wrote to the store of rank 0. On the rank that read it.
            UnexpectedError: another rank met an error that is not ours; names the rank. That rank raises its own.
            ForkedError: this process was forked from the one that opened this. On this rank alone.
            ClosedError: ``close`` was called. On this rank alone.

        Example:
            ```python
            with Checkpointer("runs/exp") as ckpt:
                state = {"model": model, "optimizer": optimizer, "step": 0}
                info = ckpt.resume(state)
                print("fresh start" if info is None else f"goes on after step {state['step']}")
            ```

            ```text
            goes on after step 20
            ```
        """
        self._refuse_taken_over("resume")
        self._engine.wait()

        def candidates() -> list[Candidate]:
            found = self._home.look()
            return found if step is None else [c for c in found if is_of_step(c, step)]

        view = {"names": ", ".join(map(str, state)), "step": step}
        wanted = None if step is None else lambda one: is_of_step(one, step)
        items = StoredItems(state, self._engine.rank, self._engine.coordinator.size)
        reader = items.reader(self._engine, self._home)
        try:
            request = one_resume.ResumeRequest(
                home=self._home,
                list_candidates=candidates,
                reader=reader,
                view=view,
                accepts=wanted,
                named="" if step is None else step_name(step),
                by_name=_BY_NAME,
                others=lambda: of_frameworks(self._home),
            )
            chosen = one_resume.choose(self._engine, request)
            try:
                return self._restore(chosen, state, step)
            except RestoreError:  # of a shard that lies on another host, too
                if chosen is None or not reader.rest(chosen.info.path):
                    raise
            return self._restore(chosen, state, step)
        finally:
            reader.close()

    def _restore(self, chosen: Chosen | None, state: Mapping[str, Any], step: int | None) -> CheckpointInfo | None:
        if chosen is None and step is not None:
            path = self.directory / step_name(step)
            there = self._engine.agree(
                "named",
                must_match={"path": path},
                decide=lambda _: [one.summary.name for one in by_commit(self._home.look())],
            )
            raise not_found(path, there)
        if chosen is None:
            self.prepare(state)
            return None
        restoring = Restoring(state, chosen.loaded, chosen.info.path)
        with one_resume.naming_older(chosen.info.path, _BY_NAME):
            nowhere = self._engine.agree("fits", local=restoring.compare, decide=restoring.agree, phase="restore")
            one_resume.apply(self._engine, lambda: restoring.apply(nowhere))
        if self._engine.rank == 0:
            warn_of_other_ranks(state, chosen.info.world_size, self._engine.coordinator.size)
        modules = modules_of(items_of(state))
        self._engine.extensions.ask("a resume", lambda one: one.training(lambda: modules))
        self._engine.agree(
            "list", must_match={"directory": self.directory}, decide=lambda _: self._list_held(self._home.look())
        )
        self.prepare(state)
        return chosen.info

    def export(
        self,
        model: Mapping[str, Any] | torch.nn.Module,
        directory: str | os.PathLike[str],
        format: str = "safetensors",  # noqa: A002 - the name that users know from other exporters
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
        *,
        adapters_only: bool = False,
    ) -> SaveHandle:
        """Write weights alone, whole and in Hugging Face's layout, also of a model of which every rank has a part.

        Parts are gathered on this thread, one tensor at a time, while the background writes; no collective waits for the
        disk. On rank 0 that takes memory for the largest tensor and 160 MiB, elsewhere for 32 MiB; tensors above 32 MiB are
        gathered and written in turns. The call returns when all is gathered, and nothing may change before that. Weights
        without parts are copied at once as by ``save``. The directory appears, or is replaced as a whole, when it is durable.
        Other files in it are kept.

        Args:
            model: a module, or names to tensors. Tied tensors are stored once, under their first name.
            directory: gets ``model.safetensors``, or shards and ``model.safetensors.index.json``.
            format: ``"safetensors"``.
            max_shard_size: bytes, or text such as ``"5GB"``.
            dtype: floating-point tensors are converted to it.
            adapters_only: of a PEFT model its active adapter alone, in PEFT's layout, and in ``base.json`` a hash of the base:
                ``safe_ckpt.peft.load_adapter`` puts it on no other one. The base must not be sharded.

        Returns:
            A handle on the outcome, which is the same on every rank.

        Raises:
            ConfigError: ``format`` or ``max_shard_size`` is not allowed.
            StateError: something does not fit safetensors; names it, on every rank.
            DirectoryError: the directory holds something else.
            DesyncError: the ranks differ in what they ask for.
            RendezvousTimeout: some ranks did not call this.

        Example:
            ```python
            with Checkpointer("runs/exp") as ckpt:
                ckpt.export(model, "weights", dtype=torch.bfloat16).result()
            print(sorted(os.listdir("weights")))
            ```

            ```text
            ['manifest.json', 'model.safetensors']
            ```
        """
        self._refuse_taken_over("export")
        if self._exporter is None:
            self._exporter = Exporter(self._engine, NamedHomes(self._engine))
        adapter: Any = import_module("safe_ckpt.peft.adapter") if adapters_only else None
        return self._exporter.export(
            model, directory, format=format, max_shard_size=max_shard_size, dtype=dtype, adapter=adapter
        ).handle

    @property
    def stop_requested(self) -> bool:
        """Whether to save and leave the loop: a signal of ``save_on_signals`` reached some rank.

        Look once per step, on every rank, on the thread that trains; all ranks get the same answer at the same step. That
        costs a comparison, and about twice a second the pick-up of an answer that lies ready.

        Raises:
            RendezvousTimeout: rank 0 has not looked as often as this rank.
            PeerLostError: rank 0 died or stopped.

        Example:
            ```python
            config = CheckpointConfig(save_on_signals=("SIGTERM",))
            with Checkpointer("runs/exp", config) as ckpt:
                for step in range(21, 101):
                    train_one_step(model, optimizer)
                    if ckpt.stop_requested:
                        ckpt.save(step, {"model": model})
                        break  # leaving the block waits until it is committed
            ```
        """
        return self._engine.stop_requested()

    def due(self, *, least_s: float = LEAST_S, most_s: float = MOST_S) -> bool:
        """Whether it is time to save: Daly's interval, from what saves and crashes have cost in this directory so far.

        Look once per step, on every rank, on the thread that trains; all ranks get the same answer at the same step. Rank 0
        decides. The ranks meet for it at most every half minute, and a few times before a save is due. With few crashes of its
        own one a day is taken for granted. See ``safe-ckpt report``, which says what the interval costs.

        Args:
            least_s: no more often than this. The first save comes then; it shows what a save costs. As of the first call.
            most_s: no less often than this. As of the first call.

        Raises:
            ConfigError: ``least_s`` is above ``most_s``, or negative.
            RendezvousTimeout: some ranks did not look within ``barrier_s``.
            PeerLostError: a rank died or stopped.

        Example:
            ```python
            with Checkpointer("runs/exp") as ckpt:
                for step in range(101, 201):
                    train_one_step(model, optimizer)
                    if ckpt.due(least_s=30, most_s=1800):
                        ckpt.save(step, {"model": model})
            ```
        """
        self._engine.coordinator.refuse_fork("due")
        if self._pace is None:
            self._pace = pace_of(self._engine, self.directory, least_s=least_s, most_s=most_s)
        return self._pace.due()

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait until everything in flight is committed. Every rank calls this.

        Args:
            mirrored: wait, too, until each save or a newer one has its copy in the mirror: for ``lengthy_s`` at most.

        Raises:
            ConfigError: there is no mirror.
            MirrorBehindError: the copies did not come; the same on every rank.
            SafeCheckpointError: a save failed and that was not reported yet; the same on every rank.
        """
        self._engine.wait(mirrored=mirrored)

    def close(self) -> None:
        """Finish what is in flight, end the writer process, free the memory, give the directory back.

        Raises:
            SafeCheckpointError: a save failed and that was not reported yet.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        within_s = None if error is None else self.config.timeouts.shutdown_s
        self._engine.close(quiet=error is not None, within_s=within_s)

    def _refuse_taken_over(self, call: str) -> None:
        if self.taken_over:
            message = f"{call}: a later Checkpointer of this process took {self.directory} over: use that one"
            raise ClosedError(message=message)

    def _take_over(self) -> None:
        """End this one for a later one of this process: finish what is in flight first, and raise what was not raised yet."""
        logger.warning("the earlier Checkpointer of %s in this process ends: this one takes its place", self.directory)
        self.taken_over = True
        self._engine.close()

    @classmethod
    def _end_earlier(cls, place: Place, group: ProcessGroup | None) -> None:
        """End the one that this process has for these ranks and this directory, as when a notebook's cell is run again."""
        facts = group_of(group)
        for one in list(_living):
            if one.directory == place and not one._engine.closed and one._engine.coordinator.serves(facts):
                one._take_over()

    def _list_held(self, candidates: Sequence[Candidate]) -> None:
        # What another door saved here, such as ``publishing``, is not counted by this one's rules, and stays.
        self._catalog = Catalog(
            one for one in candidates if one.manifest is None or not one.manifest.notes.get("adapter")
        )
        self._home.start_after(newest_sequence(candidates))


_living: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _place(directory: str | os.PathLike[str], group: ProcessGroup | None, config: CheckpointConfig) -> Place:
    if is_url(directory) and config.mirror.url is not None:
        message = f"{directory} is in an object store itself: leave mirror.url out, or give a directory"
        raise ConfigError(key="mirror.url", message=message)
    place = place_of(directory, config.storage, config.timeouts.lengthy_s)
    Checkpointer._end_earlier(place, group)
    return place
