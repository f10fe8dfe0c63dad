"""What is read from a file system, from an object store, and from one that loses answers: the contract is the same."""

import itertools

import obstore
import pytest

from kit.memory_store import MemoryStore, no_answer
from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.testing.contracts import SourceContract


class TestFiles(SourceContract):
    """In a file system."""

    @pytest.fixture
    def run(self, tmp_path):
        return tmp_path / "run"

    def put(self, place, data):
        place.unlink()
        if data is not None:
            place.write_bytes(data)


class TestObjects(SourceContract):
    """In an object store."""

    @pytest.fixture
    def run(self, monkeypatch):
        self.store = MemoryStore(monkeypatch)
        return self.store.url()

    def put(self, place, data):
        if data is None:
            obstore.delete(self.store.kept, place.key)
        else:
            self.store.write(place.key, data)


class TestObjectsOfAStoreThatLosesAnswers(TestObjects):
    """Each fifth request is done, and its answer is lost: it is asked again."""

    @pytest.fixture
    def run(self, monkeypatch):
        self.store, numbers = MemoryStore(monkeypatch), itertools.count(1)

        def lost(*_):
            if next(numbers) % 5 == 0:
                no_answer()

        monkeypatch.setattr(Bucket, "_pause", lambda *_: None)
        self.store.after = lost
        return self.store.url()
