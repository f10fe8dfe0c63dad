"""Gives the file "a" and the folder "d" in FOLDER further names, and replaces one: prints what is behind them and all names."""

import os
import sys
from pathlib import Path

from safe_ckpt.core.storage import durable

exp = Path(sys.argv[1])
for number, target in enumerate((None, "a")):
    durable.publish_link(exp / "a", exp / "staged", durable.Link(path=exp / f"last{number}", target=target), Path)
durable.publish_file(exp / "new", exp / "last0")
durable.publish_link(exp / "d", exp / "staged", durable.Link(path=exp / "e"), Path)
print(
    (exp / "last0").read_text(), (exp / "last1").read_text(), (exp / "e/f").read_text(), os.stat(exp / "e/f").st_nlink
)
print(sorted(os.listdir(exp)))
