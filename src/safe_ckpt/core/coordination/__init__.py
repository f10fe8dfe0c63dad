"""The ranks act as one: a key-value store, deadlines, heartbeats. No collectives."""
