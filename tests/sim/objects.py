"""The object store that the hosts share, and the client that stands in for obstore's.

It lists what was put as soon as that was answered, as S3, Azure and Google Cloud Storage do. A request is on its way for a
moment of virtual time, is done in one step, and its answer is on its way for a moment: it arrives although its process was
killed or stopped meanwhile. Uploads in parts are left out: ``storage.part_bytes`` is larger than all that is saved here.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.world import Proc, Task, here, hub

_CHANGES = ("put", "delete", "copy")
_STRIKES = {
    "late": _CHANGES, "twice": _CHANGES, "lost": _CHANGES, "wrong": ("get", "head", "list", "copy"), "wrong list": ("list",),
}  # fmt: skip
"""Which requests can meet it."""
_STATUS = "Server returned error response with status code: {}: <Error><Code>{}</Code></Error>"
_WAY_S = 0.012
_RETRY_S = 60.0


class BaseError(Exception):
    """See ``obstore.exceptions``; the names count."""


class GenericError(BaseError):
    """See ``obstore.exceptions``."""


class AlreadyExistsError(BaseError):
    """See ``obstore.exceptions``."""


class PreconditionError(BaseError):
    """See ``obstore.exceptions``."""


@dataclass(frozen=True, kw_only=True)
class Object:
    """One state of an object.

    Attributes:
        before: the state that it replaced.
        number: counts all states of all objects.
    """

    data: bytes
    number: int
    before: Object | None = None

    @property
    def e_tag(self) -> str:
        """What a condition names."""
        return f'"{self.number}"'


class Client:
    """See ``obstore.store.S3Store``.

    Args:
        bucket: its name.
        config: not read.
        client_options: ``timeout`` of a request.
        retry_config: ``max_retries`` of the client itself.
    """

    def __init__(self, bucket: str, *, config: Any, client_options: Any, retry_config: Any) -> None:
        del config
        self.bucket = bucket
        self.timeout_s: float = client_options["timeout"].total_seconds()
        self.retries: int = retry_config["max_retries"]


class Result:
    """What ``obstore.get`` returns."""

    def __init__(self, key: str, found: Object) -> None:
        self.meta = _meta(key, found)
        self._data = found.data

    def bytes(self) -> Any:
        """The content."""
        return self._data


class Request:
    """One request on its way.

    Attributes:
        what: does it in the store, in one step, and returns the answer.
        wrong: makes another answer of it; None where there is none.
    """

    def __init__(
        self, verb: str, key: str, what: Callable[[Proc], Any], wrong: Callable[[Any], Any] | None = None
    ) -> None:
        self.verb, self.key, self.what, self.wrong = verb, key, what, wrong
        self.answer: Any = None
        self.error: Exception | None = None
        self.awaited = True


class Objects:
    """See the module.

    Attributes:
        there: the objects, by key.
        watcher: told of each change: ``put(key, object, process)``, ``deleted(key, object, process)``.
        down: until when requests of a host get no answer, by host number.
        refusing: (host number or -1, chance, until): requests that are answered with 503.
        once: what happens to the next request that it can happen to, by host number.
        strayed: whether a request was repeated by the network, or came after its answer was given up.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.there: dict[str, Object] = {}
        self.watcher: Any = None
        self.down: dict[int, float] = {}
        self.troubles: dict[int, list[tuple[float, float]]] = {}
        self.refusing: list[tuple[int, float, float]] = []
        self.once: dict[int, list[str]] = {}
        self.strayed = False
        self.requests = 0
        self._number = 0

    def heal(self) -> None:
        """From now on everything is answered."""
        self.down.clear()
        self.refusing.clear()
        self.once.clear()

    def hang(self, host: int, seconds: float) -> None:
        """From now on requests of a host get no answer, for so long."""
        self.down[host] = max(self.down.get(host, 0.0), self.world.now + seconds)
        self.trouble(host, self.world.now, self.down[host])

    def trouble(self, host: int, start: float, end: float) -> None:
        """A host could not use the store then."""
        self.troubles.setdefault(host, []).append((start, end))

    def ask(self, client: Client, verb: str, key: str, what: Callable[[Proc], Any], wrong: Any = None) -> Any:
        """Make a request, and again as often as the client does by itself. Returns its answer, or raises its error."""
        task = here()
        end, pause_s = self.world.now + _RETRY_S, 0.1
        for left in range(client.retries, -1, -1):
            try:
                return self._ask(task, client, Request(verb, key, what, wrong))
            except GenericError:
                if not left or self.world.now > end:
                    raise
            task.sleep(pause_s)
            pause_s = min(2 * pause_s, 15.0)
        raise AssertionError

    def _ask(self, task: Task, client: Client, request: Request) -> Any:
        world, host = self.world, task.proc.host.number
        self.requests += 1
        for fault in list(world.triggers):
            fault.look(task)
        if task.proc.paused and world.rng.random() < 0.7:
            task.give_way()  # stopped before the request is sent, not behind it
        self._send(task, client, request, self._fate(host, request))
        if not task.wait(client.timeout_s):
            request.awaited = False
            world.log("no answer", task.proc.name, request.verb, request.key)
            raise GenericError("Error performing the request: operation timed out")
        if request.error is not None:
            raise request.error
        return request.answer

    def _fate(self, host: int, request: Request) -> str:
        for number, kind in enumerate(self.once.get(host, ())):
            if request.verb in _STRIKES[kind] and (not kind.startswith("wrong") or request.wrong is not None):
                return self.once[host].pop(number)
        for place, chance, until in self.refusing:
            if place in (-1, host) and until > self.world.now and self.world.rng.random() < chance:
                return "refused"
        return ""

    def _send(self, task: Task, client: Client, request: Request, fate: str) -> None:
        world, rng, proc = self.world, self.world.rng, task.proc
        way_s, back_s = rng.random() * _WAY_S, rng.random() * _WAY_S
        if fate:
            world.log("request", proc.name, request.verb, request.key, fate)
        if (end := self.down.get(proc.host.number, 0.0)) > world.now:
            if rng.random() < 0.3:
                self.strayed = True
                world.at(end + rng.random() * 3.0, self._do, request, proc)  # it waits on its way
            return
        if fate in ("late", "twice"):
            self.strayed = True
            world.at(world.now + rng.choice((0.05, 1.0, 30.0)) * rng.random(), self._do, request, proc)
        if fate in ("late", "lost", "refused"):
            if fate == "lost":
                world.at(world.now + way_s, self._do, request, proc)
            world.at(world.now + way_s + back_s, self._fail, task, request, fate)
            return
        world.at(world.now + way_s, self._do, request, proc, task, back_s, fate.startswith("wrong"))

    def _fail(self, task: Task, request: Request, fate: str) -> None:
        text = "connection closed before message completed"
        request.error = GenericError(_STATUS.format(503, "SlowDown") if fate == "refused" else text)
        self._answer(task, request)

    def _do(
        self, request: Request, proc: Proc, task: Task | None = None, back_s: float = 0.0, wrong: bool = False
    ) -> None:
        """It has reached the store."""
        answer, error = None, None
        try:
            answer = request.what(proc)
            if wrong and request.wrong is not None:
                answer = request.wrong(answer)
        except (BaseError, FileNotFoundError) as raised:
            error = raised
        if task is not None:
            request.answer, request.error = answer, error
            self.world.at(self.world.now + back_s, self._answer, task, request)

    def _answer(self, task: Task, request: Request) -> None:
        if request.awaited and task.proc.alive:
            self.world.wake(task)

    def put(self, key: str, data: bytes, mode: Any, proc: Proc) -> dict[str, Any]:
        """In the store: create or replace an object, perhaps on a condition."""
        now = self.there.get(key)
        if mode == "create":
            if now is not None:
                raise AlreadyExistsError(f"Object at location {key} already exists")
        elif mode is not None and (now is None or now.e_tag != mode["e_tag"]):
            raise PreconditionError(f"Request precondition failure for path {key}: it does not match {mode['e_tag']}")
        self._number += 1
        self.there[key] = Object(
            data=data, number=self._number, before=now and Object(data=now.data, number=now.number)
        )
        self.world.log("put", proc.name, key, self._number)
        self.watcher.put(key, self.there[key], proc)
        return {"e_tag": self.there[key].e_tag, "version": None}

    def get(self, key: str) -> Object:
        """In the store: an object."""
        if key not in self.there:
            raise FileNotFoundError(f"Object at location {key} not found")
        return self.there[key]

    def delete(self, keys: list[str], proc: Proc) -> None:
        """In the store: delete what there is of these."""
        for key in keys:
            if (gone := self.there.pop(key, None)) is not None:
                self.world.log("deleted", proc.name, key)
                self.watcher.deleted(key, gone, proc)

    def below(self, prefix: str) -> list[str]:
        """In the store: the keys below a prefix."""
        start = prefix.rstrip("/") + "/" if prefix else ""
        return sorted(key for key in self.there if key.startswith(start))


def _meta(key: str, found: Object) -> dict[str, Any]:
    return {"path": key, "size": len(found.data), "e_tag": found.e_tag, "version": None}


def _otherwise(key: str, found: Object) -> Object:
    """A wrong answer to a read: not there, an earlier state, other bytes, fewer, or none."""
    rng = hub.world.rng
    kind = rng.choice(("404", "earlier", "flipped", "flipped", "short", "empty"))
    if kind == "404":
        raise FileNotFoundError(f"Object at location {key} not found")
    data = found.data
    if kind == "earlier":
        return found.before or found
    if kind == "flipped" and data:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
    elif kind == "short":
        data = data[: rng.randrange(len(data) + 1)]
    else:
        data = b""
    return Object(data=data, number=found.number)


def _store() -> Objects:
    return here().world.objects  # type: ignore[no-any-return]


def put(client: Client, key: str, data: Any, *, mode: Any = None, use_multipart: bool = False) -> dict[str, Any]:
    """See ``obstore``."""
    if use_multipart:
        raise NotImplementedError
    store, content = _store(), bytes(data)
    return store.ask(client, "put", key, lambda proc: store.put(key, content, mode, proc))  # type: ignore[no-any-return]


def get(client: Client, key: str) -> Result:
    """See ``obstore``."""
    store = _store()
    found = store.ask(client, "get", key, lambda _: store.get(key), lambda found: _otherwise(key, found))
    return Result(key, found)


def get_range(client: Client, key: str, *, start: int, length: int) -> bytes:
    """See ``obstore``."""
    store = _store()

    def read(_: Proc) -> Object:
        found = store.get(key)
        if start >= len(found.data):
            raise GenericError(_STATUS.format(416, "InvalidRange"))
        return Object(data=found.data[start : start + length], number=found.number)

    return store.ask(client, "get", key, read, lambda found: _otherwise(key, found)).data  # type: ignore[no-any-return]


def head(client: Client, key: str) -> dict[str, Any]:
    """See ``obstore``."""
    store = _store()
    found = store.ask(client, "head", key, lambda _: store.get(key), lambda found: _otherwise(key, found))
    return _meta(key, found)


def copy(client: Client, source: str, key: str) -> None:
    """See ``obstore``."""
    store = _store()

    def wrong(_: Any) -> Any:
        raise FileNotFoundError(f"Object at location {source} not found")

    store.ask(client, "copy", key, lambda proc: store.put(key, store.get(source).data, None, proc), wrong)


def delete(client: Client, keys: Any) -> None:
    """See ``obstore``."""
    store, chosen = _store(), [keys] if isinstance(keys, str) else list(keys)
    store.ask(client, "delete", chosen[0], lambda proc: store.delete(chosen, proc))


def _without_newest(store: Objects, keys: list[str], group: Callable[[str], str]) -> list[str]:
    """An old list: it lacks what was put last, but for the head, which is put all the time."""
    seen = [key for key in keys if "/.safe_ckpt/" not in key]
    newest = max(seen, key=lambda key: store.there[key].number, default="")
    return [key for key in keys if group(key) != group(newest)]


def list_all(client: Client, prefix: str | None = None, *, chunk_size: int = 50) -> list[Any]:
    """See ``obstore.list``."""
    store, start = _store(), prefix or ""

    def rows(keys: list[str]) -> list[dict[str, Any]]:
        return [_meta(key, store.there[key]) for key in keys]

    found = store.ask(
        client, "list", start, lambda _: rows(store.below(start)),
        lambda _: rows(_without_newest(store, store.below(start), lambda key: key)),
    )  # fmt: skip
    return [found[at : at + chunk_size] for at in range(0, len(found), chunk_size)]


def list_with_delimiter(client: Client, prefix: str | None = None) -> dict[str, Any]:
    """See ``obstore``."""
    store, start = _store(), (prefix or "").rstrip("/")
    depth = start.count("/") + 2 if start else 1

    def folder(key: str) -> str:
        return "/".join(key.split("/")[:depth])

    def folders(keys: list[str]) -> dict[str, Any]:
        below = {folder(key) for key in keys if key.count("/") >= depth}
        return {"common_prefixes": sorted(below), "objects": []}

    return store.ask(  # type: ignore[no-any-return]
        client, "list", start, lambda _: folders(store.below(start)),
        lambda _: folders(_without_newest(store, store.below(start), folder)),
    )  # fmt: skip


def modules() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    obstore, stores, errors = (types.ModuleType(name) for name in ("obstore", "obstore.store", "obstore.exceptions"))
    for call in (put, get, get_range, head, copy, delete, list_with_delimiter):
        setattr(obstore, call.__name__, call)
    obstore.list = list_all  # type: ignore[attr-defined]
    for kind in (BaseError, GenericError, AlreadyExistsError, PreconditionError):
        setattr(errors, kind.__name__, kind)
    for name in ("S3Store", "GCSStore", "AzureStore"):
        setattr(stores, name, Client)
    obstore.__file__ = "/site-packages/obstore/__init__.py"
    obstore.store, obstore.exceptions = stores, errors  # type: ignore[attr-defined]
    return {"obstore": obstore, "obstore.store": stores, "obstore.exceptions": errors}
