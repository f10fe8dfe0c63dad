"""The file names and contents that ``save_state`` writes: those that Accelerate itself would write."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.torch as safetensors_torch
import torch
from accelerate import utils
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard, SeedableRandomSampler

from safe_ckpt.accelerate import strategies
from safe_ckpt.adapters import FilePlan, torch_file
from safe_ckpt.adapters.extras import file_plan, is_divided, is_short, refuse_short, safetensors
from safe_ckpt.devices import generator_states, in_use, set_generator_states, types
from safe_ckpt.errors import StateError

_DEVICES = ("xpu", "mlu", "sdaa", "musa", "hpu", "neuron", "cuda")  # as Accelerate, in whose files they are
_PLACE = ("_num_yielded", "_sampler_iter_yielded", "_steps_since_snapshot", "_iterator_finished")


def files(
    accelerator: Any,
    weights: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Any],
    *,
    safe_serialization: bool,
    besides: Mapping[str, Any],
    sharded: bool,
) -> list[FilePlan]:
    """The files of this rank: everything on rank 0, random states on every rank.

    State dicts are asked for on every rank, as Accelerate does.

    Args:
        accelerator: whose state.
        weights: the state dicts of the models.
        shared: what ``shared_states`` returned.
        safe_serialization: safetensors for the models, or pickle.
        besides: further entries for this rank's random states.
        sharded: whether models and optimizers are planned elsewhere.

    Raises:
        StateError: something cannot be saved; names it.
    """
    # Of one that is divided no rank has all; see ``strategies``.
    plain = enumerate([] if sharded else strategies.plain_optimizers(accelerator))
    optimizers = [(i, accelerator._optimizers[i]) for i, one in plain if not is_divided(one)]
    planned = [
        *(_model(i, state, safe_serialization=safe_serialization) for i, state in enumerate(weights)),
        *_stateful(utils.OPTIMIZER_NAME, optimizers),
        *_stateful(utils.SCHEDULER_NAME, enumerate(strategies.plain_schedulers(accelerator))),
        *(torch_file(f"{numbered(utils.SAMPLER_NAME, i)}.bin", sampler) for i, sampler in samplers(accelerator)),
        *(torch_file(name, state) for name, state in shared.items()),
        *(
            torch_file(f"custom_checkpoint_{i}.pkl", custom.state_dict())
            for i, custom in enumerate(accelerator._custom_objects)
        ),
    ]
    rank = accelerator.process_index
    own = torch_file(f"{utils.RNG_STATE_NAME}_{rank}.pkl", {**random_states(accelerator.step), **besides})
    return [*planned, own] if rank == 0 else [own]


def shared_states(accelerator: Any) -> dict[str, Any]:
    """Files that every rank of Accelerate writes under one name: loaders' positions and the scaler's state."""
    states = {}
    for i, loader in enumerate(accelerator._dataloaders):
        if getattr(loader, "use_stateful_dataloader", False):
            states[f"{numbered('dl_state_dict', i)}.bin"] = loader.state_dict()
    if accelerator.scaler is not None:
        states[utils.SCALER_NAME] = accelerator.scaler.state_dict()
    return states


def must_match(accelerator: Any, shared: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> fingerprint of what must be equal on all ranks, because one file stands for all of them."""
    dispatched = {
        f"{numbered('dl_state_dict', i)}.bin"
        for i, loader in enumerate(accelerator._dataloaders)
        if isinstance(loader, DataLoaderDispatcher)  # only the main process reads data
    }
    fingerprints = {}
    for name, state in shared.items():
        if name in dispatched:
            continue
        # Of a loader: how far it is. Seeds of workers differ by rank, and each rank gets its own back (``dataloaders.py``).
        of_a_loader = isinstance(state, Mapping) and "_iterator_finished" in state
        compared = {key: state.get(key) for key in _PLACE} if of_a_loader else state
        fingerprints[name] = hashlib.sha256(repr(_plain(compared)).encode()).hexdigest()[:16]
    return fingerprints


def samplers(accelerator: Any) -> list[tuple[int, Any]]:
    """The samplers that Accelerate saves: seedable ones over iterable shards, each with the number of its loader."""
    over_shards = [
        (i, loader.get_sampler())
        for i, loader in enumerate(accelerator._dataloaders)
        if isinstance(loader.dataset, IterableDatasetShard)
    ]
    return [(i, sampler) for i, sampler in over_shards if isinstance(sampler, SeedableRandomSampler)]


def random_states(step: int, *, devices: bool = True) -> dict[str, Any]:
    """The state of every random generator of this process, under Accelerate's keys; of the host's alone if not ``devices``.

    Those of devices that Accelerate does not save (NPU, MTIA, other plug-ins) are under keys of the same form.
    """
    states = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),  # noqa: NPY002 - the global one is what Accelerate saves
        "torch_manual_seed": torch.get_rng_state(),
    }
    for device in _DEVICES if devices else ():
        available = getattr(utils, f"is_{device}_available", None)
        if available is not None and available():
            states[_key(device)] = getattr(torch, device).get_rng_state_all()
    for device in in_use() if devices else ():
        if device not in _DEVICES and (seeds := generator_states(device)):
            states[_key(device)] = seeds
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put back what ``random_states`` returned."""
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])  # noqa: NPY002 - as above
    torch.set_rng_state(states["torch_manual_seed"])
    for device in _DEVICES:
        if (seeds := states.get(_key(device))) is not None:
            getattr(torch, device).set_rng_state_all(seeds)
    restore_other_devices(states)


def restore_other_devices(states: Mapping[str, Any]) -> None:
    """Put back the generators of those devices that Accelerate does not restore."""
    for device in types():
        if device not in _DEVICES and (seeds := states.get(_key(device))) is not None:
            set_generator_states(device, seeds)


def _key(device: str) -> str:
    return f"torch_{device}_manual_seed"


def numbered(name: str, index: int) -> str:
    """Number a name; the first one has no number."""
    return f"{name}_{index}" if index else name


def _stateful(name: str, objects: Iterable[tuple[int, Any]]) -> list[FilePlan]:
    return [torch_file(f"{numbered(name, i)}.bin", one.state_dict()) for i, one in objects]


def _model(index: int, state: Mapping[str, Any], *, safe_serialization: bool) -> FilePlan:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            message = "is on the meta device: it was offloaded. Save such a model with handle.save_model()"
            raise StateError(key=f"model {index}: {name}", message=message)
        if isinstance(value, torch.Tensor):
            refuse_short(f"model {index}: {name}", value)
    if not safe_serialization:
        return torch_file(utils.WEIGHTS_NAME.replace(".", f"_{index}.") if index else utils.WEIGHTS_NAME, state)
    path = f"{numbered(utils.SAFE_MODEL_NAME, index)}.safetensors"
    for name, value in state.items():
        if not safetensors.fits_safetensors({name: value}):
            is_tensor = isinstance(value, torch.Tensor)
            kind = f"{value.dtype} {value.layout} tensor" if is_tensor else type(value).__name__
            message = f"a {kind} does not fit safetensors: use save_state(safe_serialization=False)"
            raise StateError(key=f"model {index}: {name}", message=message)
    return safetensors.safetensors_plan(path, _loadable(index, state))


def _loadable(index: int, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """Return what safetensors' ``load_model``, Accelerate's reader, takes: of those that share memory one that covers it.

    Raises:
        StateError: it would take no file of these tensors; names those that are why.
    """
    try:
        covered = _covered(state)
    except Exception as error:
        homes: dict[tuple[torch.device, int], dict[str, torch.Tensor]] = {}
        for name, tensor in state.items():
            homes.setdefault(_home(tensor), {})[name] = tensor
        culprits = next((list(group) for group in homes.values() if _is_refused(group)), list(state))
        message = (
            "load_state could not load it from safetensors, for its memory is not its own or not the whole of one: "
            "clone() it, or use save_state(safe_serialization=False)"
        )
        raise StateError(key=f"model {index}: {', '.join(culprits)}", message=message) from error
    kept: Any = OrderedDict((name, tensor) for name, tensor in state.items() if name not in covered)
    if hasattr(state, "_metadata"):
        kept._metadata = state._metadata
    return kept  # type: ignore[no-any-return]


def _covered(state: Mapping[str, torch.Tensor]) -> set[str]:
    """The names whose memory is a part of that of another one, ties left out. Raises where ``load_model`` will."""
    rule = getattr(safetensors_torch, "_remove_duplicate_names", None)
    if rule is None:  # another release of safetensors
        return set()
    first: dict[tuple[torch.device, int], str] = {}
    for name, tensor in state.items():
        first.setdefault(_home(tensor), name)
    kept = rule(dict(state), preferred_names=list(first.values()))
    views = {name: file_plan.view_of(tensor) for name, tensor in state.items()}
    return {name for whole, names in kept.items() for name in names if views[name] != views[whole]}


def _is_refused(group: Mapping[str, torch.Tensor]) -> bool:
    try:
        _covered(group)
    except Exception:
        return True
    return False


def _home(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _plain(value: Any) -> Any:
    """Return what is equal for equal values. No pickle: that depends on the identity of objects as well."""
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        if is_short(value):  # refused where it is planned, by name
            return str(value.dtype), tuple(value.shape)
        data = file_plan.values_of(value).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, np.ndarray) and value.dtype != object:
        return str(value.dtype), value.shape, value.tobytes()
    is_plain = isinstance(value, str | int | float | bool | bytes | type(None))
    return (type(value).__name__, value if is_plain else None)
