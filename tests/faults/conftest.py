"""The matrix: what each test counted, printed as one table at the end.

The jobs that are killed here copy with one thread of torch: they count their operations, and the order must be that of the
run before. All other tests have the two threads of ``tests/conftest.py``.
"""

from collections import Counter

import pytest


@pytest.fixture
def matrix(record_property):
    """Call it with the fault, where it struck, and a Counter of outcomes."""

    def add(fault, where, outcomes):
        record_property("matrix", (fault, where, dict(outcomes)))  # it comes with the report, from another process too

    return add


def pytest_terminal_summary(terminalreporter):
    rows = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "matrix":
                fault, where, outcomes = value
                rows.setdefault((fault, where), Counter()).update(outcomes)
    if not rows:
        return
    terminalreporter.section("fault matrix")
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for (fault, where), outcomes in sorted(rows.items()):
        counts = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items(), key=lambda item: -item[1]))
        line = f"{fault:<{widths[0]}} | {where:<{widths[1]}} | {sum(outcomes.values()):5} trials: {counts}"
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"{sum(sum(row.values()) for row in rows.values())} trials in all")
