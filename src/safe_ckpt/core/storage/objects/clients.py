"""The client of a bucket: what obstore is given, which of it is wrong, and what of it is secret. Used by the writer process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from safe_ckpt.core.storage.objects.answers import cleaned, is_panic
from safe_ckpt.core.storage.objects.options import PREFIXES, StorageOptions, variables
from safe_ckpt.errors import ConfigError

_STORES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
_RETRY_S = 60
_CONNECT_S = 10
_SHORT = 3  # what is no longer stands in any text
_NO_SECRETS = ("true", "false")
_SECRET_OPTION = re.compile(r"key|secret|token|password|sas|signature|credential", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(KEY|SECRET|TOKEN|PASSWORD|SAS)$")


def secrets_of(options: StorageOptions) -> tuple[str, ...]:
    """What no text may show, of the options and of the environment; the longest first."""
    given = [value for name, value in options.given.items() if _SECRET_OPTION.search(name)]
    given += [value for name, value in variables().items() if _SECRET_VARIABLE.search(name)]
    long = {value for value in given if len(value) > _SHORT and value.lower() not in _NO_SECRETS}
    return tuple(sorted(long, key=len, reverse=True))


def connect(scheme: str, name: str, options: StorageOptions, retries: int) -> Any:
    """A client of one bucket, or container.

    Args:
        scheme: one of ``options.SCHEMES``.
        name: the bucket's.
        options: how to reach it.
        retries: how often obstore itself tries a request again.

    Raises:
        ConfigError: an endpoint has no scheme, or obstore does not take the options.
    """
    from obstore import store

    config = options.given
    _check_endpoints(scheme, config)
    if scheme == "s3" and "aws_checksum_algorithm" not in config:
        config.setdefault("checksum_algorithm", "SHA256")  # of each part; the request's signature needs it anyway
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=options.request_timeout_s),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, options.request_timeout_s)),
    }
    # Client options that are given hide those of the environment.
    variable = f"{PREFIXES[scheme]}_ALLOW_HTTP"
    allowed = os.environ.get(variable, "")
    for option in (variable.lower(), "allow_http"):
        allowed = config.pop(option, allowed)
    if allowed.lower() in ("true", "1"):
        client["allow_http"] = True
    try:
        return getattr(store, _STORES[scheme])(
            name,
            config=config,
            client_options=client,
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=_RETRY_S)},
        )
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        message = f"{scheme}://{name}: {cleaned(str(error), secrets_of(options))}"
        raise ConfigError(key="storage", message=message) from None


def _check_endpoints(scheme: str, given: Mapping[str, str]) -> None:
    """Refuse an endpoint without a scheme, such as ``localhost:9000``: obstore ends with a panic on the first request."""
    known = _ENDPOINTS[scheme]
    prefixes = ("", f"{PREFIXES[scheme]}_", "AZURE_STORAGE_")
    options = [name for name in given if any(f"{prefix}{name.upper()}" in known for prefix in prefixes)]
    for name in options:
        if "://" not in given[name]:
            raise ConfigError(key="storage.options", message=f"{name} needs http:// or https:// in front")
    for name in () if options else known:
        if "://" not in os.environ.get(name, "://"):
            raise ConfigError(key=name, message="this environment variable needs http:// or https:// in front")
