"""Which checkpoint, read and verified by all ranks before anything is applied."""
