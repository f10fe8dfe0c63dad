"""Offloaded folders of all ranks in one directory, and back: every byte or nothing, and one word for all ranks."""

import contextlib
import ctypes
import os
import random
import shutil
import socket
import subprocess
import threading
import time

import pytest
import torch.distributed as dist

from kit.ranks import spawn_ranks, values
from safe_ckpt import consolidate_offloaded, restore_offloaded
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.storage.copier import FileCopy, copy_files
from safe_ckpt.core.storage.direct_io import WriteOptions
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.core.storage.reader import digest_of
from safe_ckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    DesyncError,
    DirectoryError,
    NotEnoughSpaceError,
    RestoreError,
    SafeCheckpointError,
    SourceChangedError,
    StateError,
)
from support import Quiet, flip_bit, needs_root, small_disk

CHUNK = 4 << 20  # of copier
SIZES = {
    "0.tensor": 0,
    "1.tensor": 1,
    "4095.tensor": 4095,
    "4096.tensor": 4096,
    "deep/4097.tensor": 4097,
    "deep/er/below.tensor": CHUNK - 1,
    "deep/er/exact.tensor": CHUNK,
    "deep/er/above.tensor": CHUNK + 1,
    "several.tensor": 2 * CHUNK + 12345,
}
LONG = 64 << 20


def body(key, size):
    """What belongs into a file: other bytes for every key."""
    return random.Random(str(key)).randbytes(size)


def fill(folder, sizes, key=""):
    for name, size in sizes.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body((key, name), size))


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def expect(folder, sizes, key=""):
    """``folder`` holds exactly these files, with the bytes of ``key``."""
    assert files_in(folder) == set(sizes)
    for name, size in sizes.items():
        assert (folder / name).read_bytes() == body((key, name), size), name


def hidden(destination):
    return destination.parent / ".safe_ckpt/names" / destination.name


def told(action, *arguments, **more):
    """What it returned, or what it raised."""
    try:
        return action(*arguments, **more)
    except Exception as error:
        return error


def _there_and_back(rank, folder, destination):
    disk = folder / f"disk{rank}"
    fill(disk / "swap", SIZES, rank)
    fill(disk / "swap", {"a_gradient.tensor": 100, "deep/gradients/b.tensor": 100}, rank)
    (disk / "nothing").mkdir()
    sources = {f"zero/rank{rank}": disk / "swap", f"nothing{rank}": disk / "nothing"}
    info = consolidate_offloaded(sources, destination, ignore=["*gradient*"])
    fill(disk / "back", {"mine.txt": 10, "deep/mine.txt": 10, "1.tensor": 777}, "mine")
    targets = {f"zero/rank{rank}": disk / "back", f"nothing{rank}": disk / "new"}
    restore_offloaded(destination, targets)
    return info


def _once_more(rank, folder, destination):
    disk = folder / f"disk{rank}"
    fill(disk / "swap", {"deep/1.tensor": 4321}, f"second {rank}")
    infos = [consolidate_offloaded({f"zero/rank{rank}": disk / "swap"} if rank else {}, destination) for _ in range(2)]
    restore_offloaded(destination, {f"zero/rank{rank}": disk / "again"} if rank else {})
    return infos[-1]


def test_every_byte_of_every_rank_is_there_and_comes_back(tmp_path):
    """Files of all sizes, nested and empty, but none that is ignored; each rank gets its own back beside what else is there."""
    destination = tmp_path / "out/ckpt"
    infos = values(spawn_ranks(_there_and_back, 3, tmp_path, destination))
    manifest = read_manifest(destination)
    assert verify_files(destination, manifest) == sum(SIZES.values()) * 3
    assert infos[0] == infos[1] == infos[2]
    assert (infos[0].path, infos[0].size_bytes) == (destination, sum(SIZES.values()) * 3)
    for entry in manifest.files:
        assert entry.xxh3_128 == digest_of(destination / entry.path, entry.size_bytes), entry
        assert entry.path.startswith(f"zero/rank{entry.rank}/"), entry
    assert sorted(os.listdir(destination)) == ["manifest.json", "nothing0", "nothing1", "nothing2", "zero"]
    for rank in range(3):
        expect(destination / f"zero/rank{rank}", SIZES, rank)
        back = tmp_path / f"disk{rank}/back"
        for name in ("mine.txt", "deep/mine.txt"):
            assert (back / name).read_bytes() == body(("mine", name), 10)
            (back / name).unlink()
        expect(back, SIZES, rank)
        assert os.listdir(tmp_path / f"disk{rank}/new") == []
    assert not hidden(destination).exists()


def test_the_same_destination_is_replaced_as_a_whole(tmp_path):
    """What only the earlier call put there is gone, and a rank may give nothing at all."""
    destination = tmp_path / "ckpt"
    fill(tmp_path / "earlier", SIZES)
    consolidate_offloaded({"earlier": tmp_path / "earlier"}, destination)  # this process alone
    expect(destination / "earlier", SIZES)
    earlier = read_manifest(destination).sequence
    infos = values(spawn_ranks(_once_more, 3, tmp_path, destination))
    verify_files(destination, read_manifest(destination))
    assert sorted(os.listdir(destination)) == ["manifest.json", "zero"]
    for rank in (1, 2):
        expect(destination / f"zero/rank{rank}", {"deep/1.tensor": 4321}, f"second {rank}")
        expect(tmp_path / f"disk{rank}/again", {"deep/1.tensor": 4321}, f"second {rank}")
    (sequence,) = {info.sequence for info in infos}
    assert sequence > earlier
    assert sorted(os.listdir(destination / "zero")) == ["rank1", "rank2"]
    assert not hidden(destination).exists()


def _one_name(rank, folder):
    if rank:
        (folder / f"link{rank}").symlink_to(folder / "shared")
        fill(folder / f"own{rank}", {"x.tensor": 5000}, rank)
    sources = {"both": folder / (f"link{rank}" if rank else "shared"), "own": folder / f"own{rank}"}
    consolidate_offloaded(sources if rank < 3 else {}, folder / "ckpt")
    back = {"both": folder / f"both{rank}", "own": folder / f"back{rank}"}
    restore_offloaded(folder / "ckpt", back if rank < 3 else {})


def test_one_name_for_one_folder_is_copied_once_and_for_several_each_has_its_own(tmp_path):
    """A shared folder that three ranks name is there once; folders of one name that differ are all there, and restored each."""
    fill(tmp_path / "shared", {"s.tensor": 70_000}, "shared")
    fill(tmp_path / "own0", {"x.tensor": 5000}, 0)
    values(spawn_ranks(_one_name, 4, tmp_path))
    verify_files(tmp_path / "ckpt", read_manifest(tmp_path / "ckpt"))
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["both", "manifest.json", "own", "own.rank00001", "own.rank00002"]
    expect(tmp_path / "ckpt/both", {"s.tensor": 70_000}, "shared")
    for rank in range(3):
        expect(tmp_path / f"both{rank}", {"s.tensor": 70_000}, "shared")
        expect(tmp_path / f"back{rank}", {"x.tensor": 5000}, rank)


def _like_ours(rank, folder):
    fill(folder / f"a{rank}", {"x.tensor": 5000}, rank)
    sources = {"a": folder / f"a{rank}"}
    back = {"a": folder / f"back{rank}"}
    if rank == 0:
        fill(folder / "other", {"x.tensor": 5000}, "other")
        sources["a.rank00001"], back["a.rank00001"] = folder / "other", folder / "back-other"
    done = told(consolidate_offloaded, sources, folder / "ckpt")
    return done if isinstance(done, Exception) else told(restore_offloaded, folder / "ckpt", back)


def test_a_name_like_those_that_are_given_out_mixes_nothing_up(tmp_path):
    """Where one rank's name is what another's would become, each gets its own back, or all ranks are told that it cannot be."""
    said = values(spawn_ranks(_like_ours, 2, tmp_path))
    if isinstance(said[0], ConfigError):
        assert isinstance(said[1], ConfigError)
        return
    assert said == [None, None]
    for rank in range(2):
        expect(tmp_path / f"back{rank}", {"x.tensor": 5000}, rank)
    expect(tmp_path / "back-other", {"x.tensor": 5000}, "other")


def _node(rank, folder, hostname):
    """Rank 1 is on another node, with another disk under the same path."""
    if rank:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x04020000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUTS | CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder / "nvme")], check=True)
        socket.sethostname(hostname)
    fill(folder / "nvme", {"x.tensor": 5000}, rank)
    consolidate_offloaded({"nvme": folder / "nvme"}, folder / "ckpt")
    (folder / "nvme/x.tensor").unlink()
    restore_offloaded(folder / "ckpt", {"nvme": folder / "nvme"})
    expect(folder / "nvme", {"x.tensor": 5000}, rank)


@needs_root
@pytest.mark.parametrize("hostname", ["another", socket.gethostname()], ids=["other name", "same name"])
def test_one_path_on_two_nodes_is_two_folders(tmp_path, hostname):
    """Node-local disks under the same path are both there, each node gets its own back; also with one hostname."""
    (tmp_path / "nvme").mkdir()
    values(spawn_ranks(_node, 2, tmp_path, hostname))
    for name, rank in (("nvme", 0), ("nvme.rank00001", 1)):
        expect(tmp_path / "ckpt" / name, {"x.tensor": 5000}, rank)


# What rank 1 gives, where rank 0 gives {"fine": a folder} alone: name -> folder, below the test's own.
REFUSED_SOURCES = {
    "a name that leads out": ({"../x": "good"}, ConfigError, r"'\.\./x'"),
    "an absolute name": ({"/abs": "good"}, ConfigError, "'/abs'"),
    "no name": ({"": "good"}, ConfigError, "name of a folder"),
    "a name that is not the shortest": ({"x//y": "good"}, ConfigError, "'x//y'"),
    "the name of what is hidden": ({"x/.safe_ckpt": "good"}, ConfigError, "safe_ckpt"),
    "the manifest's name": ({"manifest.json": "good"}, ConfigError, "manifest"),
    "a name within its own": ({"a": "good", "a/b": "good2"}, ConfigError, "lies within 'a'"),
    "a name within rank 0's": ({"fine/b": "good"}, ConfigError, "lies within 'fine'"),
    "no such folder": ({"x": "missing"}, DirectoryError, "missing"),
    "a file for a folder": ({"x": "good/f.tensor"}, DirectoryError, "f.tensor"),
    "a link to a directory": ({"x": "linked"}, StateError, "link to a directory"),
    "a link to nothing": ({"x": "broken"}, StateError, "not a file"),
    "a pipe": ({"x": "piped"}, StateError, "not a file"),
}
REFUSED = {
    **{what: (kind, match) for what, (_, kind, match) in REFUSED_SOURCES.items()},
    "one text for patterns": (ConfigError, "put it in a list"),
    "a directory of somebody else's": (DirectoryError, "safe_ckpt did not write it"),
    "a file": (DirectoryError, "not a directory"),
    "a link": (DirectoryError, "not a directory"),
    "other destinations": (DesyncError, "destination"),
    "other patterns": (DesyncError, "ignore"),
}


def _refused(rank, folder):
    found = {}
    fine = {"fine": folder / "fine"}
    for what, (given, _, _) in REFUSED_SOURCES.items():
        sources = {name: folder / below for name, below in given.items()}
        found[what] = told(consolidate_offloaded, sources if rank else fine, folder / "out")
    found["one text for patterns"] = told(consolidate_offloaded, fine, folder / "out", ignore="*.x")
    found["a directory of somebody else's"] = told(consolidate_offloaded, fine, folder / "theirs")
    found["a file"] = told(consolidate_offloaded, fine, folder / "theirs/file")
    found["a link"] = told(consolidate_offloaded, fine, folder / "link")
    found["other destinations"] = told(consolidate_offloaded, fine, folder / f"out{rank}")
    found["other patterns"] = told(consolidate_offloaded, fine, folder / "out", ignore=[f"*.{rank}"])
    found["after all"] = told(consolidate_offloaded, fine, folder / "out")
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    for name in ("fine", "good", "good2", "linked", "broken", "piped"):
        fill(folder / name, {"f.tensor": 10})
    fill(folder / "theirs", {"file": 10, "below/file": 10})
    (folder / "linked/to").symlink_to(folder / "good")
    (folder / "broken/to").symlink_to(folder / "nowhere")
    (folder / "link").symlink_to(folder / "empty")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "piped/pipe")
    return folder, values(spawn_ranks(_refused, 2, folder))


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_sources_and_destinations_are_refused_on_every_rank(refused, what):
    """With the same named error on all ranks, also where only rank 1 is to blame."""
    kind, match = REFUSED[what]
    for error in (found[what] for found in refused[1]):
        assert isinstance(error, kind), repr(error)
        with pytest.raises(kind, match=match):
            raise error


def test_what_stands_in_the_way_of_a_refused_call_is_untouched(refused):
    """Nothing was written over, nothing is left at a refused destination, and the next call works."""
    folder, found = refused
    expect(folder / "theirs", {"file": 10, "below/file": 10})
    assert os.listdir(folder / "empty") == []
    assert not any((folder / name).exists() for name in ("out0", "out1"))
    assert {str(each["after all"].path) for each in found} == {str(folder / "out")}
    expect(folder / "out/fine", {"f.tensor": 10})


@pytest.mark.parametrize("inside", ["the destination", "another's hidden folder"])
@pytest.mark.quick
def test_what_a_source_holds_of_safe_ckpt_makes_no_trouble_later(tmp_path, inside):
    """A source that holds the destination, or a folder named .safe_ckpt: refused at once, or copied every time."""
    fill(tmp_path / "disk", {"f.tensor": 10})
    destination = tmp_path / ("disk/ckpt" if inside == "the destination" else "ckpt")
    if inside != "the destination":
        fill(tmp_path / "disk", {".safe_ckpt/names/x/lock.seen": 10})
    said = [told(consolidate_offloaded, {"a": tmp_path / "disk"}, destination) for _ in range(2)]
    if not isinstance(said[0], ConfigError | StateError | DirectoryError):
        assert not isinstance(said[1], Exception), repr(said[1])
        assert not [name for name in files_in(destination) if name.endswith(("lock", "a/manifest.json"))]
    verify_if_there(destination)


def verify_if_there(destination):
    if destination.exists():
        verify_files(destination, read_manifest(destination))


def _append(file):
    with file.open("ab") as stream:
        stream.write(b"more")


def _rewrite(file):
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size - 4)
        stream.write(b"else")


def _replace(file):
    other = file.with_name("other")
    other.write_bytes(b"else")
    other.replace(file)
    file.touch()


CHANGES = {
    "appended to": _append,
    "rewritten in place": _rewrite,
    "replaced": _replace,
    "touched": lambda file: os.utime(file, ns=(1, 1)),
    "cut off": lambda file: os.truncate(file, 12345),
    "deleted": lambda file: file.unlink(missing_ok=True),
}


@contextlib.contextmanager
def changing(file, change, destination):
    """From the moment at which copying may begin, ``file`` changes again and again."""
    over, pending = threading.Event(), hidden(destination) / "pending"

    def work():
        while not over.is_set() and not (pending.is_dir() and any(pending.iterdir())):
            time.sleep(0.001)
        while not over.is_set():
            change(file)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _changed(rank, folder):
    own, found = folder / f"disk{rank}", {}
    for what, change in CHANGES.items():
        destination = folder / f"ckpt {what}"
        fill(own, {"small.tensor": 100, **({"long.tensor": LONG} if rank == 1 else {})})
        with changing(own / "long.tensor", change, destination) if rank == 1 else contextlib.nullcontext():
            error = told(consolidate_offloaded, {f"rank{rank}": own}, destination)
        dist.barrier()
        found[what] = error, destination.exists()
    return found


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    yield folder, values(spawn_ranks(_changed, 3, folder, timeout_s=100))
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", CHANGES)
def test_a_source_that_changes_while_it_is_copied_is_named_on_every_rank(changed, what):
    """Whatever is done to rank 1's file: every rank raises SourceChangedError with its path, and there is no destination."""
    folder, found = changed
    for error, there in (each[what] for each in found):
        assert isinstance(error, SourceChangedError), repr(error)
        assert (error.source, error.rank) == (str(folder / "disk1/long.tensor"), 1)
        assert not there


def _restless(rank, folder):
    fill(folder / f"disk{rank}", {"x.tensor": 100})
    over = threading.Event()

    def work():
        while not over.is_set():
            _append(folder / "disk1/x.tensor")

    thread = threading.Thread(target=work, daemon=True)
    if rank == 1:
        thread.start()
    begun = time.monotonic()
    error = told(consolidate_offloaded, {f"rank{rank}": folder / f"disk{rank}"}, folder / "ckpt", timeout_s=5)
    over.set()
    return error, time.monotonic() - begun


def test_a_source_that_never_rests_is_an_error_in_time(tmp_path):
    """A file that is written to without pause, from before the call on: every rank raises SourceChangedError in time."""
    for error, seconds in values(spawn_ranks(_restless, 2, tmp_path, timeout_s=25)):
        assert isinstance(error, SourceChangedError), repr(error)
        assert seconds < 15
    assert not (tmp_path / "ckpt").exists()


def _too_much(rank, folder, disk):
    fill(folder / f"disk{rank}", {"x.tensor": 10 << 20})
    big = told(consolidate_offloaded, {f"rank{rank}": folder / f"disk{rank}"}, disk / "ckpt")
    left = files_in(disk)
    dist.barrier()
    tiny = folder / f"tiny{rank}"  # takes a page for each file, which nobody can tell before
    fill(tiny, {f"{number}": 1 for number in range(2500)})
    full = told(consolidate_offloaded, {f"rank{rank}": tiny}, disk / "ckpt")
    dist.barrier()
    there = (disk / "ckpt").exists()
    fill(folder / f"less{rank}", {"x.tensor": 5 << 20})
    dist.barrier()
    return big, left, full, there, consolidate_offloaded({f"rank{rank}": folder / f"less{rank}"}, disk / "ckpt")


@needs_root
def test_a_disk_that_is_too_small_is_told_on_every_rank(tmp_path):
    """Before a byte is copied, or when it gets full on the way: with what is needed and what is free; less of it fits then."""
    with small_disk(tmp_path / "small", "16m") as disk:
        for big, left, full, there, less in values(spawn_ranks(_too_much, 2, tmp_path, disk)):
            assert isinstance(big, NotEnoughSpaceError), repr(big)
            assert big.needed_bytes == 20 << 20
            assert 0 < big.free_bytes <= 16 << 20
            assert not [name for name in left if "tensor" in name]
            assert isinstance(full, NotEnoughSpaceError), repr(full)
            assert full.needed_bytes == 5000
            assert not there
            assert less.size_bytes == 10 << 20
        verify_files(disk / "ckpt", read_manifest(disk / "ckpt"))
        assert not hidden(disk / "ckpt").exists()


def _no_room_back(rank, folder, disk):
    fill(folder / f"disk{rank}", {"x.tensor": 10 << 20})
    consolidate_offloaded({f"rank{rank}": folder / f"disk{rank}"}, folder / "ckpt")
    fill(disk / f"back{rank}", {"x.tensor": 10})
    error = told(restore_offloaded, folder / "ckpt", {f"rank{rank}": disk / f"back{rank}"})
    dist.barrier()
    expect(disk / f"back{rank}", {"x.tensor": 10})
    return error


@needs_root
def test_targets_that_do_not_fit_together_are_told_on_every_rank(tmp_path):
    """Two ranks restore to one disk that takes either but not both: NotEnoughSpaceError, no file replaced, nothing left."""
    with small_disk(tmp_path / "small", "16m") as disk:
        for error in values(spawn_ranks(_no_room_back, 2, tmp_path, disk)):
            assert isinstance(error, NotEnoughSpaceError), repr(error)


EARLY = {"intact.tensor": 3 * CHUNK + 5, "empty.tensor": 0, "edited.tensor": 10_000}


def _again(rank, folder):
    own, destination = folder / f"disk{rank}", folder / "ckpt"
    fill(own, EARLY if rank == 0 else {"intact.tensor": 5000, "long.tensor": LONG}, rank)
    with changing(own / "long.tensor", _append, destination) if rank else contextlib.nullcontext():
        error = told(consolidate_offloaded, {f"rank{rank}": own}, destination)
    dist.barrier()
    left = files_in(hidden(destination)) if hidden(destination).exists() else []
    dist.barrier()
    if rank == 0:
        (own / "edited.tensor").write_bytes(body("edited", 10_000))
    else:
        fill(own, {"long.tensor": LONG}, "second")
    dist.barrier()
    consolidate_offloaded({f"rank{rank}": own}, destination)
    return error, [name for name in left if "tensor" in name]


def test_a_call_after_a_failed_one_has_all_of_the_new(tmp_path):
    """What a failed call copied is gone; the next one copies everything as it is then, and nothing is left beside it."""
    for error, left in values(spawn_ranks(_again, 2, tmp_path)):
        assert isinstance(error, SourceChangedError), repr(error)
        assert not left
    destination = tmp_path / "ckpt"
    verify_files(destination, read_manifest(destination))
    assert (destination / "rank0/edited.tensor").read_bytes() == body("edited", 10_000)
    (destination / "rank0/edited.tensor").write_bytes(body((0, "edited.tensor"), 10_000))
    expect(destination / "rank0", EARLY, 0)
    assert (destination / "rank1/intact.tensor").read_bytes() == body((1, "intact.tensor"), 5000)
    assert (destination / "rank1/long.tensor").read_bytes() == body(("second", "long.tensor"), LONG)
    assert not hidden(destination).exists()


class Counting(Quiet):
    """A watchdog's view: what tells that the work goes on."""

    def __init__(self):
        self.bytes = 0

    def moved(self, count):
        self.bytes += count


def test_copying_a_large_file_shows_progress(tmp_path):
    """A large file takes long to be copied: the watchdog is told of its bytes, and does not take the writer for stalled."""
    fill(tmp_path, {"source": LONG})
    stamp = Stamp.of((tmp_path / "source").stat())
    copy = FileCopy(source=str(tmp_path / "source"), path=str(tmp_path / "copy"), stamp=stamp)
    progress = Counting()
    copy_files([copy], WriteOptions(direct=True, chunk_bytes=CHUNK, flush_every_bytes=LONG), progress)
    assert progress.bytes >= LONG


def _damaged(rank, folder):
    own, back, destination = folder / f"disk{rank}", folder / f"back{rank}", folder / "ckpt"
    fill(own, SIZES, rank)
    fill(back, {"1.tensor": 1, "deep/4097.tensor": 4097}, "old")
    consolidate_offloaded({f"rank{rank}": own}, destination)
    found = {}

    def restore(what, name=f"rank{rank}", source=destination):
        found[what] = told(restore_offloaded, source, {name: back})
        dist.barrier()
        expect(back, {"1.tensor": 1, "deep/4097.tensor": 4097}, "old")

    def on_rank_0(action):
        if rank == 0:
            action()
        dist.barrier()

    last = destination / "rank1/several.tensor"
    on_rank_0(lambda: flip_bit(last, SIZES["several.tensor"] - 1))
    restore("one bit")
    on_rank_0(lambda: flip_bit(last, SIZES["several.tensor"] - 1))
    restore("a name that rank 1 never gave", name="never" if rank else "rank0")
    restore("a name that only rank 0 gave", name="rank0")
    restore("no checkpoint", source=own)
    restore("nothing there", source=folder / "nowhere")
    restore("other sources", source=folder / f"ckpt{rank}")
    on_rank_0(lambda: os.rename(last, folder / "aside"))
    restore("a file is missing")
    on_rank_0(lambda: os.rename(folder / "aside", last))
    restore_offloaded(destination, {f"rank{rank}": back})
    expect(back, SIZES, rank)
    return found


def test_a_restore_replaces_all_files_of_all_ranks_or_none(tmp_path):
    """One flipped bit in what belongs to one rank, or a name it never gave: every rank raises, all targets are as before."""
    for found in values(spawn_ranks(_damaged, 3, tmp_path)):
        assert isinstance(found["one bit"], CorruptCheckpointError), repr(found["one bit"])
        assert found["one bit"].file == "rank1/several.tensor"
        assert isinstance(found["a file is missing"], CorruptCheckpointError), repr(found["a file is missing"])
        for what in ("a name that rank 1 never gave", "a name that only rank 0 gave"):
            assert isinstance(found[what], RestoreError), repr(found[what])
        for what in ("no checkpoint", "nothing there"):
            assert isinstance(found[what], SafeCheckpointError), (what, found[what])
        assert isinstance(found["other sources"], DesyncError), repr(found["other sources"])


def _in_the_way(rank, folder):
    own, destination = folder / f"disk{rank}", folder / "ckpt"
    fill(own, {"a.tensor": 10, "deep/b.tensor": 10}, rank)
    consolidate_offloaded({f"rank{rank}": own}, destination)
    found = []
    for what in ("a.tensor is a directory", "deep is a file"):
        target = folder / f"{what} {rank}"
        fill(target, {"mine.txt": 10} if rank else {"a.tensor": 5}, "old")
        if rank:
            fill(target, {"a.tensor/x": 10} if what == "a.tensor is a directory" else {"deep": 10})
        before = files_in(target)
        error = told(restore_offloaded, destination, {f"rank{rank}": target})
        dist.barrier()
        found.append((what, error, files_in(target) - before, rank or (target / "a.tensor").stat().st_size))
    return found


def test_what_stands_in_the_way_of_a_restore_is_told_before_anything_is_replaced(tmp_path):
    """A directory where rank 1's file should go, or a file for a directory: DirectoryError everywhere, targets as before."""
    for rank, found in enumerate(values(spawn_ranks(_in_the_way, 2, tmp_path))):
        for what, error, new, size in found:
            assert isinstance(error, DirectoryError), (what, error)
            assert not new, (what, rank)
            assert rank or size == 5, (what, rank)
