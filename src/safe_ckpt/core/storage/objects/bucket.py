"""One bucket, through obstore: the few requests that a commit needs, retried, with errors that name the object and no secret.

Every object but the head is written under a key that is used once. So a request that arrives twice, or late, replaces nothing,
and whatever got no answer may be sent again. Standard library and obstore only; the writer process uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from safe_ckpt.core.storage.objects.clients import (
    ChangedError,
    ExistsError,
    connect,
    is_bucket_missing,
    is_expired,
    is_not_offered,
    is_panic,
    secrets_of,
    store_error,
)
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.errors import ForkedError

logger = logging.getLogger(__name__)
_RETRIES = 8  # of obstore itself, so that an upload does not begin anew for one of its parts; all else is retried here
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_MOST_PARTS = 9_000  # S3 and GCS take 10,000
_CONFLICTS = 20
_UPLOADS = 4
_SINGLY = "disable_bulk_delete=true"
_Result = TypeVar("_Result")
_used_by: list[int] = []  # the process that made the first request


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """One object, as a listing has it."""

    key: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Version:
    """Which state of an object was read or written: for replacing it if it is still that one."""

    e_tag: str | None
    version: str | None

    @classmethod
    def of(cls, meta: Any) -> Version:
        """From what obstore returns."""
        return cls(e_tag=meta.get("e_tag"), version=meta.get("version"))


class Bucket:
    """One bucket or container. Used by several threads at a time.

    Args:
        scheme: one of ``options.SCHEMES``.
        name: the bucket's.
        options: how to reach it.

    Attributes:
        stop: called between two tries; raises to give up. None for going on until the deadline.
        unanswered: how many requests got no answer and were made again, since ``within`` made this.
    """

    def __init__(self, scheme: str, name: str, options: StorageOptions) -> None:
        self.scheme = scheme
        self.name = name
        self.options = options
        self.stop: Callable[[], None] | None = None
        self.unanswered = 0
        self._longest_pause_s = _LONGEST_PAUSE_S
        self._secrets = secrets_of(options)
        self._store, self._patient_store = self._connect(0), self._connect(_RETRIES)
        self._second_store = self._connect(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket, (self.scheme, self.name, self.options)  # a pickle of these holds no secret

    def within(self, seconds: float, stop: Callable[[], None] | None = None) -> Bucket:
        """The same bucket, with another deadline for each request, and another ``stop``."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.options = dataclasses.replace(self.options, give_up_after_s=seconds)
        other.stop, other.unanswered = stop, 0
        return other

    def hurried(self, seconds: float) -> Bucket:
        """The same bucket, with connections of its own, for what must be there within this time after an outage.

        No request waits longer for an answer, and none is made again later than that after the one before it.
        """
        limit_s = min(seconds, self.options.request_timeout_s)
        other = Bucket(self.scheme, self.name, dataclasses.replace(self.options, request_timeout_s=limit_s))
        other._longest_pause_s = min(seconds, _LONGEST_PAUSE_S)
        return other

    def afresh(self) -> Bucket:
        """The same bucket over connections that this one does not use: for a second look."""
        other = self.within(self.options.give_up_after_s, self.stop)
        other._store, other._second_store = self._second_store, self._store
        return other

    @property
    def url(self) -> str:
        """The address of the bucket."""
        return f"{self.scheme}://{self.name}"

    def read(self, key: str) -> tuple[bytes, Version]:
        """A small object as a whole.

        Raises:
            FileNotFoundError: there is none.
            OSError: the store gave no answer in time, or refuses.
        """

        def request() -> tuple[bytes, Version]:
            result = _obstore().get(self._store, key)
            return bytes(result.bytes()), Version.of(result.meta)

        return self._again(request, key, "read")

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Read so many bytes of an object, fewer where it ends.

        Raises:
            FileNotFoundError: it is not there.
            OSError: the store gave no answer in time, or refuses.
        """
        if length <= 0:
            return memoryview(b"")

        def request() -> memoryview:
            return memoryview(_obstore().get_range(self._store, key, start=start, length=length))

        return self._again(request, key, "read")

    def size_of(self, key: str) -> int:
        """How many bytes an object has.

        Raises:
            FileNotFoundError: it is not there.
            OSError: the store gave no answer in time, or refuses.
        """
        return int(self._again(lambda: _obstore().head(self._store, key), key, "look at")["size"])

    def create(self, key: str, data: bytes) -> Version:
        """Put an object where there is none; one request decides.

        An answer that was lost is made up for by reading: if the object is there with these bytes, it was this request.

        Raises:
            ExistsError: there is another one.
            OSError: the store gave no answer in time, or refuses. Whether it is there is not known then.
        """

        def request() -> Version:
            return Version.of(_obstore().put(self._store, key, data, mode="create", use_multipart=False))

        for _ in range(_CONFLICTS):
            try:
                return self._again(request, key, "create")
            except ExistsError:
                try:
                    found, version = self.read(key)
                except FileNotFoundError:  # S3 answers 409 where two requests met and neither was done
                    self._pause(_FIRST_PAUSE_S)
                    continue
                if found != data:
                    raise
                return version
        raise TimeoutError(errno.EAGAIN, "could not create it: other requests are in the way", f"{self.url}/{key}")

    def replace(self, key: str, data: bytes, version: Version) -> Version:
        """Replace an object if it is still the one that was read; one request decides. Lost answers as in ``create``.

        Raises:
            ChangedError: it is another one by now, or is gone.
            OSError: the store gave no answer in time, or refuses. Which one is there is not known then.
        """
        mode = {name: value for name, value in vars(version).items() if value is not None}
        if not mode:
            raise OSError(errno.EINVAL, "the store names no version of it (ETag)", f"{self.url}/{key}")

        def request() -> Version:
            return Version.of(_obstore().put(self._store, key, data, mode=mode, use_multipart=False))

        try:
            return self._again(request, key, "replace")
        except (ChangedError, FileNotFoundError) as error:
            try:
                found, now = self.read(key)
            except FileNotFoundError:
                raise ChangedError(errno.ESTALE, "it is gone", f"{self.url}/{key}") from None
            if found != data:
                raise ChangedError(errno.ESTALE, "it was replaced meanwhile", f"{self.url}/{key}") from error
            return now

    def overwrite(self, key: str, data: bytes) -> Version:
        """Put an object, whatever is there.

        Raises:
            OSError: the store gave no answer in time, or refuses.
        """
        return self._again(
            lambda: Version.of(_obstore().put(self._store, key, data, use_multipart=False)), key, "write"
        )

    def upload(self, key: str, size_bytes: int, pieces: Callable[[], Iterator[Any]]) -> None:
        """Put an object of any size from its pieces, in parts of which several are under way at a time.

        Args:
            key: used once, so that it does not matter how often this is tried.
            size_bytes: about how many bytes there will be.
            pieces: returns them from the first on, each time it is called. What it raises ends the upload.

        Raises:
            OSError: the store gave no answer in time, or refuses.
        """
        part = self.options.part_bytes
        part = max(part, -(-size_bytes // _MOST_PARTS // (1 << 20)) * (1 << 20))

        def request() -> object:
            failures: list[BaseException] = []
            guarded = _guarded(pieces(), failures)
            try:
                if size_bytes < part:
                    return _obstore().put(self._patient_store, key, b"".join(guarded), use_multipart=False)
                return _obstore().put(
                    self._patient_store,
                    key,
                    guarded,
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=self.options.parts_in_flight,
                )
            except BaseException:
                if failures:
                    raise _Ours(failures[0]) from None
                raise

        for attempts in range(_UPLOADS, 0, -1):
            try:
                self._again(request, key, "upload")
                return
            except _Ours as ours:
                raise ours.failure from None
            except OSError as error:
                # Where the answer to the last request of an upload was lost, the second one finds no such upload, although the
                # object may be there. Begin anew: the key is used once.
                if error.errno not in (errno.ENOENT, errno.EINVAL, errno.EEXIST) or attempts == 1:
                    raise
            self._pause(_FIRST_PAUSE_S)

    def copy(self, source: str, key: str, size_bytes: int) -> None:
        """Copy an object within the bucket. The store does it.

        Args:
            source: which one.
            key: used once.
            size_bytes: of the object.

        Raises:
            FileNotFoundError: there is no such object.
            OSError: the store gave no answer in time, or refuses, such as for the size; or the object has another size.
        """
        self._again(lambda: _obstore().copy(self._store, source, key), key, "copy")
        # Azure may answer before it has copied; the object has another size until then.
        deadline = time.monotonic() + (self.options.give_up_after_s if self.scheme == "az" else 0.0)
        while (found := self.size_of(key)) != size_bytes:
            if time.monotonic() > deadline:
                message = f"its copy has {found} bytes instead of {size_bytes}"
                raise OSError(errno.EINVAL, message, f"{self.url}/{source}")
            self._pause(_FIRST_PAUSE_S)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there do not matter.

        Raises:
            OSError: the store gave no answer in time, or refuses.
        """

        def request(some: Sequence[str]) -> None:
            try:
                _obstore().delete(self._store, list(some))
            except FileNotFoundError:  # some stores say so; then one by one
                for key in some:
                    with contextlib.suppress(FileNotFoundError):
                        _obstore().delete(self._store, key)

        def answered(some: Sequence[str]) -> None:
            try:
                request(some)
            except _obstore().exceptions.BaseError as error:
                if (
                    self.scheme != "s3"
                    or _SINGLY in self.options.options
                    or is_expired(error)
                    or not is_not_offered(error)
                ):
                    raise
                # Google's answer to S3's requests, and others, know none that deletes several objects.
                self.options = dataclasses.replace(self.options, options=(*self.options.options, _SINGLY))
                self._store = self._connect(0)
                request(some)

        for at in range(0, len(keys), 1000):
            some = keys[at : at + 1000]
            self._again(functools.partial(answered, some), some[0], "delete")

    def entries(self, prefix: str) -> list[ObjectEntry]:
        """All objects below ``prefix``, which ends where a name between two slashes does.

        Raises:
            OSError: the store gave no answer in time, or refuses.
        """

        def request() -> list[ObjectEntry]:
            pages: Iterable[Any] = _obstore().list(self._store, prefix or None, chunk_size=1000)
            return [ObjectEntry(key=one["path"], size_bytes=one["size"]) for page in pages for one in page]

        return self._again(request, prefix, "list")

    def list_folders(self, prefix: str) -> list[str]:
        """The names right below ``prefix`` that have objects below them.

        Raises:
            OSError: the store gave no answer in time, or refuses.
        """

        def request() -> list[str]:
            found = _obstore().list_with_delimiter(self._store, prefix or None)
            return [folder.rstrip("/").rpartition("/")[2] for folder in found["common_prefixes"]]

        return self._again(request, prefix, "list")

    def _again(self, request: Callable[[], _Result], key: str, verb: str) -> _Result:
        """Do ``request``, and again after a pause as long as it gets no answer or one that says to come back later."""
        _refuse_fork(verb)
        deadline = time.monotonic() + self.options.give_up_after_s
        pause_s, refreshed, level = _FIRST_PAUSE_S, False, logging.WARNING
        while True:
            try:
                return request()
            except _Ours:
                raise
            except FileNotFoundError as error:
                why = "there is no such bucket" if is_bucket_missing(error) else "is not there"
                raise FileNotFoundError(errno.ENOENT, why, f"{self.url}/{key}") from None
            except (OSError, ValueError, _obstore().exceptions.BaseError) as error:
                failure = store_error(error, f"{self.url}/{key}", verb, self._secrets)
                if is_expired(error) and not refreshed:  # S3 answers 400 or 403
                    refreshed = True
                    self._store, self._patient_store = self._connect(0), self._connect(_RETRIES)  # with new credentials
                    continue
                if not isinstance(failure, TimeoutError) or time.monotonic() + pause_s > deadline:
                    raise failure from None
                self.unanswered += 1
                logger.log(level, "%s: once more in %.1f s", failure, pause_s)
                level = logging.DEBUG
            except BaseException as error:
                if not is_panic(error):
                    raise
                raise store_error(error, f"{self.url}/{key}", verb, self._secrets) from None
            self._pause(pause_s)
            pause_s = min(2 * pause_s, self._longest_pause_s)

    def _pause(self, seconds: float) -> None:
        if self.stop is not None:
            self.stop()
        time.sleep(seconds * random.uniform(0.5, 1.0))  # noqa: S311 - so that the ranks do not come all at once

    def _connect(self, retries: int) -> Any:
        return connect(self.scheme, self.name, self.options, retries)


def _refuse_fork(verb: str) -> None:
    """A child that was forked has none of the client's threads: its requests would never be answered."""
    if not _used_by:
        _used_by.append(os.getpid())
    elif _used_by[0] != os.getpid():
        raise ForkedError(what=f"{verb} in an object store", pid=_used_by[0])


class _Ours(Exception):
    """The pieces of an upload could not be made: what the caller raised, on its way through obstore."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__(str(failure))
        self.failure = failure


def _guarded(pieces: Iterator[Any], failures: list[BaseException]) -> Iterator[Any]:
    """The same pieces. What making them raises is remembered: obstore raises another error for it."""
    try:
        yield from pieces
    except GeneratorExit:  # it is not read to its end, such as after an error of the store
        raise
    except BaseException as error:
        failures.append(error)
        raise


def _obstore() -> Any:
    import obstore
    import obstore.exceptions

    return obstore
