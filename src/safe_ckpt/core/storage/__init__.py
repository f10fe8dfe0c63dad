"""Durable bytes: atomic replacement, hashed reads, in a file system and in an object store. No torch, no ranks."""
