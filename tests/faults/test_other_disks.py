"""File systems that lack something: direct writes, exchange, hard links, symbolic links, figures of their size."""

import errno
import logging
import mmap
import os
import subprocess
import sys
import types

import pytest
import torch

from kit.disks import small_disk
from kit.inside import forget_refusals_of_direct_io
from kit.writing import write_file
from safe_ckpt import Checkpointer
from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.storage import direct_io, durable, reader
from safe_ckpt.core.storage.direct_io import WriteOptions
from safe_ckpt.errors import DirectoryError
from safe_ckpt.testing import FaultyStorage
from support import Quiet, names_in, program_path


def run_faulty(tmp_path, program, *args, kinds, error, always=True, at=1):
    storage = FaultyStorage(tmp_path / "kit")
    storage.fail(at, tmp_path / "exp", error, always=always, kinds=kinds)
    command = [sys.executable, str(program_path(program)), str(tmp_path / "exp"), *args]
    environment = {**os.environ, **storage.environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    return done.stdout.splitlines(), done.stderr, storage.count


@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
def test_direct_writes_that_are_refused_go_through_the_page_cache(tmp_path, most_bytes):
    """EINVAL at the first direct write: the same saves, read again, one line in the log of the job, and no second try."""
    said, stderr, count = run_faulty(
        tmp_path, "saves_thrice_and_resumes", str(most_bytes), kinds=("direct",), error=errno.EINVAL
    )
    assert "resumed 3 3 {3.0}" in said, stderr
    assert len([line for line in said if "refuses direct writes" in line]) == 1, said
    # Of what is small and comes first too: a file or two were under way when it was found out, later saves ask no more.
    assert 1 <= count <= 2


def test_a_refusal_of_direct_writes_is_said_once_for_a_file_system(tmp_path, caplog, monkeypatch):
    """Several files at a time find out, a replaced process finds out again: one line."""
    forget_refusals_of_direct_io(monkeypatch)
    with caplog.at_level(logging.INFO):
        for path in ("a", "a", "b"):
            direct_io.write_without_direct(7, path)
    assert len(caplog.records) == 1
    assert direct_io.refused_direct() == {7: "a"}
    direct_io.write_without_direct(os.stat(tmp_path).st_dev, "c")
    fd, direct = direct_io.create_file(str(tmp_path / "f"), True)
    os.close(fd)
    assert not direct


@pytest.mark.parametrize("length", [0, 1, 4096, 3_000_001])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_direct_write_refused_anywhere_in_a_file_gives_the_same_bytes(tmp_path, monkeypatch, length, after):
    """Whether the first write, a later one or the last part is refused: the file is what it should be."""
    forget_refusals_of_direct_io(monkeypatch)
    real, count = os.pwrite, 0

    def refusing(fd, data, offset):
        nonlocal count
        count += 1
        import fcntl

        if count > after and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    with mmap.mmap(-1, max(length, 4096)) as memory, memoryview(memory) as view:
        memory[:length] = os.urandom(length)
        options = WriteOptions(direct=True, chunk_bytes=1 << 20, flush_every_bytes=1 << 20)
        result = write_file(WriteTask(path=str(tmp_path / "f"), offset=0, length=length), view, options, Quiet())
        assert (tmp_path / "f").read_bytes() == memory[:length]
    assert result.size_bytes == length


@pytest.mark.parametrize("short", [1, 512, 4096, 5000])
def test_direct_writes_that_end_early_give_the_same_bytes(tmp_path, monkeypatch, short):
    """A direct write brings less than was asked for, even less than a page: the file is what it should be, and no error."""
    forget_refusals_of_direct_io(monkeypatch)
    real = os.pwrite

    def ending_early(fd, data, offset):
        import fcntl

        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        return min(real(fd, data, offset), short) if direct else real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", ending_early)
    length = 300_001
    with mmap.mmap(-1, length) as memory, memoryview(memory) as view:
        memory[:] = os.urandom(length)
        options = WriteOptions(direct=True, chunk_bytes=1 << 20, flush_every_bytes=1 << 20)
        result = write_file(WriteTask(path=str(tmp_path / "f"), offset=0, length=length), view, options, Quiet())
        assert (tmp_path / "f").read_bytes() == memory[:]
    assert result.size_bytes == length
    assert direct_io.refused_direct() == {}  # the next file is written directly again


def test_direct_reads_that_are_refused_are_made_through_the_page_cache(tmp_path, monkeypatch):
    """EINVAL at a read of a file that was opened with O_DIRECT: the same bytes."""
    import fcntl

    real = os.preadv

    def refusing(fd, buffers, offset, *flags):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset, *flags)

    data = os.urandom(9_000_001)
    (tmp_path / "f").write_bytes(data)
    expected = reader.digest_of(tmp_path / "f", len(data))
    monkeypatch.setattr(os, "preadv", refusing)
    assert reader.digest_of(tmp_path / "f", len(data)) == expected
    memory, digest = reader.read_whole(tmp_path / "f", len(data))
    assert (memory[: len(data)], digest) == (data, expected)


def run_traced(tmp_path, *options):
    """Save one step three times under strace."""
    command = ["strace", "-f", "-qq", *options]
    command += [sys.executable, str(program_path("saves_one_step_thrice")), str(tmp_path / "exp")]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


RARELY = ("EINVAL", "ENOSYS", "EOPNOTSUPP", "EPERM")


@pytest.mark.parametrize("error", ["EXDEV", *(pytest.param(error, marks=pytest.mark.thorough) for error in RARELY)])
def test_a_step_is_replaced_by_two_renames_where_names_cannot_be_exchanged(tmp_path, error):
    """Each errno with which exchanging two names is refused: a step that is saved again is replaced by two renames."""
    options = ["-o", str(tmp_path / "trace"), "-e", "trace=renameat2", "-e", f"inject=renameat2:error={error}"]
    done = run_traced(tmp_path, *options)
    assert done.stdout.split() == ["3"], done.stderr
    assert (tmp_path / "trace").read_text().count("RENAME_EXCHANGE") == 2
    assert names_in(tmp_path / "exp/.safe_ckpt/trash") == []


def test_an_exchange_that_cannot_be_taken_back_is_not_taken_for_undone(tmp_path, monkeypatch):
    """The disk does not confirm the new name and the second exchange is refused: the outcome is unknown, nothing is deleted."""
    one, other = tmp_path / "staged", tmp_path / "final"
    for path in (one, other):
        path.mkdir()
        (path / "f").write_text(path.name)
    real, asked = durable.exchange, []

    def once(*names):
        asked.append(names)
        return real(*names) if len(asked) == 1 else False

    def unconfirmed(path):
        if path == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(durable, "exchange", once)
    monkeypatch.setattr(durable, "sync_directory", unconfirmed)
    with pytest.raises(durable.HalfCommittedError):
        durable.publish_directory(one, other, tmp_path / "aside")
    assert (one / "f").read_text() == "final"


@pytest.mark.parametrize("error", ["EPERM", "ENOTSUP", "ENOSYS", "EMLINK", "EXDEV"])
def test_a_file_system_without_links_gets_durable_copies(tmp_path, error):
    """Further names are durable copies, files are replaced by one rename without a name to go back to, nothing is left."""
    exp = tmp_path / "exp"
    (exp / "d").mkdir(parents=True)
    (exp / "a").write_text("bytes")
    (exp / "new").write_text("replaced")
    (exp / "d/f").write_text("deep")
    said, stderr, count = run_faulty(tmp_path, "publishes_links", kinds=("link",), error=getattr(errno, error))
    assert said == ["replaced bytes deep 1", "['a', 'd', 'e', 'last0', 'last1']"], stderr
    assert count >= 4


@pytest.mark.parametrize("syscall", ["fallocate", "fadvise64"])
def test_saves_work_without_fallocate_and_cache_advice(tmp_path, syscall):
    """No fallocate, no advice on what to cache: everything is saved and resumed all the same."""
    inject = f"inject={syscall}:error=EOPNOTSUPP"
    done = run_traced(tmp_path, "-o", "/dev/null", "-e", f"trace={syscall}", "-e", inject)
    assert done.stdout.split() == ["3"], done.stderr


def test_a_size_of_zeros_is_no_full_disk(tmp_path, monkeypatch):
    """``statfs`` with zeros, or without an answer: saves are made."""
    with monkeypatch.context() as patch:
        for total, free in ((0, None), (1000, 0)):
            usage = types.SimpleNamespace(total=total, free=0)
            patch.setattr(durable.shutil, "disk_usage", lambda _, usage=usage: usage)
            assert durable.free_bytes(tmp_path) == free
    for how in ("error=ENOSYS", "retval=0"):  # without the call the answer stays what it was: zeros
        trace, inject = "trace=statfs,fstatfs", f"inject=statfs,fstatfs:{how}"
        done = run_traced(tmp_path, "-o", "/dev/null", "-e", trace, "-e", inject)
        assert done.stdout.split() == ["3"], done.stderr


def test_nothing_depends_on_pages_of_4_kib(tmp_path):
    """Nothing maps, advises or allocates at places or in lengths that only fit pages of 4 KiB (told by hand, not run there)."""
    command = [sys.executable, str(program_path("saves_on_large_pages")), str(tmp_path / "exp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines()[0] == "True True", done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", ["EINVAL", "ENOTSUP"])
def test_a_file_system_that_syncs_no_directories_is_used_and_said_once(tmp_path, error):
    """9p, vboxsf and others refuse fsync of a directory: saves are made, and one warning says what they lack."""
    said, stderr, count = run_faulty(
        tmp_path, "saves_thrice_and_resumes", "0", kinds=("sync folder",), error=getattr(errno, error)
    )
    assert "resumed 3 3 {3.0}" in said, stderr
    assert len([line for line in said if "refuses fsync of a directory" in line]) == 1, said
    assert count > 3


def test_what_cannot_be_deleted_for_a_moment_fails_no_save(tmp_path):
    """EBUSY at every unlink, as network file systems answer for what is open elsewhere: saves of any size are made."""
    said, stderr, count = run_faulty(tmp_path, "saves_thrice_and_resumes", "0", kinds=("unlink",), error=errno.EBUSY)
    assert "resumed 3 3 {3.0}" in said, stderr
    assert count


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
def test_what_is_mounted_is_not_replaced_and_told_as_that(tmp_path):
    """The root of a file system, and a folder that is mounted once more, as a container's volume is."""
    volume = tmp_path / "a volume"
    weights = {"w": torch.ones(3)}
    with small_disk(volume, "1m"), Checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(DirectoryError, match="a file system is mounted there"):
            ckpt.export(weights, volume)
        (volume / "in it").mkdir()
        subprocess.run(["mount", "--bind", volume / "in it", volume / "in it"], check=True)
        try:
            with pytest.raises(DirectoryError, match="name a folder below it"):
                ckpt.export(weights, volume / "in it")
            assert ckpt.export(weights, volume / "in it/weights").result(timeout_s=30).path.is_dir()
        finally:
            subprocess.run(["umount", "-l", volume / "in it"], check=True)
