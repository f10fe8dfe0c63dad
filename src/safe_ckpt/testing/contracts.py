"""The contracts of a ``Home`` with its ``Sink``, of the places that are read from, of an ``Extension`` and of an adapter.

A class of tests derives from one and says how to make what is tested; pytest runs all of it. Nothing else imports this
module: it needs pytest.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import xxhash

from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, checkpointer
from safe_ckpt.config import Timeouts
from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import verify_entry, verify_files
from safe_ckpt.core.home.home import Home, NewCheckpoint, Publication
from safe_ckpt.core.saving.extension import Conclusion, Extension
from safe_ckpt.core.staging.progress import write_mark
from safe_ckpt.core.storage.direct_io import PAGE, Unwatched, WriteOptions
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.reader import digest_of, read_whole
from safe_ckpt.core.storage.source import file_in, size_of, sizes_in
from safe_ckpt.core.writer.sink import WriteJob, write_job
from safe_ckpt.errors import CorruptCheckpointError, DirectoryInUseError, IncompleteCheckpointError, SafeCheckpointError

TIMEOUTS = Timeouts(barrier_s=1.0)  # that is how long a file is awaited that another rank reports
DATA = bytes(range(256)) * 5000


_OPTIONS = WriteOptions(
    direct=False,
    chunk_bytes=1 << 20,
    flush_every_bytes=1 << 26,
    storage=StorageOptions(give_up_after_s=5, request_timeout_s=2),
)


def _written(folder: Place | str, names: Iterable[str], data: bytes = DATA) -> Sequence[WrittenFile]:
    """Write these files below a publication's folder, through its sink. Returns the results."""
    tasks = tuple(WriteTask(path=f"{folder}/{name}", offset=PAGE, length=len(data)) for name in names)
    job = WriteJob(name="contract", rank=0, folder=str(folder), files=tasks)
    return write_job(job, _OPTIONS, Unwatched(), contents=None, memory=_filled(data))


def _filled(data: bytes) -> memoryview:
    """The memory of a snapshot: a page with how much is there, then the bytes."""
    memory = mmap.mmap(-1, PAGE + len(data))
    memory[PAGE:] = data
    write_mark(memory, PAGE + len(data))
    return memoryview(memory)


class HomeContract:
    """The promises of every home, whatever storage it lies in.

    A subclass has ``new_home``, which returns a home of one directory, each time another object; nothing is in it at first.
    It has ``take_away``, and the fixture ``place``.

    Example:
        ```python
        class TestMyHome(HomeContract):
            @pytest.fixture
            def place(self, tmp_path):
                return tmp_path / "run"

            def new_home(self):
                return FileHome(self.at, lease_s=60)
        ```
    """

    def new_home(self) -> Home:
        """Another object of the same directory, not open."""
        raise NotImplementedError

    @pytest.fixture
    def home(self, place: Any) -> Iterator[Home]:
        """One that is held. ``place`` is a fixture of the subclass; what it returns is given to ``new_home``."""
        self.at: Any = place
        one = self.new_home()
        one.open()
        yield one
        one.close()

    def begun(self, home: Home, step: int) -> Publication:
        """A save that has begun."""
        manifest = Manifest(name=f"step-{step}", sequence=home.next_sequence(), step=step, world_size=1)
        return home.begin(NewCheckpoint(path=home.path / manifest.name, manifest=manifest), TIMEOUTS)

    def saved(self, home: Home, step: int, names: Sequence[str] = ("a.bin", "b.bin")) -> CheckpointInfo:
        """Save one checkpoint. Returns what was committed."""
        publication = self.begun(home, step)
        publication.prepare()
        publication.await_folder(0, lambda: 5.0)
        results = _written(publication.folder, names)
        info = publication.commit(self.entries(publication, results), {}, lambda: None)
        publication.clean_up()
        return info

    def entries(self, publication: Publication, results: Iterable[WrittenFile]) -> tuple[FileEntry, ...]:
        """The entries that report these files."""
        folder = f"{publication.folder}/"
        return tuple(
            FileEntry(path=one.path.removeprefix(folder), size_bytes=one.size_bytes, xxh3_128=one.xxh3_128, rank=0)
            for one in results
        )

    def steps(self, home: Home) -> list[int]:
        """Of all checkpoints."""
        return sorted(one.manifest.step for one in home.look() if one.manifest is not None)

    def test_what_is_committed_is_there_with_its_files(self, home: Home) -> None:
        """Its manifest names each file with its size and its digest, and it is found by the next one who looks."""
        info = self.saved(home, 1)
        (found,) = home.look()
        assert found.info is not None
        assert found.manifest is not None
        assert found.info.op_id == info.op_id
        digest = xxhash.xxh3_128_hexdigest(DATA)
        facts = {(one.path, one.size_bytes, one.xxh3_128) for one in found.manifest.files}
        assert facts == {(name, len(DATA), digest) for name in ("a.bin", "b.bin")}
        assert info.size_bytes == 2 * len(DATA)

    def test_what_is_not_committed_is_not_there(self, home: Home) -> None:
        """Neither while it is written, nor when it was given up."""
        publication = self.begun(home, 1)
        publication.prepare()
        _written(publication.folder, ["a.bin"])
        assert home.look() == []
        publication.abort()
        assert home.look() == []
        assert self.saved(home, 2).step == 2

    def test_what_a_killed_job_left_is_swept_by_the_next(self, home: Home) -> None:
        """A publication that nobody ended is no checkpoint for the next holder either, who can save under its name."""
        publication = self.begun(home, 1)
        publication.prepare()
        _written(publication.folder, ["a.bin"])
        home.close()
        again = self.new_home()
        again.open()
        assert again.look() == []
        self.saved(again, 1)
        assert self.steps(again) == [1]
        again.close()
        home.open()

    def test_a_file_of_another_size_is_not_committed(self, home: Home) -> None:
        """That which is there must be what was reported."""
        publication = self.begun(home, 1)
        publication.prepare()
        (result,) = _written(publication.folder, ["a.bin"])
        (entry,) = self.entries(publication, [result])
        wrong = FileEntry(path=entry.path, size_bytes=entry.size_bytes + 1, xxh3_128=entry.xxh3_128, rank=0)
        with pytest.raises((SafeCheckpointError, OSError)):
            publication.commit((wrong,), {}, lambda: None)
        publication.abort()
        assert home.look() == []

    def test_one_holds_it_at_a_time(self, home: Home) -> None:
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

    def test_the_order_of_commits_goes_on(self, home: Home) -> None:
        """Each place in the order is behind the one before, and behind what it was told to start after."""
        first, second = home.next_sequence(), home.next_sequence()
        assert second > first
        home.start_after(second + 1000)
        assert home.next_sequence() > second + 1000

    def test_what_is_discarded_is_gone_and_nothing_else(self, home: Home) -> None:
        """It says what is gone; what was not there is no error."""
        infos = [self.saved(home, step) for step in (1, 2, 3)]
        assert list(home.discard([infos[0].path, infos[1].path])) == [infos[0].path, infos[1].path]
        assert self.steps(home) == [3]
        home.discard([infos[0].path])
        assert self.steps(home) == [3]

    def test_what_is_quarantined_is_kept_elsewhere(self, home: Home) -> None:
        """It is no checkpoint any more, and is not deleted."""
        infos = [self.saved(home, step) for step in (1, 2)]
        home.quarantine(infos[1].path)
        assert self.steps(home) == [1]
        assert len(home.quarantined()) == 1

    def test_a_name_is_saved_again(self, home: Home) -> None:
        """The second save of a name is the one that counts."""
        self.saved(home, 1)
        info = self.saved(home, 1)
        newest = max((one.manifest for one in home.look() if one.manifest is not None), key=lambda one: one.sequence)
        assert newest.op_id == info.op_id

    def test_who_lost_it_neither_commits_nor_deletes(self, home: Home) -> None:
        """Another job has taken it over: from then on nothing that the first one does changes anything."""
        info = self.saved(home, 1)
        publication = self.begun(home, 2)
        publication.prepare()
        results = _written(publication.folder, ["a.bin"])
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

    def take_away(self, home: Home) -> None:
        """Break the lock, as ``safe-ckpt unlock`` does."""
        raise NotImplementedError


class SourceContract:
    """The promises of reading: of the files of a checkpoint, whatever storage they lie in.

    A subclass has the fixture ``run``: where a ``Checkpointer`` saves; and ``put``, which changes a file behind our back.

    Example:
        ```python
        class TestMyFiles(SourceContract):
            @pytest.fixture
            def run(self, tmp_path):
                return tmp_path / "run"

            def put(self, place, data):
                place.unlink() if data is None else place.write_bytes(data)
        ```
    """

    def put(self, place: Place, data: bytes | None) -> None:
        """Write a file there, or with None delete it."""
        raise NotImplementedError

    @pytest.fixture
    def folder(self, run: Path | str) -> Place:
        """The place of a checkpoint, with a file in a folder of its own."""
        with Checkpointer(run, CheckpointConfig(record_events=False)) as ckpt:
            state = {"w": torch.arange(30_000.0, device="cpu"), "own": PerRank({"n": 1})}
            return ckpt.save(1, state).result(timeout_s=60).path

    def entries(self, folder: Place) -> dict[str, FileEntry]:
        """Of its manifest, by path."""
        return {entry.path: entry for entry in read_manifest(folder).files}

    def test_each_file_has_the_size_and_the_bytes_that_the_manifest_says(self, folder: Place) -> None:
        """Whole, hashed on the way, and file by file."""
        entries = self.entries(folder)
        assert len(entries) == 2
        assert sizes_in(folder, entries) == {path: entry.size_bytes for path, entry in entries.items()}
        for path, entry in entries.items():
            file = file_in(folder, path)
            assert size_of(file) == entry.size_bytes
            memory, digest = read_whole(file, entry.size_bytes)
            assert digest == digest_of(file, entry.size_bytes) == entry.xxh3_128
            assert xxhash.xxh3_128_hexdigest(memory[: entry.size_bytes]) == digest
            verify_entry(folder, entry)

    def test_other_bytes_of_the_same_length_are_damage(self, folder: Place) -> None:
        """It names the file, and the other one is in order."""
        one, other = self.entries(folder).values()
        memory, _ = read_whole(file_in(folder, one.path), one.size_bytes)
        self.put(folder / one.path, bytes([memory[0] ^ 1]) + bytes(memory[1 : one.size_bytes]))
        with pytest.raises(CorruptCheckpointError) as caught:
            verify_entry(folder, one)
        assert caught.value.file == one.path
        assert not isinstance(caught.value, IncompleteCheckpointError)
        verify_entry(folder, other)

    def test_a_file_that_is_shorter_is_damage(self, folder: Place) -> None:
        """Whoever reads the length that it should have gets no bytes of another file behind it."""
        entry = next(iter(self.entries(folder).values()))
        memory, _ = read_whole(file_in(folder, entry.path), entry.size_bytes)
        self.put(folder / entry.path, bytes(memory[: entry.size_bytes - 1]))
        assert sizes_in(folder, [entry.path]) == {entry.path: entry.size_bytes - 1}
        with pytest.raises(CorruptCheckpointError):
            verify_entry(folder, entry)

    def test_a_file_that_is_not_there_is_missing_and_not_damaged(self, folder: Place) -> None:
        """It has no size; to read it says which one it is."""
        entry = next(iter(self.entries(folder).values()))
        self.put(folder / entry.path, None)
        assert sizes_in(folder, [entry.path]) == {}
        with pytest.raises(FileNotFoundError):
            size_of(folder / entry.path)
        with pytest.raises(IncompleteCheckpointError) as caught:
            verify_entry(folder, entry)
        assert caught.value.file == entry.path

    def test_a_manifest_that_is_no_manifest_is_damage(self, folder: Place) -> None:
        """Of the length that it had."""
        self.put(folder / MANIFEST_NAME, b"{" * 300)
        with pytest.raises(CorruptCheckpointError):
            read_manifest(folder)

    def test_a_checkpoint_whose_manifest_is_gone_is_incomplete(self, folder: Place) -> None:
        """That is no damage either."""
        self.put(folder / MANIFEST_NAME, None)
        with pytest.raises(IncompleteCheckpointError):
            read_manifest(folder)


class ExtensionContract:
    """The promises of every extension to the saves that it stands beside.

    A subclass has ``new_extension``, and ``config`` if it needs settings.

    Example:
        ```python
        class TestMine(ExtensionContract):
            def new_extension(self):
                return RecordExtension()
        ```
    """

    config = CheckpointConfig()

    def new_extension(self) -> Extension:
        """The one that is tested, in its first state."""
        raise NotImplementedError

    def run(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *extensions: Extension
    ) -> tuple[list[tuple[str, str]], Any]:
        """Save twice and resume beside these. Returns the digests of the files that are there, and the weights."""
        monkeypatch.setattr(checkpointer, "assemble", lambda _: list(extensions))
        torch.manual_seed(0)
        state = {"model": torch.nn.Linear(600, 600)}
        with Checkpointer(folder, self.config) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state).result(timeout_s=60)
        fresh = {"model": torch.nn.Linear(600, 600)}
        with Checkpointer(folder, self.config) as ckpt:
            info = ckpt.resume(fresh)
            assert info is not None
            assert info.step == 2
        files = [(one.path, one.xxh3_128) for one in read_manifest(folder / "step-00000002").files]
        return files, fresh["model"].weight.tolist()

    def test_a_save_beside_it_is_as_one_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same files with the same bytes, and the same resume."""
        alone = self.run(tmp_path / "alone", monkeypatch)
        assert self.run(tmp_path / "beside", monkeypatch, self.new_extension()) == alone

    def test_what_all_ranks_learn_from_it_is_json(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rank 0 sends it with the verdict."""
        extension, concluded = self.new_extension(), list[Conclusion]()
        real = extension.concluding

        def concluding(*given: Any) -> Conclusion:
            concluded.append(real(*given))
            return concluded[-1]

        monkeypatch.setattr(extension, "concluding", concluding)
        self.run(tmp_path, monkeypatch, extension)
        assert len(concluded) == 2
        for one in concluded:
            json.dumps({"fields": dict(one.fields), "summary": one.summary})


class Training(Protocol):
    """A program of a framework, with an adapter on it, as ``AdapterContract`` drives it.

    Example:
        ```python
        class MyTraining:
            def __init__(self, folder):
                self.trainer = Trainer(folder)

            def train(self):
                self.trainer.step()
        ```
    """

    def train(self) -> None:
        """Make one optimizer step."""

    def save(self) -> None:
        """Save by way of the adapter. The state changes as soon as this returns."""

    def resume(self) -> bool:
        """Go on from the newest valid checkpoint. Returns whether there was one."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights as they are now."""

    def close(self) -> None:
        """Finish what is in flight, and end."""


class AdapterContract:
    """The promises of every adapter to the programs of its framework.

    A subclass has ``start``, which returns a fresh program that saves below a folder, with the same seed each time. Each
    checkpoint of it must have a manifest.

    Example:
        ```python
        class TestMyAdapter(AdapterContract):
            def start(self, folder):
                return MyTraining(folder)
        ```
    """

    def start(self, folder: Path) -> Training:
        """Return a fresh program."""
        raise NotImplementedError

    @contextlib.contextmanager
    def started(self, folder: Path) -> Iterator[Training]:
        """A program that is closed at the end."""
        program = self.start(folder)
        try:
            yield program
        finally:
            program.close()

    def trained(self, folder: Path, steps: int) -> list[dict[str, torch.Tensor]]:
        """Train so many steps with a save behind each. Returns the weights behind each."""
        found = []
        with self.started(folder) as program:
            for _ in range(steps):
                program.train()
                found.append({name: value.detach().clone() for name, value in program.weights().items()})
                program.save()
        return found

    def manifests(self, folder: Path) -> list[Path]:
        """Of all checkpoints, the oldest first."""
        found = (path for path in folder.rglob(MANIFEST_NAME) if ".safe_ckpt" not in path.parts)
        return sorted(found, key=lambda path: read_manifest(path.parent).sequence)

    def assert_equal(self, program: Training, weights: Mapping[str, torch.Tensor]) -> None:
        """They are the same in every bit."""
        found = program.weights()
        assert found.keys() == weights.keys()
        assert [name for name in found if not torch.equal(found[name], weights[name])] == []

    def test_a_fresh_folder_has_nothing_to_resume(self, tmp_path: Path) -> None:
        """That is no error."""
        with self.started(tmp_path / "run") as program:
            assert not program.resume()

    def test_what_is_saved_is_what_was_there(self, tmp_path: Path) -> None:
        """Every bit, although training goes on as soon as the save returns; and each checkpoint verifies."""
        saved = self.trained(tmp_path / "run", 2)
        with self.started(tmp_path / "run") as program:
            assert program.resume()
            self.assert_equal(program, saved[-1])
        for path in self.manifests(tmp_path / "run"):
            verify_files(path.parent, read_manifest(path.parent))

    def test_a_resume_goes_on_as_if_nothing_had_stopped(self, tmp_path: Path) -> None:
        """The same weights behind the steps that follow: the optimizer came back, too."""
        whole = self.trained(tmp_path / "whole", 4)
        self.trained(tmp_path / "run", 2)
        with self.started(tmp_path / "run") as program:
            assert program.resume()
            for weights in whole[2:]:
                program.train()
                self.assert_equal(program, weights)

    def test_a_damaged_checkpoint_is_passed_over(self, tmp_path: Path) -> None:
        """One bit of the newest one is wrong: the one before is taken."""
        saved = self.trained(tmp_path / "run", 2)
        assert len(self.manifests(tmp_path / "run")) >= 2, "let the program keep two checkpoints at least"
        newest = self.manifests(tmp_path / "run")[-1].parent
        file = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with self.started(tmp_path / "run") as program:
            assert program.resume()
            self.assert_equal(program, saved[-2])


__all__ = ["AdapterContract", "ExtensionContract", "HomeContract", "SourceContract", "Training"]
