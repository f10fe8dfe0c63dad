"""A pytest plugin: every ``Trainer`` of the tests of Transformers has the ``SafeCheckpointMixin``, Seq2SeqTrainer included.

``UPSTREAM_VARIANT=sync``: every save is waited for.
"""

import os
import sys

import saves
import transformers
from transformers import trainer

from safe_ckpt.transformers import SafeCheckpointMixin
from safe_ckpt.transformers.saver import TransformersSaver

_STOCK = trainer.Trainer


class Trainer(SafeCheckpointMixin, _STOCK):
    """Named like the stock one: messages and files tell classes by name."""


def _wait_for_each_save() -> None:
    stock = TransformersSaver.save

    def save(self, *args):
        path = stock(self, *args)
        self.wait()
        return path

    TransformersSaver.save = save


if "transformers.trainer_seq2seq" in sys.modules:  # its Trainer would keep the stock base
    raise RuntimeError("swap_transformers must be loaded before transformers.trainer_seq2seq")
Trainer.__module__, Trainer.__qualname__ = _STOCK.__module__, _STOCK.__qualname__
for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "transformers" and vars(_module).get("Trainer") is _STOCK:
        _module.Trainer = Trainer
transformers.Trainer = Trainer
if os.environ.get("UPSTREAM_VARIANT") == "sync":
    _wait_for_each_save()
saves.count()
