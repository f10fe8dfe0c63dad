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


def test_weights_that_a_module_is_made_of_are_no_batch(tmp_path):
    """A start makes its modules before its first step: that ``spectral_norm`` is called then is no difference of the data."""
    assert warm.run([sys.executable, "-c", _SCRIPT, str(tmp_path)]).returncode == 0
    (file,) = tmp_path.glob("*.jsonl")
    first, second = map(json.loads, file.read_text().splitlines())
    assert len(first["batch"]) == 1
    assert first["batch"] == second["batch"]
