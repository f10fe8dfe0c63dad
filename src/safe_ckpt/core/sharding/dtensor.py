"""Facts about tensors of which every rank has a part: DTensor, and the older ShardedTensor.

Their classes are not imported here, which takes long. If they were never imported, there are no such tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from safe_ckpt.errors import RestoreError, StateError

logger = logging.getLogger(__name__)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_rounded: set[tuple[str, ...]] = set()
# What does not begin at zero in the optimizers of torch, and what stands beside it there: of ASGD, Rprop and NAdam.
_BEGIN_WITH_LR = {"eta": "ax", "step_size": "prev"}
_BEGIN_WITH_ONE = {"mu": "ax", "mu_product": "exp_avg"}
RATES = (
    "in a flattened state with the learning rate that the checkpoint has. If a scheduler changes that before these parameters "
    "are used, hand over the optimizer itself"
)
_LEAVES = frozenset({*_PLAIN, int, float, str, bool, type(None)})
_HOMES = {
    "DTensor": "torch.distributed.tensor",
    "ShardedTensor": "torch.distributed._shard.sharded_tensor",
    "ZeroRedundancyOptimizer": "torch.distributed.optim",
}
PLAIN = "plain_tensors"
"""Where the state of an optimizer of DTensors says how its plain tensors lie: below their key, as one of these words."""
_LOST = "a plain tensor with this rank's part of a DTensor parameter's state{}: the other ranks' would be lost"
_KEEPS_DTENSORS = "keeps DTensors, such as torch.optim.AdamW(fused=True)"
_PART, _WHOLE, _EITHER = "part", "whole", "either"


def _classes(*names: str) -> tuple[type, ...]:
    classes = (getattr(sys.modules.get(_HOMES[name]), name, None) for name in names)
    return tuple(kind for kind in classes if kind is not None)


def is_sharded(value: object) -> bool:
    """Whether ``value`` is a tensor of which this rank may have a part only."""
    return isinstance(value, _classes("DTensor", "ShardedTensor"))


def dtensor_class() -> tuple[type, ...]:
    """DTensor, where it was imported."""
    return _classes("DTensor")


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor."""
    return isinstance(value, _classes("DTensor"))


def leaves_of(value: object) -> Iterator[object]:
    """Everything in nested mappings, lists and tuples that is none of these. Cycles are walked once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        # The first question answers for nearly all of them, at a fraction of the time of the second.
        if type(inner) in _LEAVES or not isinstance(inner, Mapping | list | tuple):
            yield inner
        elif id(inner) not in seen:
            seen.add(id(inner))
            waiting.extend(inner.values() if isinstance(inner, Mapping) else inner)


def any_sharded(values: Iterable[object]) -> bool:
    """Whether there are tensors among them of which this rank may have a part only."""
    kinds = _classes("DTensor", "ShardedTensor")
    return bool(kinds) and any(type(value) not in _LEAVES and isinstance(value, kinds) for value in values)


def has_parts(module: torch.nn.Module) -> bool:
    """Whether a module holds tensors of which this rank may have a part only."""
    return any_sharded(itertools.chain(module.parameters(), module.buffers()))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, or the tensor itself where it is whole."""
    if type(tensor) not in _PLAIN and is_chunked(tensor):
        return next(iter(parts_of(tensor)), torch.empty(0, dtype=tensor.dtype, device="cpu"))
    detached: Any = tensor.detach()
    return detached.to_local() if type(tensor) not in _PLAIN and is_dtensor(tensor) else detached  # type: ignore[no-any-return]


def is_chunked(value: object) -> bool:
    """Whether ``value`` is a ShardedTensor: FSDP 1 gives each rank at most one part of it."""
    return isinstance(value, _classes("ShardedTensor"))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory that this rank has of a tensor, as plain tensors."""
    if is_chunked(tensor):
        return [shard.tensor.detach() for shard in tensor.local_shards()]  # type: ignore[attr-defined]
    return [local_of(tensor)]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a tensor that this rank has.

    Attributes:
        offsets: where it lies in the whole.
        begin: where it lies in this rank's part.
        sizes: of both.
    """

    offsets: tuple[int, ...]
    begin: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def first(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Piece:
        """Make the piece that is all that a rank has."""
        return cls(offsets=tuple(offsets), begin=(0,) * len(sizes), sizes=tuple(sizes))

    def to_json(self) -> list[Sequence[int]]:
        """Describe it as plain lists."""
        return [self.offsets, self.begin, self.sizes]

    @classmethod
    def from_json(cls, data: Sequence[Sequence[int]]) -> Piece:
        """Rebuild what ``to_json`` described."""
        offsets, begin, sizes = map(tuple, data)
        return cls(offsets=offsets, begin=begin, sizes=sizes)


def is_scattered(tensor: object) -> bool:
    """Whether the ranks' parts are no boxes of the whole. The same on every rank.

    Of several weights in one, such as gate and up, tensor parallelism gives each rank rows of each. DCP takes such a part for
    one box. What FSDP2 makes of rows that are one run is a box.
    """
    if not is_dtensor(tensor):
        return False
    whole: Any = tensor
    return any(
        getattr(placement, "split_factor", None) is not None and not _is_behind(whole, at)
        for at, placement in enumerate(whole.placements)
    )


def pieces_of(tensor: torch.Tensor) -> list[Piece]:
    """Return this rank's part of a tensor, as boxes of the whole. Without communication.

    Raises:
        StateError: a ShardedTensor of which this rank has several parts, as FSDP makes none.
    """
    if is_chunked(tensor):
        shards = [shard.metadata for shard in tensor.local_shards()]  # type: ignore[attr-defined]
        if len(shards) > 1:
            raise StateError(key="a ShardedTensor", message=f"{len(shards)} parts of it are on one rank: use DTensors")
        return [Piece.first(one.shard_offsets, one.shard_sizes) for one in shards]
    if not is_dtensor(tensor):
        return [Piece.first((0,) * tensor.dim(), tensor.shape)]
    whole: Any = tensor
    if whole.device_mesh.get_coordinate() is None:
        return []
    if is_partial(tensor):
        return [Piece.first((0,) * tensor.dim(), tensor.shape)]  # once it is reduced
    if not is_scattered(tensor):
        (chunk,) = whole.__create_chunk_list__()
        return [] if 0 in chunk.sizes else [Piece.first(chunk.offsets, chunk.sizes)]
    runs = []  # of each dimension: where a run of indices begins in the whole, where among ours, and how long it is
    for dim in range(tensor.dim()):
        indices = _indices(whole, dim)
        starts = [n for n, index in enumerate(indices) if n == 0 or index != indices[n - 1] + 1]
        ends = [*starts[1:], len(indices)]
        runs.append([(indices[start], start, end - start) for start, end in zip(starts, ends, strict=True)])
    return [
        Piece(
            offsets=tuple(at for at, _, _ in box), begin=tuple(n for _, n, _ in box), sizes=tuple(n for _, _, n in box)
        )
        for box in itertools.product(*runs)
    ]


def _is_behind(tensor: Any, at: int) -> bool:
    """Whether a mesh dimension divides what those behind it have left: so FSDP2 says that it came after them."""
    placements, mesh = tensor.placements, tensor.device_mesh
    dim, factor = getattr(placements[at], "dim", None), getattr(placements[at], "split_factor", None)
    others = range(at + 1, len(placements))
    return factor is not None and factor == math.prod(
        mesh.size(other) for other in others if getattr(placements[other], "dim", None) == dim
    )


def _indices(tensor: Any, dim: int) -> list[int]:
    """Which indices of a dimension this rank has, in their order."""
    coordinate = tensor.device_mesh.get_coordinate()
    dividing = [at for at, placement in enumerate(tensor.placements) if getattr(placement, "dim", None) == dim]
    last = [at for at in dividing if _is_behind(tensor, at)]
    found = list(range(tensor.shape[dim]))
    for at in [*(at for at in dividing if at not in last), *reversed(last)]:
        factor = 1 if at in last else getattr(tensor.placements[at], "split_factor", 1)
        count = tensor.device_mesh.size(at)
        found = [n for group in _chunks(found, factor) for n in _chunks(group, count)[coordinate[at]]]
    return found


def _chunks(indices: list[int], count: int) -> list[list[int]]:
    """Cut as ``torch.chunk`` does, with empty chunks at the end."""
    size = -(-len(indices) // count)
    return [indices[number * size : (number + 1) * size] for number in range(count)]


def is_partial(tensor: object) -> bool:
    """Whether the ranks' parts must be reduced, such as summed, to give the whole."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)  # type: ignore[attr-defined]


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a partial tensor, on every rank of its mesh. A collective of that mesh."""
    whole: Any = tensor.detach()
    return whole.full_tensor()  # type: ignore[no-any-return]


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The meshes of the DTensors among ``tensors``, each once."""
    meshes: dict[int, Any] = {}
    for tensor in tensors:
        if is_dtensor(tensor):
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            meshes[id(mesh)] = mesh
    return list(meshes.values())


def cut(tensor: torch.Tensor, begin: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A part of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(begin, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def copy_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy into a DTensor what of a whole tensor belongs to this rank."""
    for piece in pieces_of(target):
        cut(local_of(target), piece.begin, piece.sizes).copy_(cut(whole, piece.offsets, piece.sizes))


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape of a tensor; of a nested one the shapes of its parts."""
    nested = tensor.is_nested and tensor.layout is torch.strided
    return tuple(map(shape_of, tensor.unbind())) if nested else tuple(tensor.shape)


def _without_twins(tensor: torch.Tensor) -> torch.Tensor:
    """The first element along each dimension that was expanded: all others there are the same memory."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
        for dim, (size, step) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
            tensor = tensor.narrow(dim, 0, 1) if size > 1 and not step else tensor
    return tensor


def is_read_into(tensor: torch.Tensor) -> bool:
    """Whether its memory is written to as it is: neither expanded nor made in inference mode. Else see ``copied``."""
    return not tensor.is_meta and not tensor.is_inference() and _without_twins(tensor) is tensor


def refuse_lost(target: torch.Tensor, loaded: torch.Tensor) -> None:
    """Refuse values for which an expanded tensor has no room; those of a tensor without data are not known yet.

    Raises:
        ValueError: elements of ``target`` that are one memory have different values in ``loaded``.
    """
    room = _without_twins(target)
    if room is target or loaded.is_meta or target.shape != loaded.shape:
        return
    first = cut(loaded, (0,) * loaded.dim(), room.shape).expand_as(loaded)
    if not torch.equal(first.contiguous().view(torch.uint8), loaded.contiguous().view(torch.uint8)):
        raise ValueError("it is an expanded tensor, and the checkpoint has other values where its memory is the same")


def copied(target: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Give a tensor values in place, of the same shape and type. Returns it.

    Raises:
        ValueError: see ``refuse_lost``.
    """
    with _mode_of([target]), torch.no_grad():
        if is_dtensor(target) and not is_dtensor(loaded):
            copy_part(target, loaded)
            return target
        refuse_lost(target, loaded)
        if "sparse" in str(target.layout):
            target.resize_as_sparse_(loaded)
        room = _without_twins(target)
        room.copy_(loaded if room is target else cut(loaded, (0,) * loaded.dim(), room.shape))
    return target


def _mode_of(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[object]:
    """Return the context in which these tensors may be written to."""
    inference = any(not is_lazy(tensor) and tensor.is_inference() for tensor in tensors)
    return torch.inference_mode() if inference else contextlib.nullcontext()


def is_torchs(one: Any) -> bool:
    """Whether a class or a method was written by torch."""
    return str(getattr(one, "__module__", "")).partition(".")[0] == "torch"


def by_number(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[Any, torch.nn.Parameter]:
    """The parameters by their numbers in a state dict of such an optimizer.

    Raises:
        ValueError: it is of another number of parameters.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(owned) != len(numbers):
        raise ValueError(f"it is the state of {len(numbers)} parameters, this optimizer steps {len(owned)}")
    return dict(zip(numbers, owned, strict=True))


def load_keeping_types(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load as its ``load_state_dict`` does, but floats keep the type that they were saved with.

    torch gives all of them their parameter's: what an optimizer keeps in float32 for a bfloat16 parameter, such as NAdam's
    products or moments of a class of the user's own, would be rounded. Parameters of another type than they had at the save
    have it their way: of torch's own classes nothing is of the parameter's type then.
    """
    if is_divided(optimizer):
        _load_own(optimizer, state)
        return
    state = _plain_again(state)
    optimizer.load_state_dict(dict(state))
    _keep_types(optimizer, state)


def _load_own(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load what belongs to this rank. The class itself numbers its parameters, and keeps the types."""
    numbered = by_number(optimizer, state)
    places = {number: place for place, number in enumerate(numbered)}
    owned = {id(parameter) for group in stepping(optimizer).param_groups for parameter in group["params"]}
    own = {places[n]: dict(kept) for n, kept in state["state"].items() if kept and id(numbered[n]) in owned}
    groups = [{**one, "params": [places[number] for number in one["params"]]} for one in state["param_groups"]]
    optimizer.optim.state.clear()
    optimizer.load_state_dict({**state, "state": own, "param_groups": groups})
    optimizer.state.clear()  # copies of what the one that steps has


def _plain_again(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state without ``PLAIN``, and with plain tensors where it says so."""
    marks = state.get(PLAIN) or {}
    if PLAIN not in state:
        return state
    again = {
        number: {key: local_of(one) if key in marks and is_dtensor(one) else one for key, one in kept.items()}
        for number, kept in state["state"].items()
    }
    return {**{key: one for key, one in state.items() if key != PLAIN}, "state": again}


@contextlib.contextmanager
def keeping_types(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within this, a ``load_state_dict`` of these optimizers, whoever calls it, is as ``load_keeping_types``."""
    given: dict[int, Mapping[str, Any]] = {}
    # What is divided keeps the types by itself, and shows a hook what was left of the state.
    of_torch = [one for one in optimizers if isinstance(one, torch.optim.Optimizer) and not is_divided(one)]

    def before(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        given[id(optimizer)] = state

    def after(optimizer: torch.optim.Optimizer) -> None:
        _keep_types(optimizer, given.pop(id(optimizer)))

    with contextlib.ExitStack() as hooks:
        for one in of_torch:
            hooks.callback(one.register_load_state_dict_pre_hook(before).remove)
            hooks.callback(one.register_load_state_dict_post_hook(after).remove)
        yield


def _keep_types(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    if not is_torchs(optimizer.load_state_dict):
        return
    is_known = is_torchs(type(optimizer))
    for number, parameter in by_number(optimizer, state).items():
        kept = {key: one for key, one in state["state"].get(number, {}).items() if isinstance(one, torch.Tensor)}
        types = {one.dtype for key, one in kept.items() if key != "step" and one.shape == parameter.shape}
        now = optimizer.state[parameter] if kept and (parameter.dtype in types or not is_known) else {}
        for key, one in kept.items():
            if key in now and one.is_floating_point() and now[key].dtype != one.dtype:
                now[key] = one.to(now[key].device)


def load_module(module: torch.nn.Module, state: Any) -> None:
    """``Module.load_state_dict``, also of expanded buffers and of tensors that were made in inference mode.

    Args:
        module: gets it.
        state: changed.
    """
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if _without_twins(buffer) is not buffer and name in state:
            state[name] = copied(buffer, state[name])  # torch takes it for restored
    with _mode_of(itertools.chain(module.parameters(), module.buffers())):
        module.load_state_dict(state)


def refuse_partitioned(module: torch.nn.Module) -> None:
    """Refuse a module whose parameters DeepSpeed's ZeRO-3 has taken apart: their state dict holds empty tensors.

    Raises:
        StateError: naming the parameter.
    """
    if "deepspeed" not in sys.modules:
        return
    for name, parameter in module.named_parameters():
        whole = getattr(parameter, "ds_numel", None)
        if whole is not None and whole != parameter.numel():
            message = (
                "ZeRO-3 keeps its values apart from the module: save with safe_ckpt.deepspeed and convert with "
                "zero_to_fp32.py, or gather it with deepspeed.zero.GatheredParameters"
            )
            raise StateError(key=name, message=message)


def is_divided(optimizer: object) -> bool:
    """Whether this is a ``ZeroRedundancyOptimizer``: each rank steps some of the parameters, and has their state."""
    return isinstance(optimizer, _classes("ZeroRedundancyOptimizer"))


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that steps the parameters of this rank, and has their state.

    Raises:
        StateError: it was made with ``overlap_with_ddp=True``.
    """
    if not is_divided(optimizer):
        return optimizer
    local = getattr(optimizer, "optim", None)
    if not isinstance(local, torch.optim.Optimizer):
        message = "it does not take its state back before its first steps: make it with overlap_with_ddp=False"
        raise StateError(key=type(optimizer).__name__, message=message)
    return local


def own_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its ``state_dict()``, as ``load_keeping_types`` takes it; what this rank has of it alone, in tensors that say so.

    Raises:
        StateError: see ``state_in_parts``.
    """
    if not is_divided(optimizer):
        state = optimizer.state_dict()
        if not dtensor_class() or not isinstance(state.get("state"), Mapping) or not has_dtensors(optimizer):
            return state
        numbered = by_number(optimizer, state)
        kept = {number: one for number, one in state["state"].items() if number in numbered}
        parts, marks = state_in_parts([(str(number), numbered[number], one) for number, one in kept.items()])
        marked = {PLAIN: marks} if marks else {}
        return {**state, "state": {**state["state"], **dict(zip(kept, parts, strict=True))}, **marked}
    own = stepping(optimizer).state
    state = torch.optim.Optimizer.state_dict(optimizer)  # its own class wants to know what all ranks have
    state["state"] = {n: dict(own[one]) for n, one in by_number(optimizer, state).items() if own.get(one)}
    return state


def has_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps parameters that are DTensors."""
    return any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"])


def state_in_parts(
    kept: Iterable[tuple[str, torch.Tensor, Any]],
) -> tuple[list[Any], dict[str, dict[str, bool]]]:
    """Make DTensors of plain tensors in which an optimizer keeps what belongs to this rank's parts of its parameters.

    Args:
        kept: of each parameter its name, itself and its state.

    Returns:
        The states, and for ``PLAIN`` how the plain tensors lay.

    Raises:
        StateError: under one key there are parts, and others that are none; names the parameter.
    """
    rows = list(kept)
    ways: dict[str, dict[str, str]] = {}
    for name, parameter, state in rows:
        plain = state.items() if isinstance(state, Mapping) and is_dtensor(parameter) else ()
        for key, value in plain:
            if isinstance(value, torch.Tensor) and value.dim() and not is_sharded(value):
                part, whole = (value.shape == one.shape for one in (local_of(parameter), parameter))
                way = _EITHER if part and whole else _PART if part else _WHOLE if whole else ""
                ways.setdefault(key, {}).setdefault(way, name)
    for key, found in ways.items():
        if _PART in found and not found.keys() <= {_PART, _EITHER}:
            other = next(way for way in found if way not in (_PART, _EITHER))
            lost = _LOST.format(f", and that of {found[other]} is none")
            message = f"{lost}. Use one that {_KEEPS_DTENSORS}"
            raise StateError(key=f"{found[_PART]}: {key}", message=message)
    sure = {key: [way for way in found if way != _EITHER] or [_EITHER] for key, found in ways.items()}
    marks = {key: {found[0]: True} for key, found in sure.items() if found[0] and not found[1:]}
    states = [
        {key: _as_part(one, parameter) if _PART in marks.get(key, ()) else one for key, one in state.items()}
        if isinstance(state, Mapping)
        else state
        for _, parameter, state in rows
    ]
    return states, marks


def _as_part(value: Any, parameter: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not is_dtensor(parameter) or is_sharded(value):
        return value
    (kind,) = dtensor_class()
    of_whole = {"shape": parameter.shape, "stride": parameter.stride()}
    made: Any = kind
    return made.from_local(value, parameter.device_mesh, parameter.placements, run_check=False, **of_whole)


def marks_of(paths: Iterable[Sequence[Any]]) -> dict[str, str]:
    """How plain tensors lay, by their keys: from the places of all that was saved of an optimizer."""
    found: dict[str, set[str]] = {}
    for path in paths:
        if len(path) == 3 and path[0] == PLAIN:
            found.setdefault(str(path[1]), set()).add(str(path[2]))
    return {key: next((way for way in (_PART, _WHOLE) if way in ways), _EITHER) for key, ways in found.items()}


def like_which(way: str, parameter: torch.Tensor, size: Sequence[int]) -> torch.Tensor | None:
    """Spread as which tensor a rank needs what lay in such a way; None for the whole of it.

    Raises:
        ValueError: it does not say whether it is a part.
    """
    if way == _EITHER and is_dtensor(parameter) and tuple(local_of(parameter).shape) != tuple(size):
        raise ValueError(
            "plain tensors beside DTensor parameters were saved where each rank had the whole of these, so that nothing tells "
            "whether they are parts of it: resume on one rank"
        )
    return None if way == _WHOLE else parameter


def refuse_local_parts(states: Mapping[str, Any]) -> None:
    """The same for state dicts: of a model, and what ``get_optimizer_state_dict`` returns, flattened or not, anywhere in them.

    Raises:
        StateError: naming the tensor.
    """
    if dtensor_class():
        refuse_local_among(list(placed(states)))


def refuse_local_among(found: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
    """The same for what ``placed`` has found.

    Raises:
        StateError: naming the tensor.
    """
    parameters = {str(path[-1]): leaf for path, leaf in found if is_dtensor(leaf)}
    for path, leaf in found if parameters else ():
        for _, _, name in stepped(path):
            _refuse_local_part(".".join(map(str, path)), leaf, parameters.get(name))


def placed(state: Any, *, tuples: bool = False) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything in nested mappings and lists that is none of these, or empty, and where it lies. Each is walked once.

    Args:
        state: whatever it is.
        tuples: walk these, too.
    """
    kinds = (Mapping, list, tuple) if tuples else (Mapping, list)
    seen: set[int] = set()
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), state)]
    while waiting:
        path, inner = waiting.pop()
        if type(inner) in _LEAVES or not isinstance(inner, kinds) or not inner:
            yield path, inner
        elif id(inner) not in seen:
            seen.add(id(inner))
            pairs = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
            waiting.extend([((*path, key), below) for key, below in pairs][::-1])


def stepped(path: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """The parameters of which a path may lead to the state, as ``get_optimizer_state_dict`` returns it, flattened or not.

    Returns:
        The length of the path to all of the parameter's state, or of a flattened one to this value; what names of that
        optimizer begin with; the parameter's name.
    """
    for at, part in enumerate(map(str, path)):
        where = "".join(f"{above}." for above in path[:at])
        if part == "state" and len(path) > at + 2:
            yield at + 2, where, str(path[at + 1])
        elif part.startswith("state."):
            yield from ((at + 1, where, name) for name in names_above(part.removeprefix("state.")))


def begin_anew(holder: MutableMapping[Any, Any], key: Any) -> None:
    """Have a parameter begin anew: with nothing, or in a flattened state with what an optimizer of torch begins with.

    A flattened one must have something there: torch has taken a step, with a learning rate of 0, to make it.

    Args:
        holder: with all else of the state, restored.
        key: what ``stepped`` has found there.
    """
    room = holder[key]
    if isinstance(room, MutableMapping):
        room.clear()
        return
    above, _, name = str(key).rpartition(".")
    begins: Any = 0
    if f"{above}.{_BEGIN_WITH_ONE.get(name)}" in holder:
        begins = 1
    elif f"{above}.{_BEGIN_WITH_LR.get(name)}" in holder:
        begins = holder.get(f"param_groups.{above.removeprefix('state.')}.lr", 0)
    holder[key] = torch.zeros_like(room).fill_(begins) if isinstance(room, torch.Tensor) else begins


def begin_with_lr(names: Iterable[str]) -> bool:
    """Whether one of these begins with the learning rate, in a flattened state."""
    return any(name.rpartition(".")[2] in _BEGIN_WITH_LR for name in names)


def warn_of_rounded(state: Any) -> None:
    """Log, once for the same names and on rank 0, which optimizer state torch's functions round to the parameters' type.

    Args:
        state: what was restored: of a model, and what ``get_optimizer_state_dict`` returns, flattened or not, anywhere in it.
    """
    known = [(path, leaf) for path, leaf in placed(state) if path and (type(leaf) in _PLAIN or is_dtensor(leaf))]
    found = [(path, leaf) for path, leaf in known if leaf.is_floating_point()]
    sizes = {str(path[-1]): leaf.itemsize for path, leaf in found}
    names = tuple(
        ".".join(map(str, path))
        for path, leaf in found
        if leaf.itemsize > 2 and str(path[-1]).rpartition(".")[2] != "step"
        for _, _, name in stepped(path)
        if sizes.get(name, leaf.itemsize) < leaf.itemsize
    )
    group = torch.distributed
    if not names or names in _rounded or (group.is_available() and group.is_initialized() and group.get_rank()):
        return
    _rounded.add(names)
    logger.warning(
        "torch's set_optimizer_state_dict rounds %d entries to their parameters' type: %s. Hand over the optimizer itself, "
        "which is restored as it was",
        len(names),
        ", ".join([*names[:5], *(["..."] if names[5:] else [])]),
    )


def names_above(name: str) -> Iterator[str]:
    """Yield the dotted beginnings of a name, but not the name itself."""
    while name := name.rpartition(".")[0]:
        yield name


def _refuse_local_part(key: str, value: object, parameter: Any) -> None:
    if not isinstance(value, torch.Tensor) or is_sharded(value) or not is_dtensor(parameter):
        return
    if tuple(value.shape) == tuple(local_of(parameter).shape) != tuple(parameter.shape):
        lost = _LOST.format(", as TransformerEngine's FusedAdam has it")
        message = (
            f"{lost}. Hand over the optimizer itself instead of its state dict, to Checkpointer or safe_ckpt.dcp; or use one "
            f"that {_KEEPS_DTENSORS}"
        )
        raise StateError(key=key, message=message)


def is_extra_state(name: str) -> bool:
    """Whether ``torch.nn.Module`` saves under this name what ``get_extra_state`` returns: of any kind, type and size."""
    return name.rpartition(".")[2] == "_extra_state"


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedItem:
    """A sharded item, as it is known before its state is asked for.

    Attributes:
        state_dict: returns what is saved. It is asked for where the plan is not known already.
        known: the same object as at the last save if names, types, shapes and addresses are the same, too; None if that
            is not known.
        tensors: this rank's parts, in an order that belongs to ``known``.
        floats: all floats of the state, as bytes.
        at: returns what lies at a path of the state dict, which is no tensor.
        frozen: returns the names of tensors that are not trained; see ``hugging_face.is_named``. It is asked where
            ``state_dict`` is.
    """

    state_dict: Callable[[], Any]
    known: object = None
    tensors: Sequence[torch.Tensor] = ()
    floats: bytes = b""
    at: Callable[[Sequence[Any]], Any] | None = None
    frozen: Callable[[], frozenset[str]] = frozenset

    @classmethod
    def of(cls, state: Any, frozen: Callable[[], frozenset[str]] = frozenset) -> ShardedItem:
        """Make the item of a state dict."""
        return cls(state_dict=lambda: state, frozen=frozen)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """An item of a checkpoint that was compared with where it goes. Nothing of it was applied yet.

    Attributes:
        apply: applies it, and returns the object that has the value now. It gets those of ``besides`` that no rank has a
            place for.
        besides: names in the checkpoint for which this rank has no place: another may have one.
        refusal: the error's words where no rank has a place for such names; "" where they are added.
    """

    apply: Callable[[Collection[str]], Any]
    besides: Sequence[str] = ()
    refusal: str = ""

    @property
    def said(self) -> dict[str, Any]:
        """The part that ``without_place`` compares."""
        return {"besides": list(self.besides), "refusal": self.refusal}


def without_place(said: Sequence[Mapping[str, Any]], *, path: str, key: str) -> list[str]:
    """Which names of an item no rank has a place for, in the order of the first rank.

    Args:
        said: of every rank's ``Fitted``.
        path: of the checkpoint, for the error.
        key: the item, for the error.

    Raises:
        RestoreError: there are some, and they cannot be added.
    """
    others = [frozenset(one["besides"]) for one in said[1:]]
    nowhere = [name for name in said[0]["besides"] if all(name in other for other in others)]
    if nowhere and said[0]["refusal"]:
        raise RestoreError(path=path, key=key, message=f"{said[0]['refusal']} {nowhere}, which the checkpoint has")
    return nowhere
