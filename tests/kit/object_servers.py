"""Real servers of object stores on this machine: moto and MiniStack speak S3, Azurite speaks Azure Blob Storage.

    with start("moto", tmp_path) as server:
        bucket = server.new_bucket()  # one per test
        os.environ.update(bucket.environment())
        obstore.store.from_url(bucket.url())

They listen on 127.0.0.1 alone, on a port of their own, keep everything in memory, and end with this process.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from typing_extensions import Self

from kit.kinds import starting
from kit.patience import scaled

KINDS = ("moto", "ministack", "azurite")
_START_S = 30.0
_TRIES = 3
_ROOT = Path(__file__).resolve().parents[2]
# Azurite's, known to everybody: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_AZURE_VERSION = "2021-12-02"
# Runs as the server until it is the server: not a preexec_fn, which is not safe beside threads.
_UNTIL_PARENT_ENDS = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("too late")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def missing(kind: str) -> str:
    """Why a server of this kind cannot be started here; "" when it can."""
    if kind == "azurite":
        if shutil.which("node") is None:
            return "azurite needs node"
        return "" if _azurite() else "azurite-blob is not installed (npm), nor named by SAFE_CKPT_AZURITE"
    needed = {"moto": ("moto", "flask", "flask_cors", "boto3"), "ministack": ("ministack", "boto3")}[kind]
    absent = [name for name in needed if find_spec(name) is None]
    return f"{kind} needs {', '.join(absent)}" if absent else ""


def start(kind: str, folder: Path) -> ObjectServer:
    """A server of this kind, ready, with one bucket. What it writes, its log among it, lies in the folder.

    Raises:
        RuntimeError: it does not start; with what it said.
    """
    starting("server")
    if why := missing(kind):
        raise RuntimeError(why)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{kind}.log"
    for _ in range(_TRIES):
        port = _free_port()
        process = _spawn(kind, port, folder, log)
        if _listens(process, port):
            return ObjectServer(kind, f"http://127.0.0.1:{port}", process).new_bucket(owner=True)
        process.kill()
        process.wait()
    raise RuntimeError(f"{kind} does not start: {log.read_text(errors='replace')[-2000:]}")


class ObjectServer:
    """A bucket (for Azure: a container) and the server it is on. Made by ``start`` and ``new_bucket``.

    Attributes:
        kind: "moto", "ministack" or "azurite".
        endpoint: the server's address, ``http://127.0.0.1:PORT``.
        bucket: the name.
        pid: of the server.
    """

    def __init__(self, kind: str, endpoint: str, process: subprocess.Popen[bytes], bucket: str = "") -> None:
        self.kind, self.endpoint, self.bucket, self.pid = kind, endpoint, bucket, process.pid
        self._process = process
        self._owner = False
        self._client: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def is_azure(self) -> bool:
        """Whether it speaks Azure Blob Storage; else S3."""
        return self.kind == "azurite"

    def url(self, prefix: str = "run") -> str:
        """Of a folder in the bucket."""
        return f"{'az' if self.is_azure else 's3'}://{self.bucket}/{prefix}".rstrip("/")

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables with which obstore finds the server, or another address that stands for it."""
        address = endpoint or self.endpoint
        if self.is_azure:
            return {
                "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": _ACCOUNT_KEY,
                "AZURE_STORAGE_ENDPOINT": f"{address}/{_ACCOUNT}",
                "AZURE_ALLOW_HTTP": "true",
            }
        return {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def new_bucket(self, *, owner: bool = False) -> ObjectServer:
        """The same server with a fresh bucket."""
        other = ObjectServer(self.kind, self.endpoint, self._process, f"bucket-{uuid.uuid4().hex[:12]}")
        other._owner, other._client = owner, self._client
        if other.is_azure:
            other._azure("PUT", {"restype": "container"})
        else:
            other._s3().create_bucket(Bucket=other.bucket)
        return other

    def keys(self, prefix: str = "") -> dict[str, int]:
        """Of all objects whose key begins so, with their sizes."""
        if self.is_azure:
            return dict(self._blobs(prefix))
        pages = self._s3().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", [])}

    def uploads(self) -> list[str]:
        """The keys of uploads in parts that are neither complete nor aborted; on Azure, of blobs that are but staged blocks."""
        if self.is_azure:
            return sorted(dict(self._blobs(include="uncommittedblobs")).keys() - self.keys().keys())
        pages = self._s3().get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket)
        return sorted(entry["Key"] for page in pages for entry in page.get("Uploads", []))

    def read(self, key: str) -> bytes:
        """An object."""
        if self.is_azure:
            return self._azure("GET", {}, key)
        body: bytes = self._s3().get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return body

    def stop(self) -> None:
        """End the server, if this is what ``start`` returned."""
        if self._owner:
            self._process.kill()
            self._process.wait()

    def _s3(self) -> Any:
        if self._client is None:
            boto3, config = import_module("boto3"), import_module("botocore.config")  # they ship no types
            settings = config.Config(s3={"addressing_style": "path"}, proxies={})
            keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
            self._client = boto3.Session(**keys).client("s3", endpoint_url=self.endpoint, config=settings)
        return self._client

    def _blobs(self, prefix: str = "", include: str = "") -> Iterator[tuple[str, int]]:
        query = {"restype": "container", "comp": "list", "prefix": prefix, "include": include, "marker": ""}
        while True:
            page = ET.fromstring(self._azure("GET", {name: value for name, value in query.items() if value}))
            for blob in page.iter("Blob"):
                yield blob.findtext("Name", ""), int(blob.findtext("Properties/Content-Length", "0"))
            query["marker"] = page.findtext("NextMarker", "")
            if not query["marker"]:
                return

    def _azure(self, method: str, query: dict[str, str], key: str = "") -> bytes:
        path = f"/{_ACCOUNT}/{self.bucket}" + (f"/{quote(key)}" if key else "")
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _AZURE_VERSION}
        canonical = [f"{name}:{value}" for name, value in sorted(headers.items())]
        resource = [f"/{_ACCOUNT}{path}", *(f"{name}:{value}" for name, value in sorted(query.items()))]
        text = "\n".join([method, *[""] * 11, *canonical, *resource])
        digest = hmac.new(base64.b64decode(_ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
        headers["Content-Length"] = "0"
        words = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        request = urllib.request.Request(f"{self.endpoint}{path}?{words}".rstrip("?"), headers=headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=scaled(_START_S)) as answer:
            body: bytes = answer.read()
        return body


def _azurite() -> str:
    named = os.environ.get("SAFE_CKPT_AZURITE")
    places = [named, shutil.which("azurite-blob"), str(_ROOT / ".venv/node/node_modules/.bin/azurite-blob")]
    return next((place for place in places if place and os.access(place, os.X_OK)), "")


def _spawn(kind: str, port: int, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    commands = {
        "moto": [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        "ministack": [sys.executable, "-m", "ministack"],
        "azurite": [
            *[_azurite(), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"],
            *["--skipApiVersionCheck", "--disableTelemetry", "--silent"],
        ],
    }
    own = {
        "TMPDIR": str(folder),
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "SERVICES": "s3",
        "LOG_LEVEL": "WARNING",
        "IOT_MTLS_ENABLED": "0",  # else all MiniStacks of a machine want port 8883
        "SFTP_ENABLED": "0",
    }
    until = [sys.executable, "-IS", "-c", _UNTIL_PARENT_ENDS, str(os.getpid())]
    with log.open("ab") as out:
        return subprocess.Popen(
            [*until, *commands[kind]],
            env={**os.environ, **own},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until it does; False when it ends, as it does when another was faster to take the port."""
    deadline = time.monotonic() + scaled(_START_S)
    while process.poll() is None and time.monotonic() < deadline:
        if _listener(port) & _sockets(process.pid):
            return True
        time.sleep(0.02)
    return False


def _listener(port: int) -> set[str]:
    """The inode of the socket that listens there."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    found = (line.split() for line in lines)
    return {words[9] for words in found if words[1] == f"0100007F:{port:04X}" and words[3] == "0A"}


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
    return inodes


__all__ = ["KINDS", "ObjectServer", "missing", "start"]
