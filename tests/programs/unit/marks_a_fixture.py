"""Prints the marks of conftest.py's ``object_server`` in a process in which no test has imported a part of the kit."""

import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

from kit import kinds  # noqa: E402

spec = importlib.util.spec_from_file_location("conftest_of_all", TESTS / "conftest.py")
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)
fixture = conftest.object_server
function = getattr(fixture, "_fixture_function", None) or fixture.__wrapped__
print("imported:", "kit.object_servers" in sys.modules)
print("marks:", sorted(kinds.marks_of(function)))
