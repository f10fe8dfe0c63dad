"""The S3 endpoint of Hugging Face Buckets as its documentation describes it, in front of another server of the kit.

    with start("ministack", tmp_path) as server, HubGateway(server) as hub:
        os.environ.update(hub.environment())
        obstore.store.from_url(hub.url())

Read in "S3 Compatibility" of the Hub's documentation: the namespace stands in the endpoint, buckets in the path; ``GetObject``
is answered by 302 unless the client says that it is one of ``PROXIED``; ``If-Match`` and ``If-None-Match`` hold for
``PutObject`` and the source of a copy, not for ``GetObject``; ``ListObjects`` of version 1, delimiters but ``/``,
``UploadPartCopy`` and ``aws-chunked`` are refused; keys are restricted; metadata is not stored.

Guessed: which errors it answers; that ``HeadObject`` is answered directly, with the ETag of ``PutObject``; that checksums are
ignored; that ``DeleteObjects`` is there (``bulk_delete``); that the address of a 302 is signed, refuses other credentials,
takes ranges, and has the same ETags (``edge_etags``).

With ``conditions`` it does with those of a PUT what is reported of other stores.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from typing_extensions import Self

from kit.object_servers import ObjectServer

NAMESPACE = "some-org"
PROXIED = ("aws-cli", "botocore", "aws-sdk-rust")
_EDGE_HOST = "localhost"  # another name than that of the gateway, which is 127.0.0.1
_LIVES_S = 60
_SECRETS = {"test": "test"}
_ANSWERED = ("content-type", "content-length", "content-range", "accept-ranges", "etag", "last-modified")
_DROPPED = ("host", "connection", "authorization", "x-amz-checksum", "x-amz-meta", "x-amz-sdk", "x-amz-server-side")


class _Refused(Exception):
    """An answer that is an error: its status and code."""


class HubGateway(ObjectServer):
    """A bucket of Hugging Face's, on the server behind. Looks at objects directly, past the gateway.

    Args:
        server: speaks S3, and keeps the objects.
        bulk_delete: whether there is ``DeleteObjects``.
        edge_etags: whether what a 302 leads to has the ETags that the gateway names.
        conditions: of a PUT: "honoured"; "ignored"; "refused", by 501; "304" for those that do not hold, instead of 412;
            "unquoted": an ETag in quotes, as HTTP has it, is none that holds.

    Attributes:
        redirects: how many requests were answered by 302.
        refused: method, path and code of what was refused.
    """

    def __init__(
        self, server: ObjectServer, *, bulk_delete: bool = True, edge_etags: bool = True, conditions: str = "honoured"
    ) -> None:
        super().__init__("hub", "", server._process, server.bucket)
        self._server = server
        self.bulk_delete, self.edge_etags, self.conditions = bulk_delete, edge_etags, conditions
        self.redirects = 0
        self.refused: list[tuple[str, str, str]] = []
        self._client = server._s3()

    def __enter__(self) -> Self:
        self._gateway, self._edge = _Listener(self), _Listener(self)
        self.endpoint = f"http://127.0.0.1:{self._gateway.server_port}"
        return self

    def __exit__(self, *exc: object) -> None:
        for listener in (self._gateway, self._edge):
            listener.shutdown()
            listener.server_close()

    def stop(self) -> None:
        """Nothing: the server behind belongs to who started it."""

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """See ``ObjectServer``: the namespace is a part of the endpoint."""
        return super().environment(f"{endpoint or self.endpoint}/{NAMESPACE}")

    def edge_of(self, asked: str) -> str:
        """Where a 302 leads for who asked this host and port: to the edge. Who asks a proxy stays with it, by another name."""
        port = int(asked.rpartition(":")[2])
        return f"http://{_EDGE_HOST}:{self._edge.server_port if port == self._gateway.server_port else port}"


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: HubGateway) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.target = urlsplit(hub._server.endpoint).netloc
        threading.Thread(target=self.serve_forever, args=(0.05,), name="hub gateway", daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that end early are what tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Listener

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path, _, query = self.path.partition("?")
        words = dict(parse_qsl(query, keep_blank_values=True))
        try:
            if self.headers.get("host", "").startswith(f"{_EDGE_HOST}:"):
                self._at_edge(path, words)
            else:
                self._at_gateway(path, query, words, body)
        except _Refused as refused:
            self._refuse(*refused.args)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - the names that the base class calls

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def _at_gateway(self, path: str, query: str, words: dict[str, str], body: bytes) -> None:
        _check_signature(self.command, path, query, dict(self.headers.items()), body)
        namespace, _, rest = path.removeprefix("/").partition("/")
        if namespace != NAMESPACE:
            raise _Refused("404", "NoSuchBucket")
        key = unquote(rest.partition("/")[2])
        self._check_operation(key, words)
        if self.command == "GET" and key and not words:
            agent = self.headers.get("user-agent", "").lower()
            if not any(name in agent for name in PROXIED):
                self._redirect(rest)
                return
        self._pass_on(f"/{rest}" + (f"?{query}" if query else ""), body)

    def _check_operation(self, key: str, words: dict[str, str]) -> None:
        if "aws-chunked" in self.headers.get("content-encoding", "") or "x-amz-trailer" in self.headers:
            raise _Refused("501", "NotImplemented")
        if key and (
            key.endswith(("/", ".."))
            or key.startswith(("/", "./"))
            or any(bad in key for bad in ("//", "../", "\\", "\0"))
        ):
            raise _Refused("400", "InvalidArgument")
        if self.command == "GET" and not key:
            if words.get("list-type") != "2" and "location" not in words:
                raise _Refused("501", "NotImplemented")
            if words.get("delimiter", "/") != "/":
                raise _Refused("400", "InvalidArgument")
        if "uploadId" in words and "x-amz-copy-source" in self.headers:
            raise _Refused("501", "NotImplemented")
        if "tagging" in words or (self.command == "POST" and "delete" in words and not self.server.hub.bulk_delete):
            raise _Refused("501", "NotImplemented")

    def _redirect(self, rest: str) -> None:
        """To the edge; a missing object too, of which only the edge would know: it is looked up first."""
        found = self._ask("HEAD", f"/{rest}", {}, b"")[0]
        if found.status != 200:
            raise _Refused(str(found.status), "NoSuchKey" if found.status == 404 else "InternalError")
        expires = int(time.time()) + _LIVES_S
        place = self.server.hub.edge_of(self.headers["host"])
        self.server.hub.redirects += 1
        location = f"{place}/edge/{rest}?Expires={expires}&Signature={self._sign(rest, str(expires))}"
        self._answer(302, {"Location": location}, b"")

    def _at_edge(self, path: str, words: dict[str, str]) -> None:
        rest = path.removeprefix("/edge/")
        if self.command != "GET" or "authorization" in self.headers:
            raise _Refused("400", "InvalidArgument")
        expires = words.get("Expires", "0")
        signed = hmac.compare_digest(words.get("Signature", ""), self._sign(rest, expires))
        if not signed or int(expires) < time.time():
            raise _Refused("403", "AccessDenied")
        self._pass_on(f"/{rest}", b"")

    def _sign(self, rest: str, expires: str) -> str:
        key = f"{self.server.hub._server.endpoint}{self.server.hub.bucket}".encode()
        return hmac.new(key, f"{rest}?{expires}".encode(), hashlib.sha256).hexdigest()

    def _pass_on(self, target: str, body: bytes) -> None:
        headers = {name: value for name, value in self.headers.items() if not name.lower().startswith(_DROPPED)}
        if any(name.lower().startswith("if-") for name in headers):
            if self.command == "PUT" and self.server.hub.conditions == "refused":
                raise _Refused("501", "NotImplemented")
            if self.server.hub.conditions == "unquoted" and headers.get("if-match", "").startswith('"'):
                raise _Refused("412", "PreconditionFailed")
            if self.command == "GET" or self.server.hub.conditions == "ignored":
                headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        if source := self.headers.get("x-amz-copy-source"):
            namespace, _, rest = source.removeprefix("/").partition("/")
            headers["x-amz-copy-source"] = f"/{rest}" if namespace == NAMESPACE else source
        answer, found = self._ask(self.command, target, headers, body)
        kept = {name: value for name, value in answer.getheaders() if name.lower() in _ANSWERED}
        if self.headers["host"].startswith(_EDGE_HOST) and not self.server.hub.edge_etags:
            kept = {name: value for name, value in kept.items() if name.lower() != "etag"} | {"ETag": '"of-the-edge"'}
        if answer.status == 412 and self.server.hub.conditions == "304":
            self._answer(304, {}, b"")
            return
        self._answer(answer.status, kept, found)

    def _ask(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=30)
        try:
            given = {**headers, "Host": self.server.target, "Content-Length": str(len(body))}
            connection.request(method, target, body, given)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _refuse(self, status: str, code: str) -> None:
        self.server.hub.refused.append((self.command, self.path.partition("?")[0], code))
        text = f"<Error><Code>{code}</Code><Message>of the gateway</Message><RequestId>0</RequestId></Error>"
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
        self._answer(int(status), {"Content-Type": "application/xml"}, body)

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        headers = {name: value for name, value in headers.items() if name.lower() != "content-length"} | {
            "Content-Length": next((v for n, v in headers.items() if n.lower() == "content-length"), str(len(body)))
            if self.command == "HEAD"
            else str(len(body))
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _check_signature(method: str, path: str, query: str, headers: dict[str, str], body: bytes) -> None:
    """Refuse what is not signed as AWS4-HMAC-SHA256 by one of the known keys, over the path with the namespace."""
    small = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    kind, _, rest = small.get("authorization", "").partition(" ")
    parts = dict(part.strip().split("=", 1) for part in rest.split(",") if "=" in part)
    who, _, scope = parts.get("Credential", "").partition("/")
    if kind != "AWS4-HMAC-SHA256" or who not in _SECRETS:
        raise _Refused("403", "InvalidAccessKeyId")
    payload = small.get("x-amz-content-sha256", "")
    if payload not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
        raise _Refused("400", "XAmzContentSHA256Mismatch")
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    words = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)
    named = parts.get("SignedHeaders", "").split(";")
    lines = "".join(f"{name}:{small.get(name, '')}\n" for name in named)
    request = "\n".join([method, quote(unquote(path), safe="/-_.~"), words, lines, ";".join(named), payload])
    text = "\n".join([kind, small.get("x-amz-date", ""), scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{_SECRETS[who]}".encode()
    for word in [*scope.split("/"), text]:
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    if not hmac.compare_digest(key.hex(), parts.get("Signature", "")):
        raise _Refused("403", "SignatureDoesNotMatch")


__all__ = ["NAMESPACE", "PROXIED", "HubGateway"]
