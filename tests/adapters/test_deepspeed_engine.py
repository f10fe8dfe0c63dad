"""``SafeCheckpointEngine`` as DeepSpeed drives it: dead and stopped writers, full disks, every way to end, lost ranks."""

import argparse
import enum
import os
import re
import shutil
import signal
from dataclasses import replace

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed_engine_runs import (
    CONFIG,
    FRAIL,
    LARGE,
    MODEL,
    OPTIM,
    SEVERAL,
    SLOW,
    begin,
    begun_to_write,
    clean,
    complete,
    equal,
    in_time,
    info_of,
    latest,
    names,
    opened,
    put,
    read,
    save,
    save_checkpoint,
    signal_writer,
    state_of,
    tag_of,
    until,
    written,
)

from safe_ckpt import Checkpointer
from safe_ckpt.deepspeed import SafeCheckpointEngine, directories
from safe_ckpt.deepspeed.directories import CheckpointDirectory
from safe_ckpt.errors import (
    ClosedError,
    ConfigError,
    CorruptCheckpointError,
    DirectoryError,
    NotEnoughSpaceError,
    SafeCheckpointError,
    SaveError,
    StateError,
    WriterError,
)
from support import flip_bit, needs_root, small_disk, writer_processes, writers_of

pytestmark = pytest.mark.timeout(60)


# One process, the writer dies or stops


@pytest.mark.parametrize("moment", ["before save", "in mid-save", "before commit"])
def test_a_killed_writer_is_replaced_and_the_save_committed(tmp_path, caplog, moment):
    """Whenever the writer process is killed, the copies are written again by a new one and the tag is what was saved."""
    numel = 4 * LARGE if moment == "in mid-save" else 1000  # some thousand writes, or one
    with opened(SLOW) as engine, in_time():
        info = begin(engine, tmp_path, 1)
        first = signal_writer(signal.SIGKILL) if moment == "before save" else None
        put(engine, tmp_path, 1, numel=numel)
        if moment == "in mid-save":
            until(lambda: begun_to_write(tmp_path, 1))
            first = signal_writer(signal.SIGKILL)
        if moment == "before commit":
            until(lambda: written(tmp_path, 1))
            first = signal_writer(signal.SIGKILL)
        assert engine.commit(info) is True
        assert complete(tmp_path, 1, numel=numel)
        assert latest(tmp_path) == tag_of(1)
        assert engine.commit(save(engine, tmp_path, 2)) is True
        assert complete(tmp_path, 2)
        assert writers_of(os.getpid()) != [first]
    assert "killed by SIGKILL" in caplog.text
    if moment == "in mid-save":
        assert re.search(rf"in phase \w+ of \S*{MODEL}, after [1-9]\d* bytes", caplog.text)
    assert clean(tmp_path)


def test_a_writer_that_is_killed_between_the_files_loses_none(tmp_path):
    """Files that were durable before the writer died and files after it are all in the tag, each with its own content."""
    files = [MODEL, *(OPTIM.format(rank) for rank in range(3))]
    with opened(SLOW) as engine, in_time():
        info = begin(engine, tmp_path, 1)
        for name in files:
            put(engine, tmp_path, 1, name=name, numel=100_000)
            until(lambda name=name: begun_to_write(tmp_path, 1, name))
            signal_writer(signal.SIGKILL)
        assert engine.commit(info) is True
        assert complete(tmp_path, 1, names=files, numel=100_000)


def test_a_stopped_writer_is_replaced_after_the_stall_limit(tmp_path, caplog):
    """Several saves in a row on a writer that is stopped end within its stall limit, and all of them are complete."""
    with opened() as engine, in_time():
        assert engine.commit(save(engine, tmp_path, 1))
        signal_writer(signal.SIGSTOP)
        for number in (2, 3, 4):
            info = save(engine, tmp_path, number)
        assert engine.commit(info) is True
        assert all(complete(tmp_path, number) for number in (1, 2, 3, 4))
        assert latest(tmp_path) == tag_of(4)
    assert "made no progress for 1 s" in caplog.text
    assert clean(tmp_path)


def test_a_writer_that_must_not_be_replaced_is_an_error_of_each_save(tmp_path):
    """Where a stall is final, every commit on a stopped writer raises WriterError in time, and the next writer works."""
    with opened(FRAIL) as engine, in_time():
        assert engine.commit(save(engine, tmp_path, 1))
        for number in (2, 3):
            signal_writer(signal.SIGSTOP)
            info = save(engine, tmp_path, number)
            with pytest.raises(WriterError, match="made no progress") as caught:
                engine.commit(info)
            assert caught.value.name == tag_of(number)
            assert engine.get_commit_info() is None
            assert engine.commit(save(engine, tmp_path, 10 + number)) is True
            assert latest(tmp_path) == tag_of(10 + number)
        assert names(tmp_path) == ["global_step1", "global_step12", "global_step13", "latest"]
    assert clean(tmp_path)


def test_a_save_that_failed_without_a_commit_is_told_at_the_next_one(tmp_path):
    """The error of a save that nobody committed is raised by the next create(), once; it is never dropped."""
    with opened(FRAIL) as engine, in_time():
        assert engine.commit(save(engine, tmp_path, 1))
        signal_writer(signal.SIGSTOP)
        save(engine, tmp_path, 2)
        with pytest.raises(WriterError) as caught:
            engine.create(info_of(tmp_path, 3))
        assert caught.value.name == tag_of(2)
        assert engine.commit(save(engine, tmp_path, 3)) is True
        assert names(tmp_path) == ["global_step1", "global_step3", "latest"]


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_late_completion_satisfies_no_later_commit(tmp_path, most, number):
    """commit() of a save returns when that save is on disk; an earlier one that ends meanwhile does not count for it."""
    with opened(replace(SLOW, max_in_flight=most)) as engine, in_time():
        assert engine.commit(save(engine, tmp_path, 1))
        signal_writer(number)
        save(engine, tmp_path, 2, numel=100_000)
        info = begin(engine, tmp_path, 3)
        if number == signal.SIGSTOP:
            assert (tmp_path / tag_of(2)).exists() == (most == 1)
        put(engine, tmp_path, 3, numel=100_000)
        put(engine, tmp_path, 3, name=OPTIM.format(0), numel=100_000)
        assert not (tmp_path / tag_of(3)).exists()
        assert engine.commit(info) is True
        assert complete(tmp_path, 3, names=[MODEL, OPTIM.format(0)], numel=100_000)
        assert complete(tmp_path, 2, numel=100_000)
        assert latest(tmp_path) == tag_of(3)


# One process, the disk is full


@needs_root
def test_a_full_disk_is_an_error_of_commit_and_leaves_what_was(tmp_path):
    """Without room commit() raises NotEnoughSpaceError, `latest` and the earlier tag stay, and what fits is saved again."""
    with small_disk(tmp_path / "small", "16m") as full, opened() as engine, in_time():
        assert engine.commit(save(engine, full, 1))
        info = save(engine, full, 2, numel=5_000_000)
        with pytest.raises(NotEnoughSpaceError) as caught:
            engine.commit(info)
        assert str(full) in caught.value.path
        assert 20_000_000 < caught.value.needed_bytes < 21_000_000
        assert caught.value.free_bytes < 20_000_000
        assert names(full) == [tag_of(1), "latest"]
        assert latest(full) == tag_of(1)
        assert complete(full, 1)
        assert list((full / ".safe_ckpt/pending").glob("*")) == []
        assert engine.commit(save(engine, tmp_path / "room", 2, numel=5_000_000)) is True
        assert complete(tmp_path / "room", 2, numel=5_000_000)
        assert engine.commit(save(engine, full, 3)) is True
        assert complete(full, 3)
        assert latest(full) == tag_of(3)


@needs_root
def test_a_disk_that_is_full_for_the_second_file_commits_none(tmp_path):
    """A save of which one file fits and another does not is committed with neither, and save() itself never blocks on it."""
    with small_disk(tmp_path / "small", "16m") as full, opened() as engine, in_time():
        info = begin(engine, full, 1)
        put(engine, full, 1)
        put(engine, full, 1, name=OPTIM.format(0), numel=5_000_000)
        put(engine, full, 1, name=OPTIM.format(1))
        with pytest.raises(NotEnoughSpaceError):
            engine.commit(info)
        assert names(full) == []


# One process, what is saved


def test_the_tag_appears_in_commit_and_not_before(tmp_path):
    """Neither makedirs() nor save() makes the tag; commit() does, and moves `latest` only where it was asked to."""
    with opened() as engine:
        info = begin(engine, tmp_path / "run", 1)
        put(engine, tmp_path / "run", 1)
        until(lambda: written(tmp_path / "run", 1))
        assert names(tmp_path / "run") == []
        assert engine.get_commit_info() == replace(info, save_latest=False)  # DeepSpeed is not to write it once more
        assert engine.is_decoupled()
        assert engine.commit(info) is True
        assert engine.get_commit_info() is None
        info = begin(engine, tmp_path / "run", 2, save_latest=False)
        put(engine, tmp_path / "run", 2)
        assert engine.commit(info) is True
        assert complete(tmp_path / "run", 2)
        assert latest(tmp_path / "run") == tag_of(1)


def test_swap_files_that_deepspeed_copies_are_in_the_tag(tmp_path):
    """What DeepSpeed puts below the tag itself, past its checkpoint engine, before the commit is in the committed tag."""
    folder = tmp_path / tag_of(1) / "offloaded_tensors" / "rank0"
    with opened() as engine:
        info = begin(engine, tmp_path, 1)
        folder.mkdir(parents=True)
        (folder / "0.tensor.swp").write_bytes(b"swapped")
        put(engine, tmp_path, 1)
        save_checkpoint(engine)
        assert engine.commit(info) is True
    assert (folder / "0.tensor.swp").read_bytes() == b"swapped"
    assert sorted(os.listdir(tmp_path / tag_of(1))) == ["manifest.json", MODEL, "offloaded_tensors"]


def test_what_is_on_disk_is_the_value_at_save(tmp_path):
    """Tensors and objects that change in place right after save() are saved as they were when it was called."""
    flat = torch.arange(float(LARGE))
    state = {"flat": flat, "view": flat[10:20], "across": flat.view(1000, 1000).t(), "steps": [1], "group": {"lr": 0.5}}
    expected = {"flat": flat.clone(), "view": flat[10:20].clone(), "across": flat.clone().view(1000, 1000).t()}
    with opened() as engine:
        info = begin(engine, tmp_path, 1)
        writer = signal_writer(signal.SIGSTOP)
        for name in (MODEL, OPTIM.format(0)):
            engine.save(state, os.path.join(tmp_path, tag_of(1), name))
        flat.mul_(-1)
        state["steps"].append(2)
        state["group"]["lr"] = 0.1
        os.kill(writer, signal.SIGCONT)
        assert engine.commit(info) is True
    for name in (MODEL, OPTIM.format(0)):
        found = read(tmp_path / tag_of(1) / name)
        assert equal(found, {**expected, "steps": [1], "group": {"lr": 0.5}})


class Kind(enum.Enum):
    ONE = 1


class Settings:
    def __init__(self, depth):
        self.depth = depth
        self.weight = torch.full((3,), float(depth))

    def __eq__(self, other):
        return type(other) is Settings and self.depth == other.depth and torch.equal(self.weight, other.weight)

    __hash__ = None


def test_views_ties_and_objects_come_back(tmp_path):
    """Views of one buffer still share it, tied tensors are still one, and Python objects are equal to what was saved."""
    flat = torch.randn(LARGE)
    tied = torch.nn.Parameter(torch.randn(10, 10))
    state = {
        "views": [flat[:500_000], flat[500_000:], flat.view(1000, -1)[:, 3]],
        "tied": {"embed": tied, "head": tied},
        "args": argparse.Namespace(lr=0.1, kind=Kind.ONE),
        "object": Settings(3),
        "empty": torch.empty(0),
        "half": torch.randn(5).bfloat16(),
        "none": None,
    }
    with opened() as engine:
        info = begin(engine, tmp_path, 1)
        engine.save(state_dict=state, path=os.path.join(tmp_path, tag_of(1), MODEL))
        assert engine.commit(info) is True
        file = tmp_path / tag_of(1) / MODEL
        for found in (read(file), engine.load(str(file)), engine.load(str(file), map_location="cpu")):
            assert all(torch.equal(one, other) for one, other in zip(found["views"], state["views"], strict=True))
            assert len({view.untyped_storage().data_ptr() for view in found["views"]}) == 1
            assert found["tied"]["embed"] is found["tied"]["head"]
            assert isinstance(found["tied"]["head"], torch.nn.Parameter)
            assert torch.equal(found["tied"]["head"], tied)
            assert all(equal(found[key], state[key]) for key in ("args", "object", "empty", "half", "none"))
            assert found["args"].kind is Kind.ONE
        assert file.stat().st_size < 1.1 * flat.nbytes


@pytest.mark.parametrize("what", ["a lambda", "an open file"])
def test_what_cannot_be_pickled_fails_this_save_only(tmp_path, what):
    """save() raises StateError that names the file, commit() refuses that save with the same cause, and the next one works."""
    with opened() as engine, (tmp_path / "open").open("w") as stream:
        bad = stream if what == "an open file" else (lambda: None)
        info = begin(engine, tmp_path, 1)
        put(engine, tmp_path, 1)
        with pytest.raises(StateError, match=re.escape(OPTIM.format(0))):
            engine.save({"good": torch.ones(3), "bad": bad}, os.path.join(tmp_path, tag_of(1), OPTIM.format(0)))
        put(engine, tmp_path, 1, name=OPTIM.format(1))
        with pytest.raises(SaveError, match=re.escape(OPTIM.format(0))):
            engine.commit(info)
        assert names(tmp_path) == ["open"]
        assert engine.commit(save(engine, tmp_path, 2)) is True
        assert complete(tmp_path, 2)
    assert names(tmp_path) == [tag_of(2), "latest", "open"]


def test_the_same_tag_again_is_replaced_as_a_whole(tmp_path):
    """Of a tag that is saved again no state file of before is left, and files that are not states go along."""
    with opened() as engine:
        info = begin(engine, tmp_path, 1)
        put(engine, tmp_path, 1, value=10)
        put(engine, tmp_path, 1, value=10, name=OPTIM.format(1))
        assert engine.commit(info)
        (tmp_path / tag_of(1) / "notes.txt").write_text("mine")
        assert engine.commit(save(engine, tmp_path, 1, value=20))
        tag = tmp_path / tag_of(1)
        assert sorted(os.listdir(tag)) == ["manifest.json", MODEL, "notes.txt"]
        assert equal(read(tag / MODEL), state_of(20))
        assert (tag / "notes.txt").read_text() == "mine"
        assert latest(tmp_path) == tag_of(1)
    assert clean(tmp_path)


def test_one_file_saved_twice_in_one_tag_is_the_second(tmp_path):
    """A file that is saved again before the commit is the later one, and load() accepts it."""
    with opened() as engine:
        info = begin(engine, tmp_path, 1)
        put(engine, tmp_path, 1, value=10)
        put(engine, tmp_path, 1, value=20)
        assert engine.commit(info)
        assert equal(engine.load(str(tmp_path / tag_of(1) / MODEL)), state_of(20))
        assert complete(tmp_path, 1, value=20)


def test_a_flipped_bit_is_never_loaded(tmp_path):
    """load() returns an intact file and raises CorruptCheckpointError once a bit of it differs, also after a first load."""
    with opened() as engine:
        info = begin(engine, tmp_path, 1)
        put(engine, tmp_path, 1, numel=100_000)
        put(engine, tmp_path, 1, name=OPTIM.format(0))
        assert engine.commit(info)
        file = tmp_path / tag_of(1) / MODEL
        assert equal(engine.load(str(file)), state_of(1, 100_000))
        flip_bit(file, file.stat().st_size // 2)
        with pytest.raises(CorruptCheckpointError, match=MODEL):
            engine.load(str(file))
        assert equal(engine.load(str(file.with_name(OPTIM.format(0)))), state_of(1))
        flip_bit(file, file.stat().st_size // 2)
        assert equal(engine.load(str(file)), state_of(1, 100_000))


# One process, calls that are not in order


def test_a_save_without_its_files_never_replaces_a_tag(tmp_path):
    """A save whose files lie outside of the tag, as save_16bit_model's, is refused and leaves the committed tag as it is."""
    with opened() as engine:
        assert engine.commit(save(engine, tmp_path, 1))
        begin(engine, tmp_path, 1, save_latest=False)
        with pytest.raises(ConfigError, match="pytorch_model"):
            engine.save(state_of(1), os.path.join(tmp_path, "pytorch_model.bin"))
        assert engine.commit(save(engine, tmp_path, 2))
        assert complete(tmp_path, 1)
        assert complete(tmp_path, 2)


def test_a_save_that_nobody_commits_is_an_error_of_the_next(tmp_path):
    """Driven by hand: create() of a tag before commit() of the one before says what was missing, and the next one works."""
    with opened() as engine:
        begin(engine, tmp_path, 1)
        put(engine, tmp_path, 1)
        with pytest.raises(SaveError, match=r"global_step1 was not saved.*commit\(\) was not called"):
            engine.create(info_of(tmp_path, 2))
        assert engine.commit(save(engine, tmp_path, 2))
        assert names(tmp_path) == [tag_of(2), "latest"]


def test_a_second_engine_does_not_wait_for_files_that_do_not_come(tmp_path):
    """With one save open, a load by another engine waits for none of its files; a save by it there ends it, with an error."""
    with opened(replace(SLOW, max_in_flight=2)) as engine, opened() as other, in_time():
        save(engine, tmp_path, 1, numel=SEVERAL)
        info = begin(engine, tmp_path, 2)
        put(engine, tmp_path, 2)
        CheckpointDirectory.settle()  # as load_checkpoint of an installed engine does
        assert complete(tmp_path, 1, numel=SEVERAL)
        assert engine.commit(info)
        info = begin(engine, tmp_path, 3)
        put(engine, tmp_path, 3)
        assert other.commit(save(other, tmp_path, 4))
        with pytest.raises(SaveError, match=r"global_step3 was not saved.*another engine of this process"):
            engine.commit(info)
        assert engine.commit(save(engine, tmp_path, 5))
        assert names(tmp_path) == [*map(tag_of, (1, 2, 4, 5)), "latest"]


def test_a_tag_may_lie_in_folders(tmp_path):
    """A tag such as DeepSpeed takes, with folders in its name, is committed, and `latest`, beside the folders, names it."""
    with opened() as engine:
        info = CheckpointCommitInfo(tag="warmup/step3", save_dir=str(tmp_path), save_latest=True)
        engine.create(info)
        engine.makedirs(str(tmp_path / "warmup/step3"), exist_ok=True)
        file = tmp_path / "warmup/step3" / MODEL
        engine.save(state_of(3), str(file))
        assert engine.commit(info) is True
        assert latest(tmp_path) == "warmup/step3"
        (tmp_path / "latest").unlink()  # as when the job was killed before it was there
        assert directories.order(tmp_path, None) == [tmp_path / "warmup/step3"]
        assert directories.order(tmp_path.parent, None) == []
        assert equal(engine.load(str(file)), state_of(3))
        with pytest.raises(DirectoryError, match="is a tag itself"):
            engine.create(replace(info, tag="warmup/step3/x"))
        for harm in (lambda: None, lambda: shutil.rmtree(tmp_path / "warmup/.safe_ckpt")):
            harm()
            with pytest.raises(DirectoryError, match="checkpoints are kept in it"):
                engine.create(replace(info, tag="warmup"))
        assert equal(read(file), state_of(3))


def test_a_tag_in_flight_is_a_tag(tmp_path):
    """A tag that would lie in one that is still being written is refused, and that one is committed."""
    with opened(replace(SLOW, max_in_flight=2)) as engine:
        save(engine, tmp_path, 1, numel=SEVERAL)
        with pytest.raises(DirectoryError, match="is a tag itself"):
            engine.create(info_of(tmp_path, "1/in"))
        assert complete(tmp_path, 1, numel=SEVERAL)


def test_what_others_wrote_is_not_replaced(tmp_path):
    """A directory that another adapter, or somebody, wrote where the tag goes stays, and an error says so."""
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=30)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with opened() as engine:
        for tag, why in (("step-00000001", "no deepspeed directory"), ("mine", "did not write it")):
            with pytest.raises(DirectoryError, match=why):
                engine.create(CheckpointCommitInfo(tag=tag, save_dir=str(tmp_path), save_latest=True))


def test_cleanup_on_the_way_out_of_an_exception_commits_no_part(tmp_path, caplog):
    """An exception between two files and ``finally: engine.destroy()``: that tag is not there, and an error names it."""
    engine = SafeCheckpointEngine(CONFIG)
    assert engine.commit(save(engine, tmp_path, 1))
    with pytest.raises((KeyError, SafeCheckpointError)) as caught:
        try:
            begin(engine, tmp_path, 2)
            put(engine, tmp_path, 2)
            raise KeyError("mine, before the optimizer's file was saved")
        finally:
            engine.cleanup()
    assert names(tmp_path) == [tag_of(1), "latest"]
    assert latest(tmp_path) == tag_of(1)
    assert f"{tag_of(2)} was not saved" in f"{caplog.text} {caught.value}"
    assert clean(tmp_path)


def test_more_directories_than_are_held_take_turns(tmp_path, caplog):
    """Saves that go to three directories in turn are all committed, each `latest` is right, and nothing is logged as wrong."""
    with opened() as engine:
        for number in range(1, 8):
            info = save(engine, tmp_path / str(number % 3), number)
        assert engine.commit(info) is True
        assert all(complete(tmp_path / str(number % 3), number) for number in range(1, 8))
        assert [latest(tmp_path / name) for name in "012"] == [tag_of(6), tag_of(7), tag_of(5)]
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_cleanup_ends_the_writer_once_and_for_all(tmp_path):
    """cleanup() commits what was begun; again it does nothing; create() raises ClosedError then and no process is left."""
    engine = SafeCheckpointEngine(SLOW)
    save(engine, tmp_path / "run", 1, numel=100_000)
    assert writers_of(os.getpid())
    engine.cleanup()
    assert complete(tmp_path / "run", 1, numel=100_000)
    assert latest(tmp_path / "run") == tag_of(1)
    engine.cleanup()
    for folder in ("run", "new"):
        with pytest.raises(ClosedError):
            engine.create(info_of(tmp_path / folder, 2))
    with pytest.raises(ConfigError, match="create"):
        put(engine, tmp_path / "run", 2)
    with pytest.raises(ConfigError):
        engine.commit(info_of(tmp_path / "run", 2))
    assert writer_processes() == []
    assert clean(tmp_path / "run")
    assert not (tmp_path / "new").exists()
    with opened() as another:
        assert another.commit(save(another, tmp_path / "run", 2))
        assert complete(tmp_path / "run", 2)


def test_a_closed_engine_holds_nothing(tmp_path):
    """While another engine is open, one that was closed takes no directory, and hinders no repair of one it had."""
    engine = SafeCheckpointEngine(CONFIG)
    engine.commit(save(engine, tmp_path, 1))
    with opened() as other:
        engine.cleanup()
        with pytest.raises(ClosedError):
            engine.create(info_of(tmp_path / "new", 2))
        assert not (tmp_path / "new").exists()
        replaced = tmp_path / ".safe_ckpt/trash/op"
        replaced.mkdir(parents=True)
        (tmp_path / tag_of(1)).rename(replaced / tag_of(1))
        (tmp_path / ".safe_ckpt/pending/op").mkdir(parents=True)
        other._directories.repair(tmp_path)  # as load_checkpoint of an installed engine does
        assert complete(tmp_path, 1)


def test_cleanup_of_a_stopped_writer_ends(tmp_path):
    """cleanup() with a save on a stopped writer ends within the limits: it is committed by another writer, or an error."""
    with in_time():
        engine = SafeCheckpointEngine(CONFIG)
        save(engine, tmp_path / "one", 1)
        signal_writer(signal.SIGSTOP)
        engine.cleanup()
        assert complete(tmp_path / "one", 1)
        engine = SafeCheckpointEngine(FRAIL)
        signal_writer(signal.SIGSTOP)
        save(engine, tmp_path / "two", 1)
        with pytest.raises(WriterError):
            engine.cleanup()
        engine.cleanup()
    assert names(tmp_path / "two") == []
    assert writer_processes() == []
    assert clean(tmp_path / "two")
