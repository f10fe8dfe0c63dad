"""The readers against what fuzzing found worth keeping. ``tests/fuzz/fuzz_formats.py`` says what may come out of them."""

import os
import signal
import subprocess
import threading

import pytest

from fuzz import fuzz_formats

CORPUS = sorted(fuzz_formats.CORPUS.iterdir())


@pytest.fixture
def readers(monkeypatch):
    """The readers, with nothing left that a payload could use without being noticed."""

    def noticed(*_, **__):
        raise fuzz_formats.BrokenPromise("the input ran code")

    for module, names in ((os, ("system", "popen", "execv", "posix_spawn")), (subprocess, ("Popen",))):
        for name in names:
            monkeypatch.setattr(module, name, noticed)
    fuzz_formats.load()
    return fuzz_formats.m


@pytest.mark.parametrize("target", [target.__name__ for target in fuzz_formats.TARGETS])
def test_no_input_of_the_corpus_breaks_a_reader(readers, target):
    """Only errors of ours come out, and OSError; in seconds; in bounded memory; and no code of an input runs."""
    inputs = [file for file in CORPUS if file.name.startswith(f"{target}-")]
    assert len(inputs) >= 3
    for file in inputs:
        data = file.read_bytes()
        assert fuzz_formats.TARGETS[data[0]].__name__ == target
        fuzz_formats.run_one(data)


def test_a_broken_reader_would_be_noticed(readers, monkeypatch):
    """Another exception, a payload that runs, and no answer in time: each comes out."""
    with pytest.raises(ZeroDivisionError):
        monkeypatch.setitem(readers, "pickle_reader", type("", (), {"read_pickle": lambda *_: 1 / 0}))
        fuzz_formats.run_one(b"\0N.")
    with pytest.raises(fuzz_formats.BrokenPromise, match="ran code"):
        monkeypatch.setitem(readers, "pickle_reader", type("", (), {"read_pickle": lambda *_: os.system("true")}))
        fuzz_formats.run_one(b"\0N.")
    with pytest.raises(fuzz_formats.BrokenPromise, match="no answer"):
        monkeypatch.setattr(fuzz_formats, "MOST_S", 0.05)
        monkeypatch.setitem(
            readers, "pickle_reader", type("", (), {"read_pickle": lambda *_: threading.Event().wait(20)})
        )
        fuzz_formats.run_one(b"\0N.")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_corpus_stays_small():
    """It is in every clone of the repository."""
    assert sum(file.stat().st_size for file in CORPUS) < 200 << 10
