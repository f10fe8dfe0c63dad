"""Reads a run's ``events.jsonl``, builds a history of it, and shows that as one page or in a terminal.

Readers only: no lock is taken, no checkpoint is opened beyond its manifest, and no pickle is run. Imports neither torch nor a
framework, nor the packages of the extra ``cli``.
"""
