"""The items of a state: a name and an object of some kind; what is saved of the object, and how it comes back.

Loaded values are put back where they belong, in place as far as types allow: on all ranks, or on none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from typing_extensions import Self

from safe_ckpt.core.formats.manifest import DCP_METADATA, MANIFEST_NAME
from safe_ckpt.core.formats.names import as_named, plain_name, plain_names
from safe_ckpt.core.formats.refusals import refuse_meta, unchanging
from safe_ckpt.core.formats.torch_reading import outside_inference_mode, refusing
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import Fitted, is_extra_state
from safe_ckpt.core.state import fingerprint, loading
from safe_ckpt.core.state.fingerprint import Fingerprint
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import RestoreError, StateError

if TYPE_CHECKING:
    from safe_ckpt.core.sharding.dcp_read import Stored

_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,127}\Z")
_SMALL_PARTS = 4 << 20
_STATES: Mapping[str, int] = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2}
_OF_A_RANK = re.compile(r"\.rank\d{5,}\Z")
_FILE = re.compile(r"(\.rank\d{5,})?\.(json|pt|safetensors|safetensors\.index\.json)")  # behind the name of its item
_OF_SHARDS = re.compile(r"^(.+?)(-\d{5}-of-\d{5}|\.safetensors\.index)\Z")


@runtime_checkable
class Stateful(Protocol):
    """Modules, optimizers, schedulers, loaders: anything with these two methods."""

    def state_dict(self) -> Any:
        """The state to save."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take the state back."""


@runtime_checkable
class StartsAnew(Protocol):
    """A Stateful in ``PerRank`` that a rank which has saved none goes on with all the same."""

    def start_anew(self, state_dict: Any, /, rank: int) -> Any:
        """Start from what rank 0 has saved, as that rank, or raise."""


@dataclass(frozen=True)
class PerRank:
    """Marks an item of the state of which every rank saves its own, such as a random generator's state.

    Attributes:
        value: what this rank saves: a Stateful, a state dict, a tensor or JSON-able data.

    Example:
        ```python
        state = {"model": model, "rng": PerRank(RngState()), "seen": PerRank({"files": ["part-3.parquet"]})}
        with Checkpointer("runs/exp") as ckpt:
            ckpt.save(100, state)
        ```
    """

    value: Any


class SavedItem:
    """One name of a state. This class is for plain data; what is different with other kinds, theirs say.

    Attributes:
        name: of the item.
        value: the object.
        per_rank: every rank saves its own.
        form: ``"tensor"`` where what is saved is a single tensor.
        module: the object, if it is one.
        optimizer: the object, if it is one.
        modules: of an optimizer, those of its state by name.
    """

    form = "value"
    module: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    modules: Mapping[str, torch.nn.Module] = MappingProxyType({})

    def __init__(self, name: str, value: Any, *, per_rank: bool = False) -> None:
        self.name = name
        self.value = value
        self.per_rank = per_rank

    @property
    def key(self) -> str:
        """Its name in errors."""
        return f"state[{self.name!r}]"

    @property
    def kind(self) -> str:
        """Its kind, for people; "" for nothing."""
        empty = self.value is None or (isinstance(self.value, Mapping | list | tuple) and not self.value)
        return "" if empty else "data"

    @property
    def sharded(self) -> bool:
        """Whether it holds tensors of which this rank may have a part only."""
        return dtensor.any_sharded(self.leaves())

    @property
    def changes_in_place(self) -> bool:
        """Whether ``restore`` gives it its value, rather than another object."""
        return isinstance(self.value, MutableMapping | MutableSequence)

    def leaves(self) -> Iterable[object]:
        """Its tensors, and what else is in it."""
        return dtensor.leaves_of(self.value)

    def fingerprint(self) -> Fingerprint | None:
        """Return what tells whether it can be planned as last time; None where nothing tells."""
        return fingerprint.of(fingerprint.of_data, self.value)

    def state(self) -> Any:
        """Return what is saved of it. Of sharded objects that is a collective."""
        return self.value

    def at(self, path: Iterable[Any]) -> Any:
        """Return what lies at a path of its state and has floats in it."""
        value = self.value
        for key in path:
            value = value[key]
        return value

    def frozen_names(self) -> frozenset[str]:
        """The names of its tensors that are not trained; see ``hugging_face.is_named``."""
        return frozenset()

    def expected_bytes(self) -> int:
        """Roughly what this rank will save of it."""
        tensors = {id(leaf): leaf for leaf in self.leaves() if isinstance(leaf, torch.Tensor)}
        return sum(dtensor.local_of(tensor).numel() * tensor.element_size() for tensor in tensors.values())

    def refuse_target(self) -> None:
        """Refuse to write to tensors whose memory was taken away, or was never given.

        Raises:
            StateError: naming the tensor.
        """
        loading.refuse_target(self.key, self.value)

    def fit(self, loaded: Any) -> Fitted:
        """Compare what was loaded with where it goes. Nothing is applied yet.

        Raises:
            RestoreError: it does not fit. Other errors mean the same.
        """
        check_into(self.value, loaded)
        return Fitted(apply=lambda _: restore_into(self.value, loaded))

    def below(self, state: Any) -> dict[str, Any]:
        """Return what is saved of it, as it lies in the state of a whole checkpoint."""
        return {self.name: state}

    def fit_shards(self, shards: Shards) -> Fitted:
        """The same with a sharded item, which is verified and not read yet. This rank's parts are read when it is applied.

        Raises:
            RestoreError: it does not fit.
        """
        if not isinstance(self.value, dict | list):
            message = "it was saved in parts; give an object, a dict or a list of tensors to read it into"
            raise RestoreError(message=f"{message}, not {self.value!r:.50}")
        return self._fit_parts(shards, self.value)

    def _fit_parts(self, shards: Shards, own: dict[str, Any] | list[Any]) -> Fitted:
        from safe_ckpt.core.sharding import dcp_read  # DCP takes a while to import

        take = self._giving(lambda saved: restore_into(own, saved))
        return dcp_read.fit_value(shards.stored, own, lambda saved: check_into(own, saved), take)

    def _giving(self, action: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function that does the action and returns the object."""

        def apply(given: Any) -> Any:
            action(given)
            return self.value

        return apply


class _Tensor(SavedItem):
    """A tensor."""

    kind = "a tensor"
    changes_in_place = True

    def __init__(self, name: str, value: torch.Tensor, *, per_rank: bool = False) -> None:
        super().__init__(name, value, per_rank=per_rank)
        if type(value) in (torch.Tensor, torch.nn.Parameter) or dtensor.is_sharded(value):
            self.form = "tensor"

    def state(self) -> Any:
        return {self.name: self.value} if self.form == "tensor" else self.value

    def below(self, state: Any) -> dict[str, Any]:
        return dict(state)  # it is under its name already

    def fit_shards(self, shards: Shards) -> Fitted:
        return self._fit_parts(shards, {self.name: self.value})


class _Stateful(SavedItem):
    """An object that says itself what is saved of it."""

    kind = "an object"
    changes_in_place = True

    def state(self) -> Any:
        return self.value.state_dict()

    def fit(self, loaded: Any) -> Fitted:
        return Fitted(apply=self._giving(lambda _: self._load(loaded)))

    def _load(self, loaded: Any) -> None:
        dtensor.warn_of_rounded({self.name: loaded})
        self.value.load_state_dict(loaded)

    def fit_shards(self, shards: Shards) -> Fitted:
        from safe_ckpt.core.sharding import dcp_read

        own = self.value.state_dict()
        loading.refuse_target(self.key, own)
        take = self._giving(lambda saved: self._load(dcp_read.with_types_of(own, saved)))
        return dcp_read.fit_value(shards.stored, own, lambda _: None, take)


class _Module(_Stateful):
    """A module."""

    kind = "a module"

    def __init__(self, name: str, value: torch.nn.Module, *, per_rank: bool = False) -> None:
        super().__init__(name, value, per_rank=per_rank)
        self.module: torch.nn.Module = value

    def leaves(self) -> Iterable[object]:
        return itertools.chain(self.module.parameters(), self.module.buffers())

    def fingerprint(self) -> Fingerprint | None:
        return fingerprint.of(fingerprint.of_module, self.module)

    def state(self) -> Any:
        dtensor.refuse_partitioned(self.module)
        return super().state()

    def frozen_names(self) -> frozenset[str]:
        return frozen_names(self.module)

    def refuse_target(self) -> None:
        loading.refuse_module(self.key, self.module)

    def fit(self, loaded: Any) -> Fitted:
        own = self.module.state_dict()
        loaded = as_named(self.module, loaded)
        if dtensor.any_sharded(dtensor.leaves_of(own)):
            check_into(own, loaded)
            loading.check_same_names(own, loaded)
            return Fitted(apply=self._giving(lambda _: dtensor.load_module(self.module, restore_into(own, loaded))))
        if loading.loads_as_torch_does(self.module):
            loading.check_module(own, loaded)
        return Fitted(apply=self._giving(lambda _: dtensor.load_module(self.module, loaded)))

    def fit_shards(self, shards: Shards) -> Fitted:
        from safe_ckpt.core.sharding import dcp_read

        return dcp_read.fit_module(shards.stored, self.module)


class _Optimizer(_Stateful):
    """An optimizer."""

    def __init__(self, name: str, value: torch.optim.Optimizer, *, per_rank: bool = False) -> None:
        super().__init__(name, value, per_rank=per_rank)
        self.optimizer: torch.optim.Optimizer = value
        self.kind = f"an optimizer {type(value).__qualname__}"

    @property
    def sharded(self) -> bool:
        """See ``SavedItem``; or whether this rank steps some of the parameters only."""
        return dtensor.is_divided(self.optimizer) or super().sharded

    def leaves(self) -> Iterable[object]:
        """The parameters that it steps."""
        return (tensor for group in self.optimizer.param_groups for tensor in group["params"])

    def fingerprint(self) -> Fingerprint | None:
        return fingerprint.of(fingerprint.of_optimizer, self.optimizer)

    def state(self) -> Any:
        if not self.sharded:
            return super().state()
        from safe_ckpt.core.sharding import dcp_read

        return dcp_read.optimizer_state(dcp_read.module_stepped_by(self.optimizer, self.modules), self.optimizer)

    def at(self, path: Iterable[Any]) -> Any:
        return SavedItem(self.name, {"param_groups": self.optimizer.param_groups}).at(path)

    def expected_bytes(self) -> int:
        """See ``SavedItem``: as it will be after the first step."""
        return expected_state_bytes(dtensor.stepping(self.optimizer))

    def refuse_target(self) -> None:
        parameters: Iterable[Any] = self.leaves()
        for number, parameter in enumerate(parameters):
            refuse_meta(f"{self.key}: parameter {number}", parameter)

    def fit(self, loaded: Any) -> Fitted:
        loading.check_optimizer(self.optimizer, loaded)
        if not self.sharded:
            return Fitted(apply=self._giving(lambda _: dtensor.load_keeping_types(self.optimizer, loaded)))
        from safe_ckpt.core.sharding import dcp_read

        return Fitted(apply=self._giving(lambda _: dcp_read.spread_optimizer(self.optimizer, loaded)))

    def fit_shards(self, shards: Shards) -> Fitted:
        from safe_ckpt.core.sharding import dcp_read

        owner = dcp_read.module_stepped_by(self.optimizer, self.modules)
        return dcp_read.fit_optimizer(shards.stored, owner, self.optimizer)


_KINDS: Sequence[tuple[type, type[SavedItem]]] = (
    (torch.optim.Optimizer, _Optimizer),
    (torch.nn.Module, _Module),
    (Stateful, _Stateful),
    (torch.Tensor, _Tensor),
)


def items_of(state: Mapping[str, Any]) -> list[SavedItem]:
    """The items of a state, those of optimizers behind the others.

    After a forward without backward FSDP2 has replaced the parameters of its modules. Asking for their state undoes that.

    Raises:
        StateError: it is no mapping, or a name cannot become a file's; names it.
    """
    if not isinstance(state, Mapping):
        raise StateError(key="state", message=f"expected a mapping of names to objects, got {type(state).__name__}")
    with unchanging("state"):
        state = dict(state)  # another thread may add to it
    _check_names(state)
    items = []
    for name, value in state.items():
        inner = value.value if isinstance(value, PerRank) else value
        kind = next((kind for of, kind in _KINDS if isinstance(inner, of)), SavedItem)
        items.append(kind(name, inner, per_rank=isinstance(value, PerRank)))
    items.sort(key=lambda item: item.optimizer is not None)
    modules = modules_of(items)
    for item in items:
        if item.optimizer is not None:
            item.modules = modules
    return items


def modules_of(items: Iterable[SavedItem]) -> dict[str, torch.nn.Module]:
    """The modules of a state by name, without those of which every rank saves its own."""
    return {item.name: item.module for item in items if item.module is not None and not item.per_rank}


def expected_bytes(state: Mapping[str, Any], *, rank: int) -> int:
    """About how much this rank will save of ``state``, optimizers counted as they will be after their first step."""
    try:
        items = [item for item in items_of(state) if rank == 0 or item.per_rank or item.sharded]
        total = sum(item.expected_bytes() for item in items)
    except Exception:  # this is an estimate: parameters may have no size yet, and ``save`` reports what is wrong
        return 0
    # Headers, and payloads begin at page boundaries.
    return total + min(total // 64, 48 << 20) + min(total, _SMALL_PARTS)


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of its state after the first step, as far as that is known of its kind; else those of now."""
    now = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    later = 0
    for group in optimizer.param_groups:
        count = _STATES.get(type(optimizer).__name__, 0) + bool(group.get("amsgrad"))
        if isinstance(optimizer, torch.optim.SGD):
            count = int(bool(group.get("momentum")))
        later += count * sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
    return max(now, later)


def _check_names(state: Mapping[str, Any]) -> None:
    """Refuse names that cannot become file names, or that could stand for another item's file.

    Raises:
        StateError: naming the name.
    """
    for name in state:
        fits = isinstance(name, str) and _NAME.match(name) and not _OF_A_RANK.search(name)
        if not fits or name == Path(MANIFEST_NAME).stem:
            message = (
                "a name becomes a file name: use letters, digits and _ . + = - "
                "(but neither 'manifest' nor an end like '.rank00000')"
            )
            raise StateError(key=f"state[{name!r}]", message=message)
        shard = _OF_SHARDS.match(name)
        if shard is not None and shard.group(1) in state:
            message = f"state[{shard.group(1)!r}] may need a file of this name: take another name"
            raise StateError(key=f"state[{name!r}]", message=message)
    folded = [name.casefold() for name in state]
    if len(set(folded)) != len(folded):
        raise StateError(key="state", message="two names differ only in case: some file systems cannot tell them apart")


def check_folders(sharded: Iterable[str], names: Iterable[str]) -> None:
    """Refuse names of sharded items whose folder could have the name of a file.

    Args:
        sharded: the names of sharded items: each is that of a folder.
        names: of all items.

    Raises:
        StateError: naming the name.
    """
    others = [name.casefold() for name in names]
    for name in sharded:
        folded = name.casefold()
        of = next((o for o in others if folded.startswith(o) and _FILE.fullmatch(folded, len(o))), None)
        if of is not None or folded == MANIFEST_NAME:
            what = "the manifest's name" if of is None else f"the name of a file of state[{of!r}]"
            raise StateError(key=f"state[{name!r}]", message=f"its folder would have {what}: take another name")


def frozen_names(module: torch.nn.Module) -> frozenset[str]:
    """The names of its parameters that are not trained; see ``hugging_face.is_named``."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    sides: tuple[set[str], set[str]] = set(), set()
    for name, plain in plain_names(parameters, module).items():
        sides[parameters[name].requires_grad].update((name, plain_name(name), plain))
    frozen, trained = sides
    return frozenset(frozen - trained)


def check_into(target: Any, loaded: Any, seen: set[tuple[int, int]] | None = None) -> None:
    """Check that ``restore_into`` can make ``target`` equal to ``loaded``. Of the tensors there only shapes and types count.

    Args:
        target: nested tensors and data.
        loaded: the same.
        seen: what was looked at before.

    Raises:
        ValueError: a tensor of the target has another shape or type in ``loaded``, or is not in it; begins with where.
    """
    seen = set() if seen is None else seen
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        own, then = loading.described(target), loading.described(loaded)
        if own != then:  # replacing it in the dict would leave the parameter that it belongs to as it is
            advice = "give a tensor of that shape and type, or None to get it as it was saved"
            raise ValueError(f"it is {own}, the checkpoint has {then}; {advice}")
        dtensor.refuse_lost(target, loaded)
        if dtensor.is_partial(target):
            raise ValueError("it is a DTensor whose parts are still to be reduced: redistribute it first")
    elif isinstance(target, MutableMapping) and isinstance(loaded, Mapping):
        _check_each(target.items(), loaded, seen)
    elif isinstance(target, MutableSequence | tuple) and isinstance(loaded, list | tuple):
        if type(target) not in (tuple, torch.Size) and isinstance(target, tuple) and len(target) != len(loaded):
            raise ValueError(f"it is a {type(target).__name__}, the checkpoint has {len(loaded)} values for it")
        _check_each(enumerate(target), dict(enumerate(loaded)), seen)
    elif _has_tensors(target):
        kind = "a tensor" if isinstance(target, torch.Tensor) else f"{type(target).__name__} with tensors"
        raise ValueError(f"it is {kind}, the checkpoint has {type(loaded).__name__}; None gets it as it was saved")


def _check_each(owned: Iterable[tuple[Any, Any]], loaded: Mapping[Any, Any], seen: set[tuple[int, int]]) -> None:
    owned = list(owned)
    if lost := [key for key, own in owned if key not in loaded and _has_tensors(own)]:
        raise ValueError(f"the checkpoint has nothing for the tensors {lost}")
    for key, own in owned:
        pair = id(own), id(loaded.get(key))
        if key in loaded and pair not in seen and not is_extra_state(str(key)):
            seen.add(pair)  # a list that lies in several places is looked at once
            try:
                check_into(own, loaded[key], seen)
            except ValueError as error:
                raise ValueError(f"[{key!r}]{'' if str(error).startswith('[') else ': '}{error}") from error


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in dtensor.leaves_of(value))


def restore_into(target: Any, loaded: Any, done: dict[tuple[int, int], tuple[Any, Any]] | None = None) -> Any:
    """Make ``target`` equal to ``loaded`` in place as far as its type allows. Returns the object that now has the value.

    Ask ``check_into`` first.

    Args:
        target: nested tensors and data.
        loaded: the same.
        done: what was restored before, with the target that it was.
    """
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if target is loaded or loading.described(target) != loading.described(loaded):
            return loaded  # in the second case it is an extra state
        return dtensor.copied(target, loaded)
    if not isinstance(target, MutableMapping | MutableSequence | tuple):
        return loaded
    done, pair = {} if done is None else done, (id(target), id(loaded))
    if pair not in done:
        done[pair] = target, target  # so it is what lies within itself
        done[pair] = _restored(target, loaded, done), target
    return done[pair][0]


def _restored(target: Any, loaded: Any, done: dict[tuple[int, int], tuple[Any, Any]]) -> Any:
    if isinstance(target, MutableMapping) and isinstance(loaded, Mapping):
        order = [*(key for key in target if key in loaded), *(key for key in loaded if key not in target)]
        fresh = {key: restore_into(target[key], loaded[key], done) if key in target else loaded[key] for key in order}
        target.clear()
        target.update(fresh)
        return target
    if not isinstance(target, MutableSequence | tuple) or not isinstance(loaded, list | tuple):
        return loaded
    known = len(target)
    values = [restore_into(target[i], v, done) if i < known else v for i, v in enumerate(loaded)]
    if isinstance(target, MutableSequence):
        target[:] = values
        return target
    kind: Any = type(target)
    same = len(values) == known and all(map(operator.is_, values, target))
    return target if same else getattr(kind, "_make", kind)(values)  # a named tuple takes its fields one by one


class Restoring:
    """The last step of a resume on one rank: what was loaded is compared with where it goes, and then applied.

    Between the two all ranks agree: nothing is applied on any of them where something does not fit on one. That holds for
    names, shapes and types; an object of the user's own may still refuse what it is given.

    Args:
        state: where it goes. Values that cannot change in place are replaced in it.
        loaded: what was loaded, by item.
        path: of the checkpoint, for errors.
    """

    def __init__(self, state: Mapping[str, Any], loaded: Mapping[str, Any], path: Place) -> None:
        self._state = state
        self._loaded = loaded
        self._path = path
        self._fitted: list[tuple[SavedItem, Fitted]] = []

    def compare(self) -> dict[str, Any]:
        """Compare all items, on every rank.

        Returns:
            What this rank has no place for, for ``agree``.

        Raises:
            RestoreError: something does not fit; names it.
        """
        items = items_of(self._state)
        for item in items:
            with self._named(item), outside_inference_mode():
                item.refuse_target()
        for item in items:
            with self._named(item), outside_inference_mode():
                if not isinstance(self._state, MutableMapping) and not item.changes_in_place:
                    raise ValueError("its value cannot change in place and the state is read-only: pass a dict")
                loaded = self._loaded[item.name]
                if isinstance(loaded, Fitted):
                    fit = loaded
                else:
                    fit = item.fit_shards(loaded) if isinstance(loaded, Shards) else item.fit(loaded)
                self._fitted.append((item, fit))
        return {item.name: fitted.said for item, fitted in self._fitted if fitted.besides}

    def agree(self, answers: Mapping[int, Mapping[str, Any]]) -> dict[str, list[str]]:
        """Return on rank 0 the names that no rank has a place for, by item.

        Raises:
            RestoreError: that cannot be added; names it.
        """
        nowhere = {}
        for name, said in answers[0].items():
            others = [answer.get(name, {"besides": ()}) for rank, answer in answers.items() if rank]
            nowhere[name] = dtensor.without_place([said, *others], path=str(self._path), key=f"state[{name!r}]")
        return nowhere

    def apply(self, nowhere: Mapping[str, Collection[str]]) -> None:
        """Apply all items, after ``compare``.

        Raises:
            RestoreError: an object refused its state; says what was applied before.
        """
        done: list[str] = []
        for item, fitted in self._fitted:
            # An object of the user's own is called as it would be anywhere.
            mode = contextlib.nullcontext() if type(item) is _Stateful else outside_inference_mode()
            with self._named(item, done), loading.nothing_lost(), mode:
                result = fitted.apply(nowhere.get(item.name, ()))
                if result is not item.value and isinstance(self._state, MutableMapping):
                    self._state[item.name] = PerRank(result) if item.per_rank else result
            done.append(item.name)
        dtensor.warn_of_rounded(self._state)
        self._fitted.clear()

    @contextlib.contextmanager
    def _named(self, item: SavedItem, done: Sequence[str] = ()) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            ours = error if isinstance(error, RestoreError | StateError) else None
            message = ours.message if ours is not None else f"{type(error).__name__}: {error}"
            key = getattr(error, "key", "")
            key = key if key.startswith(item.key) else item.key  # of a tensor in it
            if done:
                message += f". Applied before: {', '.join(done)}. Build the state again before another resume"
            raise RestoreError(path=str(self._path), key=key, message=message) from error


def started_anew(value: StartsAnew, state: Any, rank: int) -> Fitted:
    """An object that is to start from what rank 0 has saved, on a rank that has saved none."""

    def apply(_: object) -> StartsAnew:
        value.start_anew(state, rank)
        return value

    return Fitted(apply=apply)


@dataclass(frozen=True)
class Shards:
    """A sharded item, verified and not read yet.

    Attributes:
        folder: with the ``.metadata`` that says of it.
        within: its name, where that says of other items, too; else "".
        metadata: reads that of a folder, once for all items.
    """

    folder: Path
    within: str
    metadata: Callable[[Path], Any]

    @functools.cached_property
    def stored(self) -> Stored:
        """The stored values. All but the tensors were read."""
        from safe_ckpt.core.sharding.dcp_read import Stored

        return Stored(self.folder, self.within, self.metadata(self.folder))

    def refuse_code(self) -> Self:
        """Before anything is restored: raise ``HostileCheckpointError`` where it would run code. Returns itself."""
        with refusing(self.folder, DCP_METADATA), contextlib.suppress(RestoreError):  # that comes once it is restored
            _ = self.stored
        return self


def read_once() -> Callable[[Path], Any]:
    """Return a function that reads the ``.metadata`` of a folder for the first who asks, and gives it to all others."""

    @functools.cache
    def read(folder: Path) -> Any:
        from safe_ckpt.core.sharding.dcp_read import read_metadata

        return read_metadata(folder)

    return read
