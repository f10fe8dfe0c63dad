"""Files that a framework unpickles are looked through first: what would run code is refused, and what states hold is not."""

import argparse
import collections
import datetime
import decimal
import enum
import functools
import os
import pathlib
import random
import subprocess
import tarfile
import types
import typing
import uuid

import numpy as np
import pytest
import torch

from safe_ckpt.adapters.pickles import refuse_code
from safe_ckpt.errors import HostileCheckpointError

FORMS = [{}, {"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}]


class Calls:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class Colour(enum.Enum):
    RED = 1


class Mine:
    class Inner:
        pass

    def __init__(self):
        self.x = 1


HOSTILE = {
    "a command": Calls(os.system, "true"),
    "a program": Calls(subprocess.Popen, ["true"]),
    "code": Calls(exec, "1"),
    "an expression within data": {"model": [torch.ones(2), (Calls(eval, "1"),)]},
    "an import": Calls(getattr, Calls(__import__, "os"), "system"),
    "a part of a function": Calls(getattr, os.path.join, "__globals__"),
    "another pickle": Calls(torch.storage._load_from_bytes, b""),
    "another file": Calls(torch.load, "x"),
    "code of a hub": Calls(torch.hub.load, "a/b", "c"),
    "a call by a call": Calls(map, os.system, ["true"]),
    "a call when a tensor is rebuilt": Calls(
        torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, ("true",), {}
    ),
    "a function of a library": Calls(np.fromfile, "x"),
}
LINEAR = torch.nn.Linear(2, 2)
DATA = {
    "states": {
        "model": LINEAR.state_dict(),
        "optimizer": torch.optim.Adam(LINEAR.parameters()).state_dict(),
        "lr": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(LINEAR.parameters(), lr=1.0), 1).state_dict(),
        "rng": (np.random.get_state(), random.getstate(), np.random.default_rng(1)),
    },
    "parts of torch": [
        LINEAR,
        torch.nn.functional.relu,
        torch.float32,
        torch.Size([1]),
        torch.device("cpu"),
        torch.strided,
    ],
    "tensors": [
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(1)),
        np.arange(3),
        np.float32(2),
        np.array(["a"]),
    ],
    "objects": [
        Colour.RED,
        Mine(),
        Mine.Inner(),
        ValueError("x"),
        functools.partial(torch.relu, input=None),
        typing.Any,
    ],
    "plain": [
        *(
            collections.defaultdict(list),
            collections.Counter("a"),
            collections.deque([1]),
            collections.OrderedDict(a=1),
        ),
        *(datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(1), pathlib.Path(), argparse.Namespace(a=1)),
        *(
            decimal.Decimal(1),
            random.Random(1),
            types.SimpleNamespace(a=1),
            uuid.uuid4(),
            range(3),
            slice(1),
            bytearray(b"1"),
        ),
        *({1}, frozenset([1]), 1j, b"", None, Ellipsis),
    ],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_run_code_is_refused(tmp_path, name):
    """In each of torch's formats; the error names the checkpoint, and the file in it."""
    for number, form in enumerate(FORMS):
        file = tmp_path / "step" / "deep" / f"{number}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(HOSTILE[name], file, **form)
        for path, named in ((file, ""), (tmp_path / "step", f"deep/{number}.pt")):
            with pytest.raises(HostileCheckpointError, match="Nothing of it was run") as caught:
                refuse_code(path)
            assert (caught.value.path, caught.value.file) == (str(path), named)
        file.unlink()


@pytest.mark.parametrize("name", DATA)
def test_what_states_hold_is_no_reason(tmp_path, name):
    """Tensors, arrays, generators, the plain types of Python's library and objects of the user's own pass."""
    for number, form in enumerate(FORMS):
        torch.save(DATA[name], tmp_path / f"{number}.pt", **form)
    refuse_code(tmp_path)


def test_other_files(tmp_path):
    """A pickle of the oldest protocol and a tar of torch's are refused; what is no pickle is left to whoever reads it."""
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "pipe.pt").symlink_to("nowhere")
    refuse_code(tmp_path)
    (tmp_path / "old.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(HostileCheckpointError, match=r"old.pkl.*os\.system"):
        refuse_code(tmp_path)
    (tmp_path / "old.pkl").rename(tmp_path / "pickle")
    with tarfile.open(tmp_path / "old.pt", "w") as archive:
        archive.add(tmp_path / "pickle", "pickle")
    with pytest.raises(HostileCheckpointError, match="2016"):
        refuse_code(tmp_path)


def test_what_the_user_has_named_is_admitted(tmp_path):
    """``add_safe_globals`` is the word of the one who trusts a function."""
    torch.save(Calls(np.fromfile, "x"), tmp_path / "a.pt")
    with torch.serialization.safe_globals([(np.fromfile, "numpy.fromfile")]):
        refuse_code(tmp_path)
    with pytest.raises(HostileCheckpointError):
        refuse_code(tmp_path)


def test_ranks_share_the_files(tmp_path):
    """Each file is looked through by one rank."""
    for name in ("a.pt", "b.pt"):
        torch.save(HOSTILE["code"] if name == "b.pt" else 1, tmp_path / name)
    refuse_code(tmp_path, 0, 2)
    with pytest.raises(HostileCheckpointError):
        refuse_code(tmp_path, 1, 2)
