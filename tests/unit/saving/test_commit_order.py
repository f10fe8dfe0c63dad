"""The order of commits of files that are saved past a running pipeline."""

import os
import threading
import time

import pytest

from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.adapters import one_shot
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.home import candidates as catalog


@pytest.fixture
def new_process(monkeypatch):
    """What a process remembers is forgotten: the next save comes from another one."""
    return lambda: monkeypatch.setattr(one_shot, "_given", {})


def save(path):
    return save_archive({"x": 1}, path, sequence=one_shot.sequence_beside(path)).sequence


def test_each_file_saved_is_newer_than_those_before_whatever_the_clock(tmp_path, monkeypatch):
    """A process saves files beside each other, and the clock goes back each time."""
    newest = 0
    for number in range(3):
        monkeypatch.setattr(time, "time", lambda number=number: 1000.0 - number)
        sequence = save(tmp_path / f"{number}.ckpt")
        assert sequence > newest
        newest = sequence
    found = catalog.by_commit(catalog.list_files(tmp_path, ".ckpt"))
    assert [candidate.path.name for candidate in found] == ["2.ckpt", "1.ckpt", "0.ckpt"]


def test_a_jobs_next_save_is_newer_than_a_file_saved_beside_it(tmp_path, new_process, monkeypatch):
    """The job's next save is newer. Where no job was, the clock tells, and a process does not contradict itself."""
    held = tmp_path / "held"
    with Checkpointer(held, CheckpointConfig(record_events=False)) as ckpt:
        before = ckpt.save(1, {"x": 1}).result().sequence
        between = save(held / "d.ckpt")
        assert before < between < ckpt.save(2, {"x": 1}).result().sequence
    assert read_manifest(held / "d.ckpt").sequence == between
    new_process()
    first = save(tmp_path / "a.ckpt")
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert save(tmp_path / "b.ckpt") == first + 1
    assert not (tmp_path / ".safe_ckpt").exists()


def test_processes_that_know_nothing_of_each_other_save_in_one_order(tmp_path, new_process):
    """Several jobs and processes, one after the other: what is saved after is newer."""
    before = save(tmp_path / "manual/a.ckpt")
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}).result()
    new_process()
    assert save(tmp_path / "manual/b.ckpt") > before
    with Checkpointer(tmp_path, CheckpointConfig(record_events=False)) as ckpt:
        last = [ckpt.save(step, {"x": 1}).result().sequence for step in (2, 3, 4)][-1]
    new_process()
    assert save(tmp_path / "c.ckpt") > last


def test_of_two_saves_with_equal_numbers_the_later_one_is_newer(tmp_path):
    """A job and another process that saved at the same moment gave out one number."""
    save_archive({"x": 1}, tmp_path / "b.ckpt", sequence=5)
    time.sleep(0.002)  # the manifest has milliseconds
    save_archive({"x": 1}, tmp_path / "a.ckpt", sequence=5)
    found = catalog.by_commit(catalog.list_files(tmp_path, ".ckpt"))
    assert [candidate.path.name for candidate in found] == ["a.ckpt", "b.ckpt"]


def test_folders_that_come_and_go_do_not_matter(tmp_path):
    """Folders that others make and remove while a directory is listed, 200 times."""
    over = threading.Event()

    def come_and_go():
        while not over.is_set():
            for name in "abcdefgh":
                os.makedirs(tmp_path / name / "deep")
            for name in "abcdefgh":
                (tmp_path / name / "deep").rmdir()
                (tmp_path / name).rmdir()

    save(tmp_path / "x.ckpt")
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(200):
            assert [candidate.path.name for candidate in catalog.list_files(tmp_path, ".ckpt")] == ["x.ckpt"]
    finally:
        over.set()
        thread.join()
