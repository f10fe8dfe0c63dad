"""What the recorder in an audited process takes for a batch."""

import json
import sys

from kit import warm

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
