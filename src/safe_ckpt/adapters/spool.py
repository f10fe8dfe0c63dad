"""A framework's directory in an object store: a directory of this host takes its place, and a mirror follows it."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.storage.objects.options import is_url, refuse_url, variables
from safe_ckpt.errors import ConfigError, DirectoryError

__all__ = ["is_url", "refuse_url", "spooled"]

logger = logging.getLogger(__name__)
_LETTERS = 16
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME")


def spooled(url: str, config: CheckpointConfig, *, key: str) -> tuple[Path, CheckpointConfig]:
    """Where a framework writes and reads instead of ``url``, and the settings with which that is mirrored there.

    The framework's own code needs files. So they are committed in a directory of this host, uploaded in the background, and
    deleted in both places by the same rules. What is not uploaded yet is not deleted here. With several hosts they must share
    ``storage.cache_dir``.

    Args:
        url: the address.
        config: the user's settings.
        key: what the user gave it as, for messages.

    Raises:
        ConfigError: the settings name another mirror.
        DirectoryError: another user has made the directory.
    """
    if config.mirror.url not in (None, url):
        message = f"is in an object store already: {url} and mirror.url cannot both hold. Leave one out"
        raise ConfigError(key=key, message=message)
    mirror = dataclasses.replace(config.mirror, url=url, required=True, follow=True)
    base = Path(config.storage.cache_dir or tempfile.gettempdir()) / f"safe_ckpt-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.lstat().st_uid != os.getuid() or base.is_symlink():
        raise DirectoryError(path=str(base), message="another user has made it: set storage.cache_dir")
    given = [option for option in config.storage.options if "endpoint" in option.partition("=")[0].lower()]
    where = "\n".join([url, *given, *(variables().get(name, "") for name in _ENDPOINTS)])
    local = base / hashlib.sha256(where.encode()).hexdigest()[:_LETTERS]
    if local.exists():
        logger.info("%s: going on with what an earlier job left in %s; delete that, too, to start afresh", url, local)
    return local, dataclasses.replace(config, mirror=mirror)
