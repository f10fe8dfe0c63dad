"""Reading checkpoints of any tool without running anything in them: what is in there, and are its bytes in order.

Everything here takes files that somebody else may have made to do harm: sizes are bounded before memory is taken, no pickle is
run, nothing outside the given path is opened. Needs no torch, except ``values``.
"""
