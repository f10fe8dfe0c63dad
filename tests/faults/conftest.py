"""The matrix: what each test counted, printed as one table at the end."""

from collections import Counter

import pytest

_rows = {}


@pytest.fixture
def matrix():
    """Call it with the fault, where it struck, and a Counter of outcomes."""

    def add(fault, where, outcomes):
        row = _rows.setdefault((fault, where), Counter())
        row.update(outcomes)

    return add


def pytest_terminal_summary(terminalreporter):
    if not _rows:
        return
    terminalreporter.section("fault matrix")
    widths = [max(len(row[column]) for row in _rows) for column in (0, 1)]
    for (fault, where), outcomes in _rows.items():
        counts = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items(), key=lambda item: -item[1]))
        line = f"{fault:<{widths[0]}} | {where:<{widths[1]}} | {sum(outcomes.values()):5} trials: {counts}"
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"{sum(sum(row.values()) for row in _rows.values())} trials in all")
