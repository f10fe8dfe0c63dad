"""Imported once, by the process that ranks of torchtitan's tests are forked from: see ``titan_runs.ready``."""

import titan_runs

titan_runs.on_cpu()
titan_runs.config("", 1)
