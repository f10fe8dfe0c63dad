"""Credentials that run out, or change, while a job goes on: whatever is asked for next is asked for with the new ones."""

import obstore
import pytest

from kit.memory_store import MemoryStore
from safe_ckpt.core.storage.objects import bucket as buckets
from safe_ckpt.core.storage.objects.bucket import Bucket, Version
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place

PART_BYTES = 5 << 20
OPTIONS = StorageOptions(part_bytes=PART_BYTES, give_up_after_s=5)
SMALL, LARGE = b"x" * 10, b"y" * (PART_BYTES + 1)
REQUESTS = {
    "read": lambda one, _: one.read("a")[0] == SMALL,
    "read_range": lambda one, _: bytes(one.read_range("a", 1, 3)) == SMALL[1:4],
    "size_of": lambda one, _: one.size_of("a") == len(SMALL),
    "create": lambda one, _: one.create("new", SMALL),
    "replace": lambda one, seen: one.replace("a", SMALL, seen),
    "overwrite": lambda one, _: one.overwrite("a", SMALL),
    "upload": lambda one, _: one.upload("new", len(SMALL), lambda: iter([SMALL])) is None,
    "upload in parts": lambda one, _: one.upload("new", len(LARGE), lambda: iter([LARGE])) is None,
    "copy": lambda one, _: one.copy("a", "new", len(SMALL)) is None,
    "delete": lambda one, _: one.delete(["a"]) is None,
    "entries": lambda one, _: [found.key for found in one.entries("")] == ["a"],
    "list_folders": lambda one, _: one.list_folders("") == [],
}
ANSWERS = (
    obstore.exceptions.PermissionDeniedError("Client error with status 403: <Code>ExpiredToken</Code>"),
    obstore.exceptions.GenericError("Server returned status code: 400: <Code>TokenRefreshRequired</Code>"),
    obstore.exceptions.PermissionDeniedError("HEAD http://bucket/a status code: 403"),
)


class Client:
    """A connection, which has the credentials of when it was made."""

    def __init__(self, store, made):
        self.store, self.made = store, made


class Expiring(MemoryStore):
    """Refuses what comes over connections that were made before ``now``.

    Attributes:
        answer: with this.
        refused: how often.
        renews: whether what is connected anew has credentials of ``now``.
    """

    def __init__(self, patch):
        super().__init__(patch)
        self.now, self.answer, self.refused, self.renews = 0, ANSWERS[0], 0, True
        self.write("a", SMALL)
        patch.setattr(buckets, "connect", lambda *_: Client(self.kept, self.now if self.renews else 0))

    def version(self):
        """Of the object that is there."""
        return Version(e_tag=obstore.head(self.kept, "a")["e_tag"], version=None)

    def __getattr__(self, name):
        real = super().__getattr__(name)

        def request(client, *args, **more):
            if client.made < self.now:
                self.refused += 1
                raise self.answer
            return real(client.store, *args, **more)

        return request


@pytest.fixture
def expiring(monkeypatch):
    return Expiring(monkeypatch)


@pytest.mark.parametrize("which", ["itself", "within", "afresh"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_whose_credentials_expired_is_made_with_new_ones(expiring, name, which):
    """Each kind of request, as often as they expire: also with another deadline, and over other connections."""
    one = Bucket("s3", "bucket", OPTIONS)
    bucket = {"itself": one, "within": one.within(3), "afresh": one.afresh()}[which]
    for expiry, answer in enumerate(ANSWERS, start=1):
        obstore.delete(expiring.kept, "new")
        expiring.write("a", SMALL)
        expiring.now, expiring.answer, expiring.refused = expiry, answer, 0
        assert REQUESTS[name](bucket, expiring.version())
        assert expiring.refused == 1


@pytest.mark.parametrize("name", REQUESTS)
def test_new_credentials_that_are_refused_as_well_are_an_error(expiring, name):
    """Once more, and not for ever: it says that the store refuses."""
    bucket = Bucket("s3", "bucket", OPTIONS)
    expiring.now, expiring.renews = 1, False
    with pytest.raises(PermissionError, match="refuses"):
        REQUESTS[name](bucket, expiring.version())
    assert expiring.refused == 2


VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BASE_URL"),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
}


@pytest.mark.parametrize(("scheme", "name"), [(scheme, name) for scheme, names in VARIABLES.items() for name in names])
def test_a_place_that_is_opened_after_its_variables_changed_has_the_new_ones(expiring, monkeypatch, scheme, name):
    """Set, changed and taken away again; one that is opened with the same ones has the same connections."""
    before = None
    for value in ("http://one", "http://two", None):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
        now = open_place(f"{scheme}://credentials/run", OPTIONS).bucket
        assert now is open_place(f"{scheme}://credentials/other", OPTIONS).bucket
        assert now is not before
        before = now
