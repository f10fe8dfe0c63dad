"""Durable bytes: atomic replacement, hashed reads; POSIX today, object stores beside it later. No torch, no ranks."""
