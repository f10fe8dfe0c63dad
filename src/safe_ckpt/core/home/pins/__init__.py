"""Pins: small files below the hidden folder by which readers keep checkpoints from being deleted, for as long as they live.

``record`` is what a pin says and what follows from it, ``shelf`` where pins lie, ``observer`` the side that deletes, and
``hold`` and ``book`` the side that reads.
"""
