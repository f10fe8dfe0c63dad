"""The contracts of ``Home``, with its ``Sink``, and of ``Extension``: an implementation derives a class and runs all of it."""

import contextlib
import json

import pytest
import torch
import xxhash

from safe_ckpt import CheckpointConfig, Checkpointer, checkpointer
from safe_ckpt.config import Timeouts
from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.formats.manifest import FileEntry, Manifest, read_manifest
from safe_ckpt.core.home.home import NewCheckpoint
from safe_ckpt.core.staging.progress import write_mark
from safe_ckpt.core.storage.direct_io import PAGE, Unwatched, WriteOptions
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.writer.sink import WriteJob, write_job
from safe_ckpt.errors import DirectoryInUseError, SafeCheckpointError

TIMEOUTS = Timeouts(barrier_s=1.0)  # that is how long a file is awaited that another rank reports
DATA = bytes(range(256)) * 5000


def options():
    storage = StorageOptions(give_up_after_s=5, request_timeout_s=2)
    return WriteOptions(direct=False, chunk_bytes=1 << 20, flush_every_bytes=1 << 26, storage=storage)


def written(folder, names, data=DATA):
    """Write these files below a publication's folder, through its sink. Returns the results."""
    tasks = tuple(WriteTask(path=f"{folder}/{name}", offset=PAGE, length=len(data)) for name in names)
    job = WriteJob(name="contract", rank=0, folder=str(folder), files=tasks)
    return write_job(job, options(), Unwatched(), contents=None, memory=_filled(data))


def _filled(data):
    """The memory of a snapshot: a page with how much is there, then the bytes."""
    memory = bytearray(PAGE + len(data))
    memory[PAGE:] = data
    write_mark(memory, PAGE + len(data))
    return memoryview(memory)


class HomeContract:
    """What every home promises, whatever storage it lies in.

    A subclass has ``new_home``, which returns a home of one directory, each time another object; nothing is in it at first.
    """

    def new_home(self):
        raise NotImplementedError

    @pytest.fixture
    def home(self, place):
        """One that is held. ``place`` is a fixture of the subclass; what it returns is given to ``new_home``."""
        self.at = place
        one = self.new_home()
        one.open()
        yield one
        one.close()

    def begun(self, home, step):
        manifest = Manifest(name=f"step-{step}", sequence=home.next_sequence(), step=step, world_size=1)
        return home.begin(NewCheckpoint(path=home.path / manifest.name, manifest=manifest), TIMEOUTS)

    def saved(self, home, step, names=("a.bin", "b.bin")):
        """Save one checkpoint. Returns what was committed."""
        publication = self.begun(home, step)
        publication.prepare()
        publication.await_folder(0, lambda: 5.0)
        results = written(publication.folder, names)
        info = publication.commit(self.entries(publication, results), {}, lambda: None)
        publication.clean_up()
        return info

    def entries(self, publication, results):
        folder = f"{publication.folder}/"
        return tuple(
            FileEntry(path=one.path.removeprefix(folder), size_bytes=one.size_bytes, xxh3_128=one.xxh3_128, rank=0)
            for one in results
        )

    def steps(self, home):
        return sorted(one.manifest.step for one in home.look() if one.manifest is not None)

    def test_what_is_committed_is_there_with_its_files(self, home):
        """Its manifest names each file with its size and its digest, and it is found by the next one who looks."""
        info = self.saved(home, 1)
        (found,) = home.look()
        assert found.info.op_id == info.op_id
        digest = xxhash.xxh3_128_hexdigest(DATA)
        facts = {(one.path, one.size_bytes, one.xxh3_128) for one in found.manifest.files}
        assert facts == {(name, len(DATA), digest) for name in ("a.bin", "b.bin")}
        assert info.size_bytes == 2 * len(DATA)

    def test_what_is_not_committed_is_not_there(self, home):
        """Neither while it is written, nor when it was given up."""
        publication = self.begun(home, 1)
        publication.prepare()
        written(publication.folder, ["a.bin"])
        assert home.look() == []
        publication.abort()
        assert home.look() == []
        assert self.saved(home, 2).step == 2

    def test_what_a_killed_job_left_is_swept_by_the_next(self, home):
        """A publication that nobody ended is no checkpoint for the next holder either, who can save under its name."""
        publication = self.begun(home, 1)
        publication.prepare()
        written(publication.folder, ["a.bin"])
        home.close()
        again = self.new_home()
        again.open()
        assert again.look() == []
        self.saved(again, 1)
        assert self.steps(again) == [1]
        again.close()
        home.open()

    def test_a_file_of_another_size_is_not_committed(self, home):
        """What is there must be what was reported."""
        publication = self.begun(home, 1)
        publication.prepare()
        (result,) = written(publication.folder, ["a.bin"])
        (entry,) = self.entries(publication, [result])
        wrong = FileEntry(path=entry.path, size_bytes=entry.size_bytes + 1, xxh3_128=entry.xxh3_128, rank=0)
        with pytest.raises((SafeCheckpointError, OSError)):
            publication.commit((wrong,), {}, lambda: None)
        publication.abort()
        assert home.look() == []

    def test_one_holds_it_at_a_time(self, home):
        """A second one is refused while it is held, and may hold it afterwards."""
        other = self.new_home()
        with pytest.raises(DirectoryInUseError):
            other.open(0.0)
        home.close()
        other.open()
        with pytest.raises(DirectoryInUseError):
            home.open(0.0)
        other.close()
        home.open()

    def test_the_order_of_commits_goes_on(self, home):
        """Each place in the order is behind the one before, and behind what it was told to start after."""
        first, second = home.next_sequence(), home.next_sequence()
        assert second > first
        home.start_after(second + 1000)
        assert home.next_sequence() > second + 1000

    def test_what_is_discarded_is_gone_and_nothing_else(self, home):
        """It says what is gone; what was not there is no error."""
        infos = [self.saved(home, step) for step in (1, 2, 3)]
        assert list(home.discard([infos[0].path, infos[1].path])) == [infos[0].path, infos[1].path]
        assert self.steps(home) == [3]
        home.discard([infos[0].path])
        assert self.steps(home) == [3]

    def test_what_is_quarantined_is_kept_elsewhere(self, home):
        """It is no checkpoint any more, and is not deleted."""
        infos = [self.saved(home, step) for step in (1, 2)]
        home.quarantine(infos[1].path)
        assert self.steps(home) == [1]
        assert len(home.quarantined()) == 1

    def test_a_name_is_saved_again(self, home):
        """The second save of a name is the one that counts."""
        self.saved(home, 1)
        info = self.saved(home, 1)
        newest = max((one for one in home.look() if one.manifest is not None), key=lambda one: one.manifest.sequence)
        assert newest.manifest.op_id == info.op_id

    def test_who_lost_it_neither_commits_nor_deletes(self, home):
        """Another job has taken it over: from then on nothing that the first one does changes anything."""
        info = self.saved(home, 1)
        publication = self.begun(home, 2)
        publication.prepare()
        results = written(publication.folder, ["a.bin"])
        self.take_away(home)
        other = self.new_home()
        other.open(0.0)
        with pytest.raises((SafeCheckpointError, OSError)):
            publication.commit(self.entries(publication, results), {}, lambda: None)
        with contextlib.suppress(DirectoryInUseError):
            assert not home.discard([info.path])
        assert self.steps(other) == [1]
        assert [one.path for one in other.look()] == [info.path]
        other.close()

    def take_away(self, home):
        """Break the lock, as ``safe-ckpt unlock`` does."""
        raise NotImplementedError


class ExtensionContract:
    """What every extension promises to the saves that it stands beside.

    A subclass has ``new_extension``, and ``config`` if it needs settings.
    """

    config = CheckpointConfig()

    def new_extension(self):
        raise NotImplementedError

    def run(self, folder, monkeypatch, *extensions):
        """Save twice and resume beside these. Returns the digests of the files that are there, and the weights."""
        monkeypatch.setattr(checkpointer, "assemble", lambda _: list(extensions))
        torch.manual_seed(0)
        state = {"model": torch.nn.Linear(600, 600)}
        with Checkpointer(folder, self.config) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state).result(timeout_s=60)
        fresh = {"model": torch.nn.Linear(600, 600)}
        with Checkpointer(folder, self.config) as ckpt:
            assert ckpt.resume(fresh).step == 2
        files = [(one.path, one.xxh3_128) for one in read_manifest(folder / "step-00000002").files]
        return files, fresh["model"].weight.tolist()

    def test_a_save_beside_it_is_as_one_alone(self, tmp_path, monkeypatch):
        """The same files with the same bytes, and the same resume."""
        alone = self.run(tmp_path / "alone", monkeypatch)
        assert self.run(tmp_path / "beside", monkeypatch, self.new_extension()) == alone

    def test_what_all_ranks_learn_from_it_is_json(self, tmp_path, monkeypatch):
        """Rank 0 sends it with the verdict."""
        extension, concluded = self.new_extension(), []
        real = extension.concluding
        extension.concluding = lambda *given: concluded.append(real(*given)) or concluded[-1]
        self.run(tmp_path, monkeypatch, extension)
        assert len(concluded) == 2
        for one in concluded:
            json.dumps({"fields": dict(one.fields), "summary": one.summary})


__all__ = ["DATA", "ExtensionContract", "HomeContract", "written"]
