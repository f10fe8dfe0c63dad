"""Uploads in parts that a killed process left unfinished: S3 keeps their parts, unseen and charged for, until they are aborted.

obstore does not list them, so these two requests are signed here, as "Signature Version 4" of AWS's documentation has it. Azure
drops such parts after a week by itself. GCS does with a lifecycle rule, as S3 does: docs/object-stores.md has it.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from xml.etree import ElementTree

from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.core.storage.objects.place import ObjectPath

logger = logging.getLogger(__name__)
_SAFE = "-_.~"
_EMPTY = hashlib.sha256(b"").hexdigest()
_MOST_PAGES = 100
_MOST_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, repr=False)
class Access:
    """Where the bucket is, and who asks."""

    base: str
    region: str
    key: str
    secret: str
    token: str


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """An upload that was begun and is not over."""

    key: str
    upload_id: str


def abort(folder: ObjectPath, is_meant: Callable[[str], bool] = lambda _: True) -> int:
    """Abort the unfinished uploads below ``folder``, whose writers are gone. Returns how many. Never raises.

    Args:
        folder: where.
        is_meant: tells by the name right below ``folder`` whether an upload is meant.
    """
    try:
        access = access_to(folder.bucket)
        if access is None:
            return 0
        start = f"{folder.key}/" if folder.key else ""
        begun = unfinished(access, start, folder.bucket.options.request_timeout_s)
        found = [one for one in begun if is_meant(one.key[len(start) :].partition("/")[0])]
        for one in found:
            _ask(access, "DELETE", one.key, {"uploadId": one.upload_id}, folder.bucket.options.request_timeout_s)
    except (OSError, ValueError, ElementTree.ParseError, http.client.HTTPException) as error:
        logger.info("%s: unfinished uploads could not be looked for: %s", folder, type(error).__name__)
        return 0
    return len(found)


def unfinished(access: Access, prefix: str, timeout_s: float) -> list[Unfinished]:
    """What was begun and is not over, of keys that begin with ``prefix``.

    Raises:
        OSError: the store gave no answer, or refuses.
        ValueError: its answer is none.
    """
    found: list[Unfinished] = []
    query = {"uploads": "", "prefix": prefix}
    for _ in range(_MOST_PAGES):
        page = ElementTree.fromstring(_ask(access, "GET", "", query, timeout_s))  # noqa: S314 - expat stops what explodes
        found += [Unfinished(key=_text(one, "Key"), upload_id=_text(one, "UploadId")) for one in _all(page, "Upload")]
        if _text(page, "IsTruncated") != "true":
            break
        query |= {"key-marker": _text(page, "NextKeyMarker"), "upload-id-marker": _text(page, "NextUploadIdMarker")}
    return [one for one in found if one.key.startswith(prefix)]


def access_to(bucket: Bucket) -> Access | None:
    """What is needed to sign requests; None where the store is not S3, or no credentials are known here."""
    if bucket.scheme != "s3":
        return None
    given = {name.removeprefix("aws_"): value for name, value in bucket.options.given.items()}

    def setting(*names: str) -> str:
        known = [given.get(name, "") for name in names]
        return next(filter(None, (*known, *(os.environ.get(f"AWS_{name.upper()}", "") for name in names))), "")

    key, secret, token = setting("access_key_id"), setting("secret_access_key"), setting("session_token", "token")
    if not (key and secret):
        key, secret, token = _by_botocore()
    if not (key and secret):
        return None
    region = setting("region", "default_region") or "us-east-1"
    endpoint = setting("endpoint", "endpoint_url", "endpoint_url_s3").rstrip("/")
    base = f"{endpoint}/{bucket.name}" if endpoint else f"https://{bucket.name}.s3.{region}.amazonaws.com"
    return Access(base=base, region=region, key=key, secret=secret, token=token)


def _by_botocore() -> tuple[str, str, str]:
    """The machine's own role, where botocore is installed."""
    try:
        from botocore.session import get_session  # type: ignore[import-untyped, import-not-found, unused-ignore]

        found: Any = get_session().get_credentials()
    except Exception:  # it is not installed, or finds nothing: a lifecycle rule has to do it
        return "", "", ""
    return (found.access_key, found.secret_key, found.token or "") if found is not None else ("", "", "")


def _ask(access: Access, verb: str, key: str, query: dict[str, str], timeout_s: float) -> bytes:
    base = urllib.parse.urlsplit(access.base)
    path = "/".join(filter(None, [base.path.rstrip("/"), urllib.parse.quote(key, safe=f"/{_SAFE}")])) or "/"
    asked = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in sorted(query.items()))
    headers = _signed(access, verb, base.netloc, path, asked, datetime.now(timezone.utc))
    url = f"{base.scheme}://{base.netloc}{path}?{asked}"
    request = urllib.request.Request(url, method=verb, headers=headers)  # noqa: S310 - the user's own endpoint
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - the same
        return bytes(answer.read(_MOST_BYTES))


def _signed(access: Access, verb: str, host: str, path: str, query: str, now: datetime) -> dict[str, str]:
    """The headers of one request without a body, signed."""
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
    if access.token:
        headers["x-amz-security-token"] = access.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = f"{verb}\n{path}\n{query}\n{lines}\n{names}\n{_EMPTY}"
    scope = f"{moment[:8]}/{access.region}/s3/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signing = f"AWS4{access.secret}".encode()
    for part in scope.split("/"):
        signing = hmac.new(signing, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(signing, to_sign.encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access.key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    del headers["host"]  # urllib sends it by itself
    return headers


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe=_SAFE)


def _all(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [one for one in element if one.tag.rpartition("}")[2] == name]


def _text(element: ElementTree.Element, name: str) -> str:
    return next((one.text or "" for one in _all(element, name)), "")
