"""The client of a bucket: the options for obstore, which are wrong, and which are secret. Used by the writer process."""

from __future__ import annotations

import errno
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

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
    """Return the secrets of the options and of the environment, which no text may show; the longest first."""
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


_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED = ("400", "405", "411", "413", "414", "416", "501")
_NOT_OFFERED = ("400", "405", "501")
_NO_ACCESS = ("401", "403")
_NEVER = ("NotSupportedError", "InvalidPathError", "UnknownConfigurationKeyError")
# The answer to a HEAD has no body that would say why it is refused.
_EXPIRED = re.compile(r"Expired|TimeTooSkewed|TokenRefreshRequired|InvalidToken|HEAD http.*code: 40[03]", re.IGNORECASE)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_NOT_MADE = "builder error"
_PANIC = "PanicException"
_BODY = re.compile(r"(<\?xml[^>]*>\s*)?<Error\b.*?(</Error>|$)", re.IGNORECASE | re.DOTALL)
_CODE = re.compile(r"<Code>([^<]*)", re.IGNORECASE)
_MESSAGE = re.compile(r"<Message>([^<]*)", re.IGNORECASE)
_QUERY = re.compile(r"\?[^\s\"'<>]+")
_USER = re.compile(r"://[^/\s@]+@")
_LONGEST_TEXT = 400


class ExistsError(FileExistsError):
    """An object that was to be created is there already."""


class ChangedError(OSError):
    """An object that was to be replaced is another one by now, or is not there."""


def is_expired(error: BaseException) -> bool:
    """Whether other credentials, or another clock, would have been accepted, or may have been."""
    return _EXPIRED.search(str(error)) is not None


def is_bucket_missing(error: BaseException) -> bool:
    """Whether not the object is missing but the bucket, or container."""
    return _NO_BUCKET.search(str(error)) is not None


def is_not_offered(error: BaseException) -> bool:
    """Whether the store has no such request, or takes it for another one."""
    found = _STATUS.search(str(error))
    return found is not None and found.group(1) in _NOT_OFFERED


def is_panic(error: BaseException) -> bool:
    """Whether obstore failed within: of a class that cannot be imported, and is no ``Exception``."""
    return type(error).__name__ == _PANIC


def store_error(error: BaseException, path: str, verb: str, secrets: Sequence[str]) -> OSError:
    """The error that says what happened at ``path``: ``TimeoutError`` for what may work in a moment.

    Args:
        error: what obstore raised.
        path: the object's address.
        verb: what was to be done; only ``"create"`` can find that an object is there already.
        secrets: what must not be in the text.
    """
    kind, text = type(error).__name__, cleaned(str(error), secrets)
    status = found.group(1) if (found := _STATUS.search(text)) else ""
    unmet = kind == "NotModifiedError"  # some answer a condition that does not hold by 304, as if it were one of a read
    if verb == "create" and (unmet or kind == "AlreadyExistsError"):
        return ExistsError(errno.EEXIST, "is there already", path)
    if unmet or (kind == "PreconditionError" and status != "409"):
        return ChangedError(errno.ESTALE, "is another one by now", path)
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in _NO_ACCESS:
        return PermissionError(errno.EACCES, f"the store refuses to {verb} it: {text}", path)
    if isinstance(error, OSError) and error.errno is not None:
        return error
    said = f"could not {verb} it: {text}"
    if status == "501" and verb in ("create", "replace"):
        said = f"{said}: if the store takes no conditional requests, use another one, or set storage.unfenced"
    return _not_done(error, path, said, status)


def _not_done(error: BaseException, path: str, said: str, status: str) -> OSError:
    """The error about what is neither there already nor forbidden."""
    if is_bucket_missing(error):
        return FileNotFoundError(errno.ENOENT, "there is no such bucket", path)
    if status == "404":
        return FileNotFoundError(errno.ENOENT, said, path)
    if _NOT_MADE in said:
        variable = f"{PREFIXES.get(path.partition('://')[0], 'AWS')}_ALLOW_HTTP=true"
        said = f"{said}: if the endpoint is http://, set {variable}, or allow_http=true in storage.options"
    never = _NOT_MADE in said or is_panic(error) or type(error).__name__ in _NEVER or status in _REFUSED
    return OSError(errno.EINVAL, said, path) if never else TimeoutError(errno.ETIMEDOUT, said, path)


def cleaned(text: str, secrets: Sequence[str]) -> str:
    """Return the text as one line, without what a signature, a token or a setting may show."""
    for secret in secrets:
        text = text.replace(secret, "...").replace(urllib.parse.quote(secret, safe=""), "...")
    text = _BODY.sub(_summary, text.partition("\n\nDebug source")[0])
    text = _USER.sub("://", _QUERY.sub("?...", " ".join(text.split())))
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _summary(body: re.Match[str]) -> str:
    """Return the subject of an answer in XML. Its other parts may hold a token, or what was signed."""
    parts = [found.group(1).strip() for part in (_CODE, _MESSAGE) if (found := part.search(body.group()))]
    return ": ".join(parts)
