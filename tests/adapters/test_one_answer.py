"""Whether a checkpoint would run code has one answer: a resume and each command give the same."""

import datetime
import fractions
import json
import os
import subprocess

import numpy as np
import pytest
import torch
import xxhash
from typer.testing import CliRunner

from kit.manifests import rewrite
from safe_ckpt import Checkpointer
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.adapters.pickles import refuse_code
from safe_ckpt.errors import HostileCheckpointError, NoValidCheckpointError
from safe_ckpt.lightning import SafeCheckpointIO
from safe_ckpt.tools.cli.app import app

pytestmark = pytest.mark.framework


class Calls:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class Mine:
    """A class of the user's."""

    class Inner:
        pass

    def __init__(self):
        self.x = [1]


HOSTILE = {
    "a command": Calls(os.mkdir, "made"),
    "a program": [Calls(subprocess.Popen, ["true"])],
    "an expression": {"deep": (Calls(eval, "1"),)},
    "a function of torch": Calls(torch.hub.load, "a/b", "c"),
    "a function of numpy": Calls(np.fromfile, "x"),
    "a part of a function": Calls(getattr, os.path.join, "__globals__"),
}
DATA = {
    "states": torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).state_dict(),
    "objects of the user's": [Mine(), Mine.Inner],
    "numpy": [np.arange(3), np.random.default_rng(1), np.float32(2)],
    "of Python's library": [fractions.Fraction(1, 3), datetime.timedelta(1), {1, 2}],
    "parts of torch": [torch.nn.Linear(2, 2), torch.float32, torch.device("cpu"), torch.nn.functional.relu],
}
CONTENT = {"state_dict": {"w": torch.ones(2)}, "global_step": 3, "epoch": 1, "loops": {}, "lr_schedulers": []}
RAW = {
    "makes an instance of a function": b"(itorch.cuda\nempty_cache\n.",
    "makes an object of a function": b"(ctorch.cuda\nempty_cache\no.",
    "calls a partial": b"cfunctools\npartial\n(cos\nsystem\nVtrue\ntR)R.",
    "appends with what it was given": b"cargparse\nNamespace\n)\x81}Vappend\ncos\nlistdir\nsbV.\na.",
    "sets a state twice": b"cargparse\nNamespace\n)\x81}V__setstate__\ncos\nlistdir\nsbV.\nb.",
    "gives a class another method": b"cargparse\nNamespace\nN}V__setstate__\ncos\nlistdir\ns\x86b.",
    "a dict that appends": b"ccollections\nOrderedDict\n)R}Vappend\ncos\nlistdir\nsbV.\na.",
}


def answers(place):
    """What each command says of a directory's newest checkpoint: whether it is taken."""
    run = CliRunner()
    verified = json.loads(run.invoke(app, ["verify", str(place), "--json"]).stdout)
    chosen = json.loads(run.invoke(app, ["resume-path", str(place.parent), "--json"]).stdout)
    return {
        "verify": not any(one["state"] == "damaged" for one in verified),
        "inspect": run.invoke(app, ["inspect", str(place)]).exit_code == 0,
        "resume-path": chosen["path"] == str(place),
    }


def taken(place):
    try:
        SafeCheckpointIO().load_checkpoint(place, weights_only=False)
    except HostileCheckpointError:
        return False
    return True


@pytest.mark.parametrize("name", [*HOSTILE, *DATA])
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock's"])
def test_of_a_file_that_a_framework_unpickles(tmp_path, name, ours):
    """A Lightning checkpoint with something else in it: it is loaded, and every command takes it, or none does."""
    place = tmp_path / "run" / "epoch=1-step=3.ckpt"
    place.parent.mkdir()
    content = {**CONTENT, "more": {**HOSTILE, **DATA}[name]}
    save_archive(content, place, sequence=1, step=3) if ours else torch.save(content, place)
    resumed = taken(place)
    assert resumed == (name in DATA)
    assert answers(place) == {"verify": resumed, "inspect": resumed, "resume-path": resumed}
    state = json.loads(CliRunner().invoke(app, ["list", str(place.parent), "--json"]).stdout)[0]["state"]
    assert state == ("valid" if ours else "unverified" if resumed else "damaged")  # of ours ``list`` reads no payload


@pytest.mark.parametrize("name", [*HOSTILE, "states"])
def test_of_a_state_of_ours(tmp_path, name):
    """A file of a ``Checkpointer`` was replaced, and its digest: ``resume`` and each command take it, or none does."""
    state = {"data": {"t": torch.ones(2), "n": 1}}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        place = tmp_path / "step-00000001"
        (file,) = place.glob("data*.pt")
        torch.save({"t": torch.ones(2), "n": HOSTILE.get(name, 1)}, file)
        facts = {"size_bytes": file.stat().st_size, "xxh3_128": xxhash.xxh3_128(file.read_bytes()).hexdigest()}
        rewrite(place, lambda manifest: [one.update(facts) for one in manifest["files"] if one["path"] == file.name])
        if name in HOSTILE:
            with pytest.raises(NoValidCheckpointError, match="cannot be read without running code"):
                ckpt.resume(state)
        else:
            assert ckpt.resume(state).step == 1
    resumed = name not in HOSTILE
    assert answers(place) == {"verify": resumed, "inspect": resumed, "resume-path": resumed}


@pytest.mark.parametrize("module", ["__main__", "a_package_of_the_users.deep"])
def test_of_what_the_users_program_alone_knows(tmp_path, module):
    """An enumeration of the script is no code: a command, which has not imported it, takes the checkpoint."""
    place = tmp_path / "run" / "checkpoint_0"
    place.mkdir(parents=True)
    torch.save(CONTENT["state_dict"], place / "pytorch_model.bin")
    (place / "random_states_0.pkl").write_bytes(b"\x80\x02c%s\nColour\nK\x01\x85R." % module.encode())
    found = answers(place)
    assert found["verify"]
    assert found["inspect"]


@pytest.mark.parametrize("name", RAW)
def test_of_a_pickle_that_calls_what_it_made_itself(tmp_path, name):
    """No list of names finds these; the framework's reader is not given them, and no command takes them."""
    place = tmp_path / "run" / "checkpoint_0"
    place.mkdir(parents=True)
    (place / "random_states_0.pkl").write_bytes(b"\x80\x02" + RAW[name])
    torch.save(CONTENT["state_dict"], place / "pytorch_model.bin")
    with pytest.raises(HostileCheckpointError, match="Nothing of it was run"):
        refuse_code(place)
    assert not answers(place)["verify"]
    assert not answers(place)["inspect"]
