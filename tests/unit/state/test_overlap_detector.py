"""What changes a tensor while it is copied later, past the gate, is seen and named."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from safe_ckpt.core.state import overlap
from safe_ckpt.core.state.overlap import OverlapPlan


@pytest.mark.parametrize("count", [1, 5, 3000], ids=["one word", "small", "large"])
def test_an_edit_of_the_first_the_middle_or_the_last_byte_is_seen(count):
    """Also one that torch counts no version for: of a small tensor all is looked at, of a large one these parts."""
    layer = nn.Linear(count, 2, bias=False)
    changed = OverlapPlan([layer], [torch.optim.SGD(layer.parameters())]).detector()
    edited = layer.weight.detach().numpy().view("uint8").reshape(-1)
    for place in (0, len(edited) // 2, len(edited) - 1):
        edited[place] ^= 1
        assert changed() == "parameter weight"
        edited[place] ^= 1
        assert changed() == ""


def test_a_tensor_that_got_other_memory_while_it_was_copied_is_named(monkeypatch):
    """What was resized is named, of several the first, whatever lies in the memory that it had. Nothing changed: nothing is."""
    monkeypatch.setattr(overlap._Samples, "changed", lambda *_: None)
    net = nn.Sequential(OrderedDict(embedding=nn.Embedding(8, 16), first=nn.Linear(16, 32)))
    changed = OverlapPlan([net], [torch.optim.AdamW(net.parameters())]).detector()
    assert changed() == ""
    before = net.first.bias.untyped_storage().nbytes()
    net.first.bias.untyped_storage().resize_(before + (1 << 20))
    assert changed() == "parameter first.bias"
    net.embedding.weight.untyped_storage().resize_(1 << 22)
    assert changed() == "parameter embedding.weight"
