"""The adapter interface: all that a framework adapter may import, in one place."""
