"""The record of a directory over all its runs: what ``events.jsonl`` says, what became of every save, what a crash cost.

Readers and arithmetic: values in, values out. Nothing here is on the path of a save. Imports neither torch nor a framework.
"""
