"""Saves twice to the folder FOLDER, "given", or to a name below it that is "written" here."""

import sys

import torch

from safe_ckpt import Checkpointer
from safe_ckpt.errors import DirectoryError

given = sys.argv[1]
path = given if sys.argv[2] == "given" else given + "/l\u00e4ufe"
try:
    for step in (1, 2):
        with Checkpointer(path) as ckpt:
            info = ckpt.resume({"a": torch.zeros(2)})
            ckpt.save(step, {"a": torch.ones(2)}).result()
    print("resumed", info.step)
except DirectoryError as error:
    print(type(error).__name__, ascii(str(error)))
