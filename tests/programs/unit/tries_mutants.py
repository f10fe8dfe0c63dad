"""Tries each mutant of src/safe_ckpt/tiny/small.py of TREE; says, as JSON, how each ended."""

import json
import sys
import tempfile
from pathlib import Path

from mutants.__main__ import Bench, Mutant
from mutants.change import changes

tree, name = Path(sys.argv[1]), Path("src/safe_ckpt/tiny/small.py")
source, said = (tree / name).read_text(), []
with tempfile.TemporaryDirectory() as scratch:
    bench = Bench(Path(scratch), ["tests/unit"], tree)
    for change in changes(source):
        tests, end = bench.tried(Mutant(name=name, change=change, source=change.of(source)))
        said.append([change.line, change.kind, [test.rpartition("::")[2] for test in tests], end.passed, end.by])
    assert (bench.tree / name).read_text() == source
print(json.dumps(said))
