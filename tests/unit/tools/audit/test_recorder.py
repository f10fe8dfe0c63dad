"""What the recorder in an audited process tells of a step."""

import json
import sys

import torch

from kit import warm
from safe_ckpt.tools.audit.recorder import digest

_SCRIPT = """
import sys, torch
from safe_ckpt.tools.audit.recorder import Recorder
Recorder(sys.argv[1], 0).register()
model = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
"""


_ITEMS = """
import sys, torch
from safe_ckpt.tools.audit.recorder import Recorder
Recorder(sys.argv[1], 0).register()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"model": model, "average": [one.detach().clone() for one in model.parameters()], "gradients": [None, None]}
state["itself"] = state
for _ in range(2):
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
"""


def lines(script, folder):
    """What a script tells whose first argument is the folder of its lines."""
    begin = (
        "import sys, torch\nfrom safe_ckpt.tools.audit.recorder import Recorder\nrecorder = Recorder(sys.argv[1], 0)\n"
    )
    done = warm.run([sys.executable, "-c", f"{begin}recorder.register()\n{script}", str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.jsonl")
    return list(map(json.loads, file.read_text().splitlines()))


def names(line, category):
    return sorted(name for name in line["values"] if name.startswith(f"{category}."))


_LOOP = """
class Logger:
    def log(self, numbers):
        pass

recorder.listen(Logger, "log")
first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
model = torch.nn.ModuleList([first, second])
groups = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.2}]
optimizer = torch.optim.SGD(groups, lr=0.1)
for step in range(2):
    with torch.no_grad():
        first(torch.ones(4, 3))
    first(torch.ones(4, 3)).sum().backward()
    if step == 0:
        Logger().log({"loss": 3, "name": "a", "all": torch.ones(3)})
    optimizer.step()
"""


def test_what_one_step_sees_is_told_of_that_step(tmp_path):
    """Each group's settings, the batch that is trained and none that is looked at, gradients, and what was logged."""
    one, other = lines(_LOOP, tmp_path)
    assert (one["values"]["groups.lr"], one["values"]["groups.lr of group 1"]) == (0.1, 0.2)
    assert [len(line["batch"]) for line in (one, other)] == [1, 1]
    assert [one["values"][f"gradients.{n}.bias"] for n in (0, 1)] == [digest(torch.full((2,), 4.0), 99), ""]
    assert [names(line, "logged") for line in (one, other)] == [["logged.loss"], []]
    assert one["values"]["logged.loss"] == [3.0]


_FORKED = """
import os
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if step == 2 and not os.fork():
        torch.set_num_threads(1)
        optimizer.step()
        os._exit(0)
    optimizer.step()
os.wait()
"""


def test_a_process_that_is_forked_counts_its_own_steps_in_a_file_of_its_own(tmp_path):
    """What a child does is no step of its parent."""
    begin = (
        "import sys, torch\nfrom safe_ckpt.tools.audit.recorder import Recorder\nRecorder(sys.argv[1], 0).register()\n"
    )
    assert warm.run([sys.executable, "-c", begin + _FORKED, str(tmp_path)]).returncode == 0
    told = [[json.loads(row)["step"] for row in file.read_text().splitlines()] for file in tmp_path.glob("*.jsonl")]
    assert sorted(told) == [[1], [1, 2, 3]]


_STOPPED = """
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.step()
"""


def test_a_process_ends_right_behind_its_last_step(tmp_path):
    """By SIGKILL, with the line of that step written."""
    begin = (
        "import sys, torch\nfrom safe_ckpt.tools.audit.recorder import Recorder\nrecorder = Recorder(sys.argv[1], 2)\n"
    )
    begin += "recorder.register()\n"
    assert warm.run([sys.executable, "-c", begin + _STOPPED, str(tmp_path)]).returncode == -9
    (file,) = tmp_path.glob("*.jsonl")
    assert [json.loads(row)["step"] for row in file.read_text().splitlines()] == [1, 2]


def test_of_a_large_tensor_values_that_lie_over_all_of_it_count():
    """Not its beginning alone; and two shapes of the same values are two."""
    tensor = torch.zeros(1000)
    before = digest(tensor, 400)
    tensor[990] = 1
    assert digest(tensor, 400) != before
    assert digest(tensor, 9999) != digest(tensor.reshape(10, 100), 9999)


_TWO = """
one, other = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (one, other)]
for _ in range(2):
    for module, optimizer in zip((one, other), optimizers):
        module(torch.ones(4, 3)).sum().backward()
        optimizer.step()
"""


def test_what_another_optimizer_trains_is_no_copy_of_the_weights(tmp_path):
    """A generator and a discriminator: a step tells its own weights, and the buffers of both, each under its name."""
    told = lines(_TWO, tmp_path)
    assert [names(line, "weights") for line in told] == [["weights.bias", "weights.weight"]] * 4
    assert [names(line, "copies") for line in told] == [[]] * 4
    assert {"buffers.running_mean", "buffers.1.running_mean"} <= set(names(told[0], "buffers"))
    assert told[0]["values"]["buffers.running_mean"] != told[0]["values"]["buffers.1.running_mean"]


_LATE = """
import copy
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(17):
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    if step == 3:
        holder = [[torch.optim.swa_utils.AveragedModel(model)]]
"""


def test_a_copy_of_the_weights_that_is_made_later_is_seen_later(tmp_path):
    """Modules are looked for at some steps only, for it takes as long as a look at all objects."""
    told = lines(_LATE, tmp_path)
    assert [len(names(line, "copies")) for line in told] == [0] * 15 + [1, 1]


_ASKED = """
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
get_optimizer_state_dict(model, optimizer)
model(torch.ones(4, 3)).sum().backward()
optimizer.step()
"""


def test_a_step_that_dcp_makes_to_have_a_state_to_load_into_is_none_of_the_training(tmp_path):
    """A start that resumes asks for the state dict of a fresh optimizer: its first step is the one behind that."""
    (line,) = lines(_ASKED, tmp_path)
    assert (line["step"], line["values"]["groups.lr"], line["values"]["state.step.weight"]) == (1, 0.1, 1.0)


_FROZEN = """
import gc
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gc.freeze()
model(torch.ones(4, 3)).sum().backward()
optimizer.step()
"""


def test_what_the_garbage_collector_does_not_tell_ends_no_script(tmp_path):
    """Behind ``gc.freeze`` no module is found: parameters have numbers then."""
    (line,) = lines(_FROZEN, tmp_path)
    assert names(line, "weights") == ["weights.0", "weights.1"]


_SCALED = """
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
scaler.scale(model(torch.ones(4, 3)).sum()).backward()
scaler.step(optimizer)
"""


def test_the_state_of_what_scales_the_losses_is_told(tmp_path):
    """A GradScaler is found wherever it is kept."""
    (line,) = lines(_SCALED, tmp_path)
    assert (line["values"]["scaler.scale"], line["values"]["scaler._growth_tracker"]) == (8.0, 0)


_SAMPLES = """
import safe_ckpt.data.batches
from safe_ckpt.data import resumable
recorder.follow(safe_ckpt.data.batches)
model = torch.nn.Linear(1, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, at):
        if at == 3:
            raise ValueError("unreadable")
        return torch.tensor([float(at)])

for workers in (0, 1):
    loader = resumable(torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=workers))
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except ValueError:
            continue
        model(batch * (batch[0] != 4)).sum().backward()
        optimizer.step()
"""


def test_the_samples_of_a_resumable_loader_are_told(tmp_path):
    """Also behind a batch that could not be made; a batch that the script changes is none of the loader's."""
    told = [line["samples"] for line in lines(_SAMPLES, tmp_path)]
    assert told == [[[0, 1]], [None], [[6, 7]], [[8, 9]]] * 2


def test_the_items_of_a_checkpoint_are_looked_at_one_by_one_for_copies_of_the_weights(tmp_path):
    """A resume may put gradients beside an average in what a script saves: they are no part of the average."""
    assert warm.run([sys.executable, "-c", _ITEMS, str(tmp_path)]).returncode == 0
    (file,) = tmp_path.glob("*.jsonl")
    first = json.loads(file.read_text().splitlines()[0])
    assert [name for name in first["values"] if name.startswith("copies")] == ["copies.state.average"]


def test_weights_that_a_module_is_made_of_are_no_batch(tmp_path):
    """A start makes its modules before its first step: that ``spectral_norm`` is called then is no difference of the data."""
    assert warm.run([sys.executable, "-c", _SCRIPT, str(tmp_path)]).returncode == 0
    (file,) = tmp_path.glob("*.jsonl")
    first, second = map(json.loads, file.read_text().splitlines())
    assert len(first["batch"]) == 1
    assert first["batch"] == second["batch"]
