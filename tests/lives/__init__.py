"""Whole lives of a directory in one process: random steps, beside a model in plain Python that says what must come of each."""
