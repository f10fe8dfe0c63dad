"""The home in an object store: its head, its lock, and how a save becomes a checkpoint there."""
