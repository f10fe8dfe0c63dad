"""Reading checkpoints of any tool without running anything in them: their content, and whether their bytes are intact.

The files may be hostile. So sizes are bounded before memory is allocated, no pickle is run, and nothing outside the given
path is opened. Needs no torch, except ``values``.
"""
