"""Files that a framework unpickles are looked through first: what would run code is refused, and what states hold is not."""

import argparse
import collections
import datetime
import decimal
import enum
import functools
import importlib
import io
import itertools
import math
import operator
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tarfile
import types
import typing
import uuid
import zoneinfo

import numpy as np
import pandas as pd
import pytest
import torch
import torch.utils.collect_env

from safe_ckpt.adapters import torch_file
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


class Listed(list):
    def __init__(self, values):
        super().__init__(values)
        self.append_later = self


class Keyed(dict):
    def __init__(self, **values):
        super().__init__(**values)
        self.owner = self


def made(x):
    mine = Mine()
    mine.x = x
    return mine


class MadeByFunction(Mine):
    def __reduce__(self):
        return made, (self.x,)


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
    "an iterator that calls": Calls(list, Calls(itertools.starmap, torch.utils.collect_env.run, [("true",)])),
}
COMMAND = b"ctorch.utils.collect_env\nrun\n"
RAW = {
    "calls a method of what it has made": b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\n(Vx\ntRVunlink\ntR)R.",
    "calls a partial": b"cfunctools\npartial\n(" + COMMAND + b"Vtrue\ntR)R.",
    "appends to what it was told to append with": b"cargparse\nNamespace\n)\x81}Vappend\n" + COMMAND + b"sbVtrue\na.",
    "sets a state twice": b"cargparse\nNamespace\n)\x81}V__setstate__\n" + COMMAND + b"sbVtrue\nb.",
    "gives a class another method": b"cargparse\nNamespace\nN}V__setstate__\n" + COMMAND + b"s\x86b.",
    "a class from an object, and code after it": (
        b"cbuiltins\ngetattr\n(cargparse\nNamespace\n)\x81V__class__\ntR)\x810cos\nsystem\n(Vtrue\ntR."
    ),
    "arguments that are no tuple here": b"cos\nsystem\ncbuiltins\ntuple\n((lVtrue\natRR.",
    "another file, by a short name": b"ctorch\nload\n(Vx\ntR.",
    "code of a hub, by a path from above": b"\x80\x04ctorch\nhub.load\n(Va/b\nVc\ntR.",
    "a key that is asked for as a method": (
        b"clightning.fabric.utilities.data\nAttributeDict\n)\x81V__setstate__\n" + COMMAND + b"sVtrue\nb."
    ),
}
NOW = datetime.datetime.now(zoneinfo.ZoneInfo("UTC"))
FRAME = pd.DataFrame({"a": [1], "b": ["x"], "c": pd.to_datetime(["2020"])})
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
    "tables": [
        FRAME,
        FRAME["b"],
        pd.Timestamp(NOW),
        pd.Timedelta(1),
        pd.Categorical(["a"]),
        np.ma.array([1], mask=[1]),
    ],
    "made in a certain order": [Listed([1, 2]), Keyed(a=1), collections.UserList([1]), torch.nn.ModuleList([LINEAR])],
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
        *(
            NOW,
            signal.SIGTERM,
            io.BytesIO(b"1"),
            max,
            math.sqrt,
            operator.gt,
            operator.itemgetter("a"),
            re.compile("a"),
        ),
        *({1}, frozenset([1]), 1j, b"", None, Ellipsis),
    ],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_that_would_run_code_are_refused_by_name(tmp_path, name):
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


@pytest.mark.parametrize("name", RAW)
def test_pickles_that_call_what_they_made_themselves_are_refused(tmp_path, name):
    """Calls by way of what a pickle has made itself; also where the stand-ins could not follow it to its end."""
    (tmp_path / "custom_checkpoint_0.pkl").write_bytes(RAW[name])
    with pytest.raises(HostileCheckpointError, match="Nothing of it was run"):
        refuse_code(tmp_path)


def test_a_hostile_pickle_that_no_framework_reads_is_left_alone(tmp_path, caplog):
    """A pickle that somebody lays beside the state is unpickled by no framework: it takes no checkpoint away, nor a warning."""
    torch.save(MadeByFunction(), tmp_path / "my_statistics.pkl")
    refuse_code(tmp_path)
    torch_file("my_statistics.pkl", MadeByFunction())
    assert not caplog.records
    for name in ("custom_checkpoint_0.pkl", "random_states_3.pkl"):
        file = (tmp_path / "my_statistics.pkl").rename(tmp_path / name)
        with pytest.raises(HostileCheckpointError, match=name):
            refuse_code(tmp_path)
        file.rename(tmp_path / "my_statistics.pkl")


def test_a_state_that_a_resume_would_refuse_is_told_when_it_is_saved(tmp_path, caplog):
    """Once, with the name; and what the warning says to do makes it a state like any other."""
    for _ in range(3):
        torch_file("a.pt", {"model": LINEAR.state_dict(), "mine": [MadeByFunction()]})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "a.pt: a resume will refuse" in record.getMessage()
    assert f"calls {made.__module__}.made" in record.getMessage()
    torch.save(MadeByFunction(), tmp_path / "a.pt")
    with pytest.raises(HostileCheckpointError, match="add_safe_globals"):
        refuse_code(tmp_path)
    with torch.serialization.safe_globals([made]):
        refuse_code(tmp_path)


@pytest.mark.parametrize("name", DATA)
def test_states_that_a_resume_admits_are_saved_without_a_warning(caplog, name):
    """The rule of the save is that of the resume."""
    torch_file("b.pt", DATA[name])
    assert not caplog.records


@pytest.mark.parametrize("name", DATA)
def test_objects_that_states_usually_hold_are_admitted(tmp_path, name):
    """Tensors, arrays, generators, the plain types of Python's library and objects of the user's own pass."""
    for number, form in enumerate(FORMS):
        torch.save(DATA[name], tmp_path / f"{number}.pt", **form)
    refuse_code(tmp_path)


def test_old_pickles_and_tars_of_torch_are_refused(tmp_path):
    """A pickle of the oldest protocol and a tar of torch's are refused; what is no pickle is left to whoever reads it."""
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "pipe.pt").symlink_to("nowhere")
    refuse_code(tmp_path)
    (tmp_path / "custom_checkpoint_0.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(HostileCheckpointError, match=r"custom_checkpoint_0.pkl.*os\.system"):
        refuse_code(tmp_path)
    (tmp_path / "custom_checkpoint_0.pkl").rename(tmp_path / "pickle")
    with tarfile.open(tmp_path / "old.pt", "w") as archive:
        archive.add(tmp_path / "pickle", "pickle")
    with pytest.raises(HostileCheckpointError, match="2016"):
        refuse_code(tmp_path)


def test_functions_named_by_add_safe_globals_are_admitted(tmp_path):
    """``add_safe_globals`` is the word of the one who trusts a function."""
    torch.save(Calls(np.fromfile, "x"), tmp_path / "a.pt")
    with torch.serialization.safe_globals([(np.fromfile, "numpy.fromfile")]):
        refuse_code(tmp_path)
    with pytest.raises(HostileCheckpointError):
        refuse_code(tmp_path)


def test_each_file_is_looked_through_by_one_rank(tmp_path):
    """Each file is looked through by one rank."""
    for name in ("a.pt", "b.pt"):
        torch.save(HOSTILE["code"] if name == "b.pt" else 1, tmp_path / name)
    refuse_code(tmp_path, 0, 2)
    with pytest.raises(HostileCheckpointError):
        refuse_code(tmp_path, 1, 2)


def test_metadata_of_dcp_is_data_before_dcp_is_imported(monkeypatch):
    """A job that is started again looks through a sharded checkpoint first, and only then has a framework import DCP."""
    # What this module takes from DCP would otherwise be of a second import of it, for as long as the process lives.
    importlib.import_module("safe_ckpt.core.sharding.dcp_read")
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint.metadata", raising=False)
    refuse_code(pathlib.Path(__file__).parents[2] / "corpus/checkpoints/lightning_sharded/epoch=0-step=2.ckpt")
