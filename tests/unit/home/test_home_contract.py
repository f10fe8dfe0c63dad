"""Both homes keep the contract of ``Home``, also in a store that loses answers."""

import itertools

import pytest

from kit.memory_store import MemoryStore, no_answer
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.file_lock import take_away
from safe_ckpt.core.home.objects import lock as object_lock
from safe_ckpt.core.home.objects.home import ObjectHome
from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.testing.contracts import HomeContract


class TestFileHome(HomeContract):
    """In a file system."""

    @pytest.fixture
    def place(self, tmp_path):
        return tmp_path / "run"

    def new_home(self):
        return FileHome(self.at, lease_s=60)

    def take_away(self, home):
        take_away(home.hidden, lambda _: True)


class TestObjectHome(HomeContract):
    """In an object store."""

    @pytest.fixture
    def place(self, monkeypatch):
        pytest.importorskip("obstore")
        return open_place(MemoryStore(monkeypatch).url(), StorageOptions(give_up_after_s=5, request_timeout_s=2))

    def new_home(self):
        return ObjectHome(self.at, lease_s=60)

    def take_away(self, home):
        object_lock.take_directory_away(self.at, unfenced=False)


class TestObjectHomeOfAStoreThatLosesAnswers(TestObjectHome):
    """Each seventh request is done, and its answer is lost: it is asked again."""

    @pytest.fixture
    def place(self, monkeypatch):
        pytest.importorskip("obstore")
        store, numbers = MemoryStore(monkeypatch), itertools.count(1)

        def lost(*_):
            if next(numbers) % 7 == 0:
                no_answer()

        monkeypatch.setattr(Bucket, "_pause", lambda *_: None)
        store.after = lost
        return open_place(store.url(), StorageOptions(give_up_after_s=5, request_timeout_s=2))
