"""A pytest plugin: every ``Trainer`` of the tests of Transformers has the ``SafeCheckpointMixin``."""

import sys

import transformers
from transformers import trainer

from safe_ckpt.transformers import SafeCheckpointMixin

_STOCK = trainer.Trainer


class Trainer(SafeCheckpointMixin, _STOCK):
    """Named like the stock one: messages and files tell classes by name."""


Trainer.__module__, Trainer.__qualname__ = _STOCK.__module__, _STOCK.__qualname__
transformers.Trainer = Trainer
for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "transformers" and vars(_module).get("Trainer") is _STOCK:
        _module.Trainer = Trainer
