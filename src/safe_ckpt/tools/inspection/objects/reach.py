"""From the address that a user gives to a place in a bucket."""

from __future__ import annotations

from pathlib import Path

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.home.object_head import has_manifest
from safe_ckpt.core.storage.objects.options import StorageOptions, is_url
from safe_ckpt.core.storage.objects.place import ObjectPath, Place, open_place

_FIRST_ANSWER_S = 10.0


def place_at(url: str, config: CheckpointConfig | None = None, *, within_s: float | None = None) -> ObjectPath:
    """What ``url`` names, reached as the environment says.

    Args:
        url: such as ``s3://bucket/run``.
        config: the settings; None for those of the environment.
        within_s: how long a request may be tried again; None for ``barrier_s``.

    Raises:
        ConfigError: it is no address, the settings are not allowed, or the client is not installed.
    """
    config = config or CheckpointConfig.from_environment()
    deadline = config.timeouts.barrier_s if within_s is None else within_s
    return open_place(url, StorageOptions.of(config.storage, deadline))


def place_of(path: str) -> Place:
    """What a user names: a place in a bucket if it is an address of one, else a path.

    A store gets one request at once, so that a wrong endpoint is found in some seconds.

    Raises:
        ConfigError: as ``place_at``.
        OSError: the store gave no first answer within some seconds.
    """
    if not is_url(path):
        return Path(path)
    place = place_at(path)
    _await_answer(place)
    return place


def _await_answer(place: ObjectPath) -> None:
    first_s = min(_FIRST_ANSWER_S, place.bucket.options.give_up_after_s)
    try:
        place.bucket.hurried(first_s).within(first_s).size_of((place / MANIFEST_NAME).key)
    except (FileNotFoundError, PermissionError):
        return  # an answer: what it means is for the request that is meant


def is_checkpoint(place: ObjectPath) -> bool:
    """Whether it is one checkpoint, and not a directory of them: it has a manifest, whatever that says.

    Raises:
        OSError: the store gave no answer, or refuses.
    """
    return has_manifest(place)
