"""Power cuts at every point of a save: what a disk may then hold is computed, made real, and resumed from."""

import os
import shutil
from pathlib import Path

import pytest
from sweep import MARKER, SCENARIOS
from trials import sampled, sweep

from kit.faults import FaultyStorage
from kit.power_cut import FileOperation, crash_states, read_trace
from kit.thorough import THOROUGH
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import SafeCheckpointError
from support import run_program

OLD = {name: int(SCENARIOS[name].old) for name in SCENARIOS}


def recorded(log):
    """The trace, without the lock: its holder does not live through a power cut, and taking over its remains takes seconds."""
    return [op for op in read_trace(log) if not Path(op.path).name.startswith("lock")]


# The copy of a file that cannot be linked is made by the writer process, which the trace does not see.
SEEN = [(name,) for name in SCENARIOS if name != "directory, shares without hard links"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sampled(SEEN, lambda number: number % 3 == 1))
def test_a_power_cut_leaves_the_old_or_the_new(tmp_path, name, monkeypatch, matrix):
    """Every prefix of the save's operations, what was not fsynced dropped or reordered: the old or the new, never a mix, never
    none; and the new one once the save had been reported.
    """
    sweep(tmp_path, name, "record")
    monkeypatch.setattr(
        WriterSupervisor, "start", lambda _: None
    )  # nothing is written here: thousands of processes would be
    root, trace = tmp_path / "exp", recorded(tmp_path / "log")
    reported = next(i for i, op in enumerate(trace) if op.path.endswith(MARKER))
    seen = {0: 0, 1: 0, 2: 0}
    for state in crash_states(tmp_path / "before", trace, root, samples=8 if THOROUGH else 2):
        here = tmp_path / "here"
        state.write_to(here, root)
        found = SCENARIOS[name].find(here) if here.exists() else 0
        where = f"after {state.after} operations without {[trace[i] for i in state.lost]}"
        if state.after > reported:
            assert found == 2, where
        else:
            assert found in ({1, 2} if OLD[name] else {0, 2}), where
        seen[found] += 1
        shutil.rmtree(here, ignore_errors=True)
    matrix("power cut", name, {"the new one": seen[2], "the old one" if OLD[name] else "none yet": seen[OLD[name]]})
    assert seen[2] >= 5
    assert seen[OLD[name]] >= 5


def content_of(path):
    """The files there, by their place below; None where nothing has the name."""
    if path.is_file():
        return {"": path.read_text()}
    return {str(one.relative_to(path)): one.read_text() for one in path.rglob("f*")} if path.is_dir() else None


def make(path, kind, word):
    """A checkpoint of one file, or a directory with a folder in it."""
    for name in ("",) if kind == "file" else ("f", "deep/f"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(word * 1000)


@pytest.mark.parametrize("there", [False, True], ids=["a new name", "a name that is taken"])
@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("how", ["symbolic links", "hard links", "copies"])
def test_a_power_cut_leaves_a_further_name_whole(tmp_path, how, kind, there):
    """A name such as last, as a link, as hard links and as a copy: from the moment at which it is reported all that it names is
    there behind it, whatever was not synced is gone; before, it names what it named, or nothing.
    """
    root, log, storage = tmp_path / "exp", tmp_path / "log", FaultyStorage(tmp_path / "kit")
    make(root / "a", kind, "new")
    if there:
        make(root / "last", kind, "old")
    new, old = content_of(root / "a"), content_of(root / "last")
    shutil.copytree(root, tmp_path / "before")
    storage.watch(root, log=log)
    done = run_program("gives_a_further_name", str(root), how, env={**os.environ, **storage.environment})
    assert done.returncode == 0, done.stderr
    assert content_of(root / "last") == new
    trace = recorded(log)
    reported = next(i for i, op in enumerate(trace) if op.path.endswith("/reported"))
    seen = {True: 0, False: 0}
    for state in crash_states(tmp_path / "before", trace, root):
        here = tmp_path / "here"
        state.write_to(here, root)
        if not (here / ".safe_ckpt").exists():
            (here / ".safe_ckpt").mkdir()
        home = FileHome(here, lease_s=60)
        home.open()
        home.close()
        found = content_of(here / "last")
        where = f"after {state.after} operations without {[trace[i] for i in state.lost]}"
        assert found == new if state.after > reported else found in (old, new), where
        seen[found == new] += 1
        shutil.rmtree(here)
    assert min(seen.values()) >= 4


def test_the_simulation_finds_a_missing_fsync(tmp_path):
    """A file that is renamed into place without fsync: in some crash state it has the new name and not the bytes."""
    (tmp_path / "before").mkdir()
    root = str(tmp_path)
    careless = [
        FileOperation(name="create_new", path=f"{root}/new.tmp"),
        FileOperation(name="write", path=f"{root}/new.tmp", data=b"content", offset=-1),
        FileOperation(name="rename", path=f"{root}/new.tmp", other=f"{root}/final"),
    ]
    careful = [*careless[:2], FileOperation(name="sync", path=f"{root}/new.tmp"), *careless[2:]]

    def torn(trace):
        states = crash_states(tmp_path / "before", trace, tmp_path)
        return [s for s in states if s.files.get(f"{root}/final", b"content") != b"content"]

    assert torn(careless)
    assert not torn(careful)


def test_a_missing_fsync_of_ours_would_be_found(tmp_path, monkeypatch):
    """The same traces with the fsync of one file left out: the resume meets a damaged checkpoint under its final name."""
    sweep(tmp_path, "file, first save", "record")
    monkeypatch.setattr(WriterSupervisor, "start", lambda _: None)
    root = tmp_path / "exp"
    trace = [op for op in recorded(tmp_path / "log") if not (op.name == "sync" and op.path.endswith(".ckpt"))]
    bad = 0
    for state in crash_states(tmp_path / "before", trace, root, samples=2):
        here = tmp_path / "here"
        state.write_to(here, root)
        try:
            SCENARIOS["file, first save"].find(here)
        except (AssertionError, SafeCheckpointError):
            bad += 1
        shutil.rmtree(here, ignore_errors=True)
    assert bad
