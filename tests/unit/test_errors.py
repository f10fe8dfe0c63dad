import inspect
import os
import pickle

import pytest

from safe_ckpt import errors
from safe_ckpt.core.coordination.rounds import from_wire, to_wire
from safe_ckpt.errors import SafeCheckpointError, naming

SAMPLES = {
    "pid": 7,
    "message": "what went wrong",
    "key": "timeouts.barrier_s",
    "path": "/runs/exp",
    "phase": "commit",
    "seconds": 5.0,
    "ranks": (1, 2),
    "missing": (3,),
    "reason": "gone",
    "what": "step",
    "values": {"0": "1", "1": "2"},
    "name": "step-00000001",
    "cause": "OSError: no",
    "rank": 2,
    "rejected": {"a": "cut off"},
    "source": "/nvme/a.swp",
    "package": "torch",
    "found": "2.4.1",
    "lowest": "2.9",
    "remedy": "pip install torch",
    "because": "it lacks something",
    "step": 3,
    "back": 2,
    "url": "/far/run",
    "behind": 5,
    "limit": 4,
}
# What each says of these facts.
WORDS = {
    "CheckpointNotFoundError": "/runs/exp: what went wrong",
    "AuditError": "what went wrong",
    "ClosedError": "what went wrong",
    "CommitOutcomeUnknown": "step-00000001 may or may not be committed, the next resume will tell: OSError: no",
    "ConfigError": "/nvme/a.swp: timeouts.barrier_s: what went wrong",
    "CorruptCheckpointError": "/runs/exp: what went wrong",
    "DesyncError": "the ranks disagree on step: ranks [0]: 1; ranks [1]: 2. "
    "Every rank must make the same calls in the same order",
    "DirectoryError": "/runs/exp: what went wrong while commit (rank 2)",
    "DirectoryInUseError": "/runs/exp: in use by process 7 on host ?, started ?: what went wrong (rank 2)",
    "DirectoryNotSharedError": "/runs/exp: what went wrong (ranks [1, 2] do not see what rank 0 created)",
    "ForkedError": "step: process 7 opened this, and this is a forked child of it: "
    "use it there, or spawn and open another",
    "HostileCheckpointError": "/runs/exp: what went wrong",
    "IncompleteCheckpointError": "/runs/exp: what went wrong",
    "MirrorBehindError": "/runs/exp is committed, but 5 saves have no copy in /far/run, and 4 may have none: OSError: no",
    "NoValidCheckpointError": "/runs/exp: what went wrong\n  a: cut off",
    "NotEnoughSpaceError": "/runs/exp: not enough space: 0 bytes needed, 0 bytes free. what went wrong (rank 2)",
    "PeerLostError": "commit: lost ranks [1, 2]: gone",
    "RendezvousTimeout": "commit: waited 5.0 s, missing ranks: [3]",
    "RestoreError": "cannot restore timeouts.barrier_s from /runs/exp: what went wrong",
    "SaveError": "step-00000001 was not saved: rank 2 failed in commit: OSError: no",
    "SaveSkippedError": "step-00000001 was skipped: OSError: no",
    "SourceChangedError": "step-00000001 was not saved: rank 2 failed in commit: OSError: no",
    "ResumeDiffersError": "what went wrong",
    "StateError": "cannot save timeouts.barrier_s: what went wrong (rank 2)",
    "TamperedError": "timeouts.barrier_s: this value was not written by a rank of this job. Another program writes to the "
    "port of rank 0's store: let no other hosts and users reach it (network.interface)",
    "UnexpectedError": "rank 2 failed in commit: OSError: no",
    "UnhealthyStateError": "training went bad by step 3: step. /runs/exp is committed as unhealthy, so no resume takes it",
    "UnsupportedFormatError": "/runs/exp: what went wrong",
    "UnsupportedVersionError": "torch 2.4.1 is too old, 2.9 is the oldest that is supported (it lacks something): "
    "pip install torch",
    "WriterError": "step-00000001 was not saved: rank 2 failed in commit: OSError: no",
}


def _all() -> list[SafeCheckpointError]:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SafeCheckpointError)]
    built = []
    for kind in kinds:
        if kind in (SafeCheckpointError, errors.CoordinationError):
            continue
        wanted = inspect.signature(kind).parameters
        built.append(kind(**{key: value for key, value in SAMPLES.items() if key in wanted}))
    return built


@pytest.mark.parametrize("error", _all(), ids=lambda error: type(error).__name__)
def test_survives_pickling_and_the_wire(error):
    """An error keeps its class, its fields and its words when it crosses a process or a rank."""
    for copy in (pickle.loads(pickle.dumps(error)), from_wire(to_wire(error, rank=0, phase="x"))):
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert str(copy)
        assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        ("ConfigError", ValueError),
        ("StateError", TypeError),
        ("DirectoryError", OSError),
        ("NotEnoughSpaceError", OSError),
        ("RendezvousTimeout", TimeoutError),
        ("PeerLostError", ConnectionError),
        ("SaveError", RuntimeError),
        ("CommitOutcomeUnknown", RuntimeError),
        ("CorruptCheckpointError", ValueError),
        ("UnhealthyStateError", ArithmeticError),
        ("MirrorBehindError", RuntimeError),
        ("NoValidCheckpointError", FileNotFoundError),
        ("CheckpointNotFoundError", FileNotFoundError),
        ("UnsupportedVersionError", ImportError),
    ],
)
def test_every_error_is_also_its_natural_builtin(kind, builtin):
    """Code that knows nothing of safe_ckpt catches its errors by the builtin it expects."""
    assert issubclass(getattr(errors, kind), builtin)


def test_foreign_errors_cross_with_their_facts():
    """An OSError keeps its errno and path on the other ranks; anything else keeps its class name and message."""
    from_disk = from_wire(to_wire(PermissionError(13, "Permission denied", "/x"), rank=3, phase="prepare"))
    assert isinstance(from_disk, OSError)
    assert (from_disk.errno, from_disk.path, from_disk.rank) == (13, "/x", 3)
    other = from_wire(to_wire(KeyError("loss"), rank=1, phase="save"))
    assert "KeyError" in str(other)
    assert "rank 1" in str(other)


@pytest.mark.parametrize("error", [KeyError("loss"), StopIteration(3), StopAsyncIteration(), RuntimeError("no")])
def test_a_foreign_error_is_named_whatever_it_is(error):
    """Rank and phase are in the error, also of a StopIteration, which would end a caller's loop in silence."""
    with (
        pytest.raises(errors.UnexpectedError, match="rank 1 failed in reading") as caught,
        naming(rank=1, phase="reading"),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_timeout_names_phase_seconds_and_ranks():
    """A timeout tells what was waited for, how long, and who did not come."""
    text = str(errors.RendezvousTimeout(phase="save", seconds=5, missing=(7, 3)))
    assert text == "save: waited 5.0 s, missing ranks: [3, 7]"


@pytest.mark.parametrize("error", _all(), ids=lambda error: type(error).__name__)
def test_an_error_says_its_own_words(error):
    """Each class says what went wrong and where; nothing that it inherits, such as OSError's own words, hides it."""
    assert str(error) == WORDS[type(error).__name__]


def test_words_promise_no_more_than_is_known():
    """A save error says that nothing was committed, so an unknown outcome is none; a wait for one thing names no ranks."""
    assert not issubclass(errors.CommitOutcomeUnknown, errors.SaveError)
    assert str(errors.RendezvousTimeout(phase="saving step-1", seconds=1.0)) == "saving step-1: not over after 1.0 s"
    assert "missing ranks: [1]" in str(errors.RendezvousTimeout(phase="hold", seconds=1.0, missing=(1,)))


def test_an_error_without_a_file_says_what_it_was():
    """What the system refused keeps its number; a text alone is not taken for a directory's. Neither has a place made up."""
    full = errors.named(OSError(28, "No space left on device"), rank=1, phase="writing")
    assert (str(full), full.errno, full.filename) == (
        "No space left on device [ENOSPC] while writing (rank 1)",
        28,
        None,
    )
    text = errors.named(OSError("no such model"), rank=1, phase="load_checkpoint")
    assert str(text) == "rank 1 failed in load_checkpoint: OSError: no such model"
    assert isinstance(text, errors.UnexpectedError)


def test_a_descriptor_is_no_place(tmp_path):
    """What fails on a descriptor is named by the place that it was opened for, not by its number."""
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError) as raised:
            open(fd, "rb")  # noqa: SIM115
    finally:
        os.close(fd)
    assert str(errors.named(raised.value, rank=0, phase="reading", path=tmp_path)).startswith(f"{tmp_path}: ")
    assert str(errors.named(raised.value, rank=0, phase="reading")).startswith("Is a directory")
