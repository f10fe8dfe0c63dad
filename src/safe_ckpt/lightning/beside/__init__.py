"""Effects of other callbacks and of the module: what they set for an epoch, and what they put into the module meanwhile."""
