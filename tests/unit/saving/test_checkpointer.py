"""A Checkpointer without a process group: the whole protocol, a real writer process, a real disk."""

import contextlib
import gc
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from small_runs import QUICK, config, steps

import safe_ckpt
from kit import warm
from kit.inside import once_written, writer_of
from kit.patience import scaled, wait_until
from kit.states import EVERYTHING, same
from safe_ckpt import (
    CheckpointConfig,
    Checkpointer,
    PerRank,
    Retention,
    SafeCheckpointError,
    WriterConfig,
)
from safe_ckpt.errors import (
    ClosedError,
    DirectoryError,
    DirectoryInUseError,
    NotEnoughSpaceError,
    RendezvousTimeout,
    SaveError,
    SaveSkippedError,
    StateError,
)
from support import (
    flip_bit,
    names_in,
    needs_root,
    program_path,
    run_program,
    small_disk,
    writer_processes,
    writers_of,
)


def test_names_become_files_that_others_read(tmp_path):
    """Tensors go to safetensors, plain data to JSON, the rest to a .pt that loads with weights_only."""
    state = {"weights": {"w": torch.ones(2)}, "one": torch.arange(3), "numbers": {"epoch": 3}, "mixed": EVERYTHING,
             "own": PerRank({"a": torch.ones(1)})}  # fmt: skip
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, state).result(timeout_s=20)
    folder = tmp_path / "step-00000001"
    assert steps(folder) == [
        "manifest.json",
        "mixed.pt",
        "numbers.json",
        "one.safetensors",
        "own.rank00000.safetensors",
        "weights.safetensors",
    ]
    same(EVERYTHING, torch.load(folder / "mixed.pt", weights_only=True))
    target = {"weights": {"w": torch.zeros(2)}, "one": torch.zeros(3, dtype=torch.int64), "numbers": {"epoch": 0, "x": 1},
              "mixed": {}, "own": PerRank({})}  # fmt: skip
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.resume(target)
    assert target["weights"]["w"].equal(torch.ones(2))
    assert target["one"].equal(torch.arange(3))
    assert target["numbers"] == {"epoch": 3}
    assert target["own"].value["a"].equal(torch.ones(1))
    same({**EVERYTHING}, target["mixed"])


@pytest.mark.parametrize("most", [None, 1 << 20])
def test_changing_everything_after_save_changes_nothing_on_disk(tmp_path, most):
    """The copy is complete when save returns, or all is written where max_host_bytes allows none: overwriting all parameters
    and containers at once never shows up.
    """
    state = {"model": torch.nn.Linear(2000, 2000), "list": [1, 2], "extra": {"t": torch.ones(100), "n": [1, (2,)]}}
    with Checkpointer(tmp_path, config(max_host_bytes=most)) as ckpt:
        for step in range(3):
            with torch.no_grad():
                state["model"].weight.fill_(step)
            handle = ckpt.save(step, state)
            with torch.no_grad():
                state["model"].weight.fill_(-1)
                state["extra"]["t"].zero_()
            state["list"].append(step)
            state["extra"]["n"].clear()
            handle.result(timeout_s=20)
            state["list"], state["extra"] = [1, 2], {"t": torch.ones(100), "n": [1, (2,)]}
            target = {"model": torch.nn.Linear(2000, 2000), "list": [], "extra": {}}
            ckpt.resume(target)
            assert (target["model"].weight == step).all()
            assert target["list"] == [1, 2]
            same({"t": torch.ones(100), "n": [1, (2,)]}, target["extra"])


def test_retention_keeps_last_best_and_every_nth_and_deletes_the_rest(tmp_path):
    """Last, best and every n-th stay, the rest goes; nothing is left in the hidden folder."""
    policy = Retention(keep_last=2, keep_best=1, metric="loss", keep_every_steps=4)
    with Checkpointer(tmp_path, config(retention=policy)) as ckpt:
        for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 2.0, 6.0, 7.0, 8.0]):
            ckpt.save(step, {"x": step}, metrics={"loss": loss})
        ckpt.wait()
    assert steps(tmp_path) == [f"step-{step:08d}" for step in (0, 1, 4, 6, 7)]
    assert os.listdir(tmp_path / ".safe_ckpt") == ["events.jsonl"]


def test_a_metric_that_no_save_has_keeps_all_and_is_warned_of_when_other_names_appear(tmp_path, caplog):
    """Once per directory in a process, also by a second job; again for a new name. The first save with it ends that."""
    rules = config(retention=Retention(keep_last=1, keep_best=1, metric="val"))

    def save(start, *metrics):
        caplog.clear()
        with Checkpointer(tmp_path, rules) as ckpt:
            for step, has in enumerate(metrics, start):
                ckpt.save(step, {"x": step}, metrics=has).result(timeout_s=20)
        return [record.getMessage() for record in caplog.records if "keep_best" in record.getMessage()]

    none, some = save(0, {}, {}, {"vol": 1.0}, {"vol": 2.0})
    assert "has a finite number as metric 'val': all stay (metrics there: none yet)" in none
    assert none.startswith(f"{tmp_path}: ")
    assert "(metrics there: vol). Correct retention.metric, or pass metrics={'val': ...}" in some
    assert save(4, {"vol": 0.5, "val": float("nan")}) == []
    assert steps(tmp_path) == [f"step-{step:08d}" for step in range(5)]
    assert save(5, {"val": 2.0}, {}) == []
    assert steps(tmp_path) == ["step-00000005", "step-00000006"]


def test_at_every_instant_one_checkpoint_is_there(tmp_path):
    """With keep_last=1 somebody who looks at any moment, after the first commit, finds a committed checkpoint."""
    stop, gaps, looks = threading.Event(), [], [0]

    def look():
        while not stop.is_set():
            looks[0] += 1
            if not any((path / "manifest.json").exists() for path in tmp_path.glob("step-*")):
                gaps.append(looks[0])

    with Checkpointer(tmp_path, config(retention=Retention(keep_last=1))) as ckpt:
        ckpt.save(0, {"w": torch.ones(200_000)}).result(timeout_s=20)
        watcher = threading.Thread(target=look)
        watcher.start()
        for step in range(1, 40):
            ckpt.save(step, {"w": torch.ones(200_000)})
        ckpt.wait()
        stop.set()
        watcher.join(timeout=20)
    assert steps(tmp_path) == ["step-00000039"]
    # glob and exists are two looks: a directory may be renamed between them, but its successor was there before.
    assert len(gaps) <= looks[0] * 0.01
    assert looks[0] > 100


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    """The same step twice: the second content, one directory, and it counts as the newest."""
    with Checkpointer(tmp_path, config()) as ckpt:
        first = ckpt.save(1, {"x": 1}).result(timeout_s=20)
        ckpt.save(2, {"x": 2}).result(timeout_s=20)
        again = ckpt.save(1, {"x": 10}).result(timeout_s=20)
        assert again.sequence > first.sequence
        target = {"x": 0}
        assert ckpt.resume(target).step == 1
        assert target == {"x": 10}
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda c: c.save(-1, {"a": 1}), "step"),
        (lambda c: c.save(1.5, {"a": 1}), "step"),
        (lambda c: c.save(True, {"a": 1}), "step"),
        (lambda c: c.save(1, {"a/b": 1}), "state['a/b']"),
        (lambda c: c.save(1, {".hidden": 1}), "state['.hidden']"),
        (lambda c: c.save(1, {"manifest": 1}), "state['manifest']"),
        (lambda c: c.save(1, {"a": 1, "A": 1}), "state"),
        (lambda c: c.save(1, [1]), "state"),
        (lambda c: c.save(1, {"a": 1}, metrics={"m": "low"}), "metrics['m']"),
        (lambda c: c.save(1, {"a": 1}, metrics={"m": 10**400}), "metrics['m']"),
        (lambda c: c.save(1, {"a": [object()]}), "state['a'][0]"),
    ],
)
def test_bad_saves_are_refused_by_name(tmp_path, call, key):
    """What cannot be saved raises at save, names the place, writes nothing; the next save works."""
    with Checkpointer(tmp_path, config()) as ckpt:
        with pytest.raises(StateError) as caught:
            call(ckpt)
        assert caught.value.key == key
        ckpt.save(9, {"a": 1}).result(timeout_s=20)
    assert steps(tmp_path) == ["step-00000009"]


def test_an_exception_of_a_state_dict_is_the_users_own(tmp_path):
    """What a user's state_dict() raises comes out of save() as it was raised."""

    class Broken:
        def state_dict(self):
            raise ZeroDivisionError("mine")

        def load_state_dict(self, state):
            pass

    with Checkpointer(tmp_path, config()) as ckpt, pytest.raises(ZeroDivisionError, match="mine"):
        ckpt.save(1, {"a": Broken()})


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    """The path is named, and nothing is changed."""
    path = tmp_path / "exp"
    path.write_text("mine")
    with pytest.raises(DirectoryError, match=str(path)):
        Checkpointer(path, config())
    assert path.read_text() == "mine"


@needs_root
def test_a_read_only_file_system_is_refused(tmp_path):
    """EROFS, with the path."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(DirectoryError) as caught:
            Checkpointer(disk / "exp", config())
        assert caught.value.errno == 30


@needs_root
def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path):
    """Too little space: needed and free are named, the earlier checkpoint stays, and a smaller save works afterwards."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        with Checkpointer(disk, config(record_events=False)) as ckpt:
            ckpt.save(1, {"w": {"t": torch.ones(300_000)}}).result(timeout_s=20)
            handle = ckpt.save(2, {"w": {"t": torch.ones(900_000)}})
            with pytest.raises(NotEnoughSpaceError) as caught:
                handle.result(timeout_s=20)
            assert caught.value.needed_bytes > caught.value.free_bytes > 0
            assert caught.value.errno == 28
            ckpt.save(3, {"w": {"t": torch.ones(1000)}}).result(timeout_s=20)
        assert steps(disk) == ["step-00000001", "step-00000003"]
        assert names_in(disk / ".safe_ckpt/pending") == []


@needs_root
def test_a_disk_that_fills_up_within_a_file_fails_the_save_by_name(tmp_path):
    """ENOSPC in the middle of a file: the same named error, no pending left, the next save works once there is room."""
    with small_disk(tmp_path / "disk", "6m") as disk:
        with Checkpointer(disk, config(writer=WriterConfig(chunk_bytes=4096, flush_every_bytes=4096))) as ckpt:
            ckpt.save(1, {"w": {"t": torch.ones(100_000)}}).result(timeout_s=20)
            filler = disk / "filler"
            real = shutil.disk_usage
            shutil.disk_usage = lambda path: real("/")  # the preflight must not save us here
            try:
                filler.write_bytes(bytes(4 << 20))
                with pytest.raises(NotEnoughSpaceError):
                    ckpt.save(2, {"w": {"t": torch.ones(1_000_000)}}).result(timeout_s=20)
            finally:
                shutil.disk_usage = real
            filler.unlink()
            ckpt.save(3, {"w": {"t": torch.ones(1_000_000)}}).result(timeout_s=20)
        assert steps(disk) == ["step-00000001", "step-00000003"]
        assert names_in(disk / ".safe_ckpt/pending") == []


def test_a_directory_in_use_is_refused_and_named(tmp_path):
    """A second process on one directory is told who has it; so is another door of this process."""
    with Checkpointer(tmp_path, config()):
        with pytest.raises(DirectoryInUseError, match="this process"), safe_ckpt.publishing(tmp_path, 1):
            pass
        code = f"from safe_ckpt import Checkpointer; Checkpointer({str(tmp_path)!r})"
        done = warm.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert f"in use by process {os.getpid()}" in done.stderr
    Checkpointer(tmp_path, config()).close()


def test_a_cell_that_is_run_again_takes_its_directory_over(tmp_path, caplog):
    """The same process makes its Checkpointer again: what is in flight is finished first, and the earlier one has ended."""
    first = Checkpointer(tmp_path, config(writer=WriterConfig(inline_bytes=0)))
    begun = first.save(1, {"w": {"t": torch.ones(1_000_000)}})
    second = Checkpointer(tmp_path, config())
    assert begun.committed.step == 1
    assert "the earlier Checkpointer" in caplog.text
    state = {"w": {"t": torch.zeros(1_000_000)}}
    assert second.resume(state).step == 1
    for call in (lambda: first.save(2, state), lambda: first.resume(state)):
        with pytest.raises(ClosedError, match="a later Checkpointer of this process took"):
            call()
    first.close()
    second.save(2, state).result(timeout_s=20)
    second.close()
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


def test_what_failed_in_the_earlier_one_is_raised_once_by_the_takeover(tmp_path):
    """A save whose error nobody has seen is not lost with the Checkpointer that is taken over; the next one opens."""
    first = Checkpointer(tmp_path, config())
    (tmp_path / ".safe_ckpt/pending").rmdir()
    (tmp_path / ".safe_ckpt/pending").write_text("in the way")
    failed = first.save(1, {"a": 1})
    wait_until(failed.done, 20, "the save that fails")
    with pytest.raises(DirectoryError):
        Checkpointer(tmp_path, config())
    (tmp_path / ".safe_ckpt/pending").unlink()
    with Checkpointer(tmp_path, config()) as ckpt:
        assert ckpt.save(1, {"a": 1}).result(timeout_s=20).step == 1


def test_a_handle_shows_how_its_save_stands(tmp_path):
    """A notebook's cell that ends with a handle shows how long it is written, then how long that took, and how large it is."""
    with Checkpointer(tmp_path, config(writer=WriterConfig(inline_bytes=0))) as ckpt:
        ckpt.save(0, {"w": torch.ones(10)}).result(timeout_s=20)
        os.kill(writer_of(ckpt).pid, signal.SIGSTOP)
        handle = ckpt.save(1, {"w": torch.ones(1 << 20)})
        assert re.fullmatch(r"<SaveHandle of step-00000001: being written for \S+ m?s>", repr(handle)), repr(handle)
        os.kill(writer_of(ckpt).pid, signal.SIGCONT)
        handle.result(timeout_s=20)
        assert re.fullmatch(r"<SaveHandle of step-00000001: committed after \S+ m?s, 4\.0 MiB>", repr(handle)), repr(
            handle
        )


def test_the_error_of_a_save_is_told_once(tmp_path):
    """A failure that nobody asked for is raised by the next save, once; the one after that works."""
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(0, {"a": 0}).result(timeout_s=20)
        (tmp_path / ".safe_ckpt/pending").rmdir()
        (tmp_path / ".safe_ckpt/pending").write_text("in the way")
        failed = ckpt.save(1, {"a": 1})
        wait_until(failed.done, 20, "the save that fails")
        with pytest.raises(DirectoryError):
            ckpt.save(2, {"a": 2})
        (tmp_path / ".safe_ckpt/pending").unlink()
        ckpt.save(3, {"a": 3}).result(timeout_s=20)
    assert steps(tmp_path) == ["step-00000000", "step-00000003"]


def test_on_failure_warn_raises_after_max_consecutive_failures(tmp_path, caplog):
    """on_failure="warn": training goes on, with one warning each; after max_consecutive_failures it raises."""
    with Checkpointer(tmp_path, config(on_failure="warn", max_consecutive_failures=3)) as ckpt:
        (tmp_path / ".safe_ckpt/pending").rmdir()
        (tmp_path / ".safe_ckpt/pending").write_text("in the way")
        for step in range(2):
            ckpt.save(step, {"a": 1})
            ckpt.wait()
        ckpt.save(2, {"a": 1})
        with pytest.raises(DirectoryError):
            ckpt.wait()
    said = [text for text in caplog.messages if "ENOTDIR" in text]
    assert [text.partition(" (")[2] for text in said] == [
        "rank 0) (failure 1 in a row; training goes on)",
        "rank 0) (failure 2 in a row; training goes on)",
        "rank 0) (result() raises this, or the next call)",
    ]


def test_close_raises_what_nobody_was_told(tmp_path):
    """The last save's error does not vanish at the end of the block, and does not mask another exception."""
    with pytest.raises(DirectoryError), Checkpointer(tmp_path, config()) as ckpt:
        (tmp_path / ".safe_ckpt/pending").rmdir()
        (tmp_path / ".safe_ckpt/pending").write_text("in the way")
        ckpt.save(1, {"a": 1})
    (tmp_path / ".safe_ckpt/pending").unlink()
    with pytest.raises(KeyError, match="mine"), Checkpointer(tmp_path, config()) as ckpt:
        (tmp_path / ".safe_ckpt/pending").rmdir()
        (tmp_path / ".safe_ckpt/pending").write_text("in the way")
        ckpt.save(2, {"a": 1})
        raise KeyError("mine")


def test_leaving_the_block_finishes_what_is_in_flight(tmp_path):
    """A save right before the end is committed, the writer process is gone, and the handle knows."""
    with Checkpointer(tmp_path, config()) as ckpt:
        handle = ckpt.save(1, {"w": {"t": torch.ones(5_000_000)}})
        assert len(writers_of(os.getpid())) == 1
    assert handle.done()
    assert handle.result().step == 1
    assert writers_of(os.getpid()) == []
    with pytest.raises(ClosedError, match="open a new one"):
        ckpt.save(2, {"a": 1})


def test_on_busy_skip_starts_no_save_beside_another(tmp_path):
    """on_busy="skip": a save while another is in flight is not started, and its handle says so; no later call raises that."""
    go_on = threading.Event()
    once_written(lambda _: go_on.wait(60) and None)
    with Checkpointer(tmp_path, config(on_busy="skip")) as ckpt:
        first = ckpt.save(1, {"a": 1})
        second = ckpt.save(2, {"a": 1})
        assert (second.name, second.done()) == ("step-00000002", True)
        with pytest.raises(SaveSkippedError):
            second.result(timeout_s=1)
        assert not first.done()
        go_on.set()
        first.result(timeout_s=50)
        ckpt.save(3, {"a": 1}).result(timeout_s=20)
    assert steps(tmp_path) == ["step-00000001", "step-00000003"]


def test_two_saves_in_flight_are_committed_in_order(tmp_path):
    """max_in_flight=2: two snapshots are held and both come out right, in order."""
    with Checkpointer(tmp_path, config(max_in_flight=2)) as ckpt:
        handles = [ckpt.save(step, {"w": {"t": torch.full((500_000,), float(step))}}) for step in range(6)]
        infos = [handle.result(timeout_s=30) for handle in handles]
        assert [info.sequence for info in infos] == sorted(info.sequence for info in infos)
        for info in infos:
            assert (safetensors.torch.load_file(info.path / "w.safetensors")["t"] == info.step).all()


def test_files_have_the_permissions_of_the_umask(tmp_path):
    """Checkpoints are as readable for others as anything else that the user writes."""
    before = os.umask(0o027)
    try:
        with Checkpointer(tmp_path / "x", config()) as ckpt:
            ckpt.save(1, {"a": 1, "t": torch.ones(1)}).result(timeout_s=20)
    finally:
        os.umask(before)
    for file in (tmp_path / "x/step-00000001").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o640, file


def test_hooks_see_what_happens_and_cannot_hurt(tmp_path):
    """Events arrive in order; a hook that raises is dropped and the save goes on."""
    seen = []

    def broken(event):
        raise RuntimeError("hook")

    with Checkpointer(tmp_path, config(), hooks=[broken, lambda event: seen.append(event.kind)]) as ckpt:
        ckpt.save(1, {"t": torch.ones(10)}).result(timeout_s=20)
        ckpt.resume({"t": torch.zeros(10)})
    assert seen == ["agreed", "snapshotted", "written", "committed", "resumed"]


def test_every_error_is_catchable_as_one(tmp_path):
    """SafeCheckpointError catches whatever this package raises."""
    with pytest.raises(SafeCheckpointError):
        Checkpointer("/dev/null/x", config())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("the writer process", "closes"),
        ("the writer process", "raises"),
        ("here", "returns"),
        pytest.param("the writer process", "returns", marks=pytest.mark.thorough),
        pytest.param("here", "closes", marks=pytest.mark.thorough),
        pytest.param("here", "raises", marks=pytest.mark.thorough),
    ],
)
def test_a_save_that_moves_bytes_is_not_given_up_at_the_end(tmp_path, how, where):
    """It takes longer than shutdown_s, in the writer process and in this one: committed, but after an exception given up."""
    failed = how == "raises"
    # Two thousand flushes take longer than either; a busy machine may let none through for 0.05 s.
    shutdown_s = "0.05" if failed else str(scaled(0.5))
    done = run_program("ends_while_bytes_move", str(tmp_path / "exp"), shutdown_s, where, how, finalize=True)
    assert done.returncode == int(failed), done.stderr
    assert steps(tmp_path / "exp") == ([] if failed else ["step-00000001"]), done.stderr
    if failed:
        assert "step-00000001 was not saved" in done.stderr
        assert "KeyError: 'mine'" in done.stderr


def test_close_does_not_return_as_if_all_were_well(tmp_path):
    """The disk hangs in this process at the end: close() comes back, and says that the outcome is not known."""
    done = run_program("closes_on_a_disk_that_hangs", str(tmp_path / "exp"))
    assert done.stdout.split() == ["CommitOutcomeUnknown", "step-00000001", "True"], done.stderr


def signal_writers(number):
    for writer in writers_of(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, number)


@pytest.mark.slow
def test_the_deadline_of_a_save_begins_when_its_turn_comes(tmp_path):
    """A save in front of it that uses up its own time takes none of the next one's."""
    timeouts = replace(QUICK, lengthy_s=5)
    state = {"m": {"w": torch.zeros(1_000_000)}}
    with Checkpointer(tmp_path, CheckpointConfig(timeouts=timeouts, max_in_flight=2)) as ckpt:
        ckpt.save(1, state).result()
        begun = time.monotonic()
        signal_writers(signal.SIGSTOP)
        hanging, waiting = ckpt.save(2, state), ckpt.save(3, state)
        while not hanging.done():
            signal_writers(signal.SIGSTOP)  # also the one that replaces a stopped one
            with contextlib.suppress(RendezvousTimeout):
                hanging.wait_until_over(0.1)
        signal_writers(signal.SIGCONT)
        with pytest.raises(SaveError, match="lengthy_s"):
            hanging.result()
        assert waiting.result().step == 3
        assert time.monotonic() - begun > timeouts.lengthy_s


def test_names_that_stand_for_another_items_file_are_refused(tmp_path):
    """{"a": PerRank(...), "a.rank00000": ...} would be one file."""
    with Checkpointer(tmp_path, config()) as ckpt, pytest.raises(StateError, match="rank00000"):
        ckpt.save(1, {"a": PerRank(1), "a.rank00000": 2})


def test_huge_numbers_are_refused_by_name(tmp_path):
    """A number of thousands of digits."""
    with Checkpointer(tmp_path, config()) as ckpt, pytest.raises(StateError, match="state\\['n'\\]"):
        ckpt.save(1, {"n": 10**5000})


@pytest.mark.parametrize("content", ["no json", '{"name": "an app"}'])
def test_folders_of_others_are_left_alone(tmp_path, content):
    """A folder with a manifest.json that is not ours is no checkpoint: not quarantined, not an error."""
    (tmp_path / "app").mkdir(parents=True)
    (tmp_path / "app/manifest.json").write_text(content)
    with Checkpointer(tmp_path, config()) as ckpt:
        assert ckpt.resume({"x": 0}) is None
        ckpt.save(1, {"x": 1}).result()
        ckpt.save(2, {"x": 2}).result()
        flip_bit(tmp_path / "step-00000002/x.json", 0)
        assert ckpt.resume({"x": 0}).step == 1
    assert (tmp_path / "app").is_dir()


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_another_tool_has_saved_under_the_name_of_a_step_is_kept(tmp_path, caplog, is_folder):
    """A folder without a manifest, or a file: it is in the quarantine when the step has been saved, and a warning says so."""
    place = tmp_path / "step-00000002"
    file = place / ".metadata" if is_folder else place
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"of a DCP checkpoint")
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(2, {"x": 2}).result()
    assert f"{place} has no manifest: it is kept as" in caplog.text
    kept = tmp_path / ".safe_ckpt/quarantine/step-00000002"
    assert (kept / ".metadata" if is_folder else kept).read_bytes() == b"of a DCP checkpoint"
    assert steps(tmp_path) == ["step-00000002"]


def test_nothing_in_the_working_directory_stands_in_for_the_standard_library(tmp_path):
    """A queue.py where the job was started does not kill the writer."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd/queue.py").write_text("raise SystemExit(7)")
    done = run_program("tells_of_respawns", str(tmp_path / "exp"), cwd=tmp_path / "cwd")
    assert done.stdout.strip() == "[]", done.stderr


def test_a_fork_of_the_trainer_does_not_keep_the_writer_alive(tmp_path):
    """A loader's worker holds a copy of every descriptor: after SIGKILL of the trainer the writer still ends."""
    command = [sys.executable, str(program_path("forks_a_worker_that_stays")), str(tmp_path / "exp")]
    with warm.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        (writer,) = writers_of(process.pid)
        process.kill()
        process.wait()
        try:
            wait_until(lambda: writer not in writer_processes(), what="the end of the writer")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_checkpointer_out_of_scope_commits_and_frees_its_directory(tmp_path):
    """Out of scope without close(): what was in flight is committed, the writer gone, the directory free."""
    ckpt = Checkpointer(tmp_path, config())
    ckpt.save(1, {"m": {"w": torch.zeros(3_000_000)}})
    pid = writer_of(ckpt).pid
    del ckpt
    deadline = time.monotonic() + 20
    lock = tmp_path / ".safe_ckpt" / "lock"  # given back last, and perhaps on the background thread
    while (pid in writer_processes() or lock.exists()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert pid not in writer_processes()
    assert steps(tmp_path) == ["step-00000001"]
    with Checkpointer(tmp_path, config()) as again:
        assert again.resume({}).step == 1
