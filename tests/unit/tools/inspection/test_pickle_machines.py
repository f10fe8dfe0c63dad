"""The commands' reader of pickles builds what Python's own would, and refuses what a resume refuses."""

import contextlib
import io
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import fuzz_formats, hostile
from safe_ckpt.core.formats.pickles import StandIns, problems_in
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.tools.inspection.pickle_objects import Bounded, storage_of
from safe_ckpt.tools.inspection.pickle_reader import read_pickle
from safe_ckpt.tools.inspection.values import same

CHECKPOINTS = Path(__file__).parents[3] / "corpus" / "checkpoints"


class InC(StandIns):
    """C's machine, with the same stand-ins."""

    def persistent_load(self, pid):
        return storage_of(pid)


def built_in_c(data):
    names = Bounded()
    names.left = 1 << 62
    return InC(io.BytesIO(data), names).load()


def pickles_of_the_corpus():
    for file in sorted(CHECKPOINTS.rglob("*")):
        data = file.read_bytes() if file.is_file() else b""
        if data[:1] == b"\x80":
            yield data
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield from (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def hostile_pickles():
    yield from (hostile.PAYLOADS | hostile.QUIET_PAYLOADS).values()
    for file in sorted(fuzz_formats.CORPUS.iterdir()):
        data = file.read_bytes()
        starts = [1, *(at for at in range(2, len(data)) if data[at : at + 1] == b"\x80")]
        yield from (data[at:] for at in starts)


def test_every_pickle_of_the_corpus_has_the_structure_that_pythons_own_machine_builds():
    """Of each way to save, and each file that a framework adds."""
    found = list(pickles_of_the_corpus())
    assert len(found) > 70
    for data in found:
        assert same(read_pickle(data, "x"), built_in_c(data))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_of_every_protocol_is_read_as_python_reads_it(value, protocol):
    """Whatever Python writes for it, from texts of protocol 0 on."""
    data = pickle.dumps(value, protocol)
    assert same(read_pickle(data, "x"), built_in_c(data))
    if protocol > 2:  # below it bytes are made by a call
        assert same(read_pickle(data, "x"), value)


def test_what_a_resume_refuses_the_commands_refuse():
    """Of what fuzzing found, and of the payloads: no machine reads through what another one would run."""
    refused = 0
    for data in hostile_pickles():
        tops = {problem.split()[1].partition(".")[0] for problem in problems_in([io.BytesIO(data)])}
        if tops & {
            *sys.stdlib_module_names,
            "torch",
        }:  # other packages may be the user's, which a command does not import
            refused += 1
            with pytest.raises(SafeCheckpointError):
                read_pickle(data, "x")
    assert refused > 10
