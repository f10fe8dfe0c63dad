"""PEFT: an adapter alone, in PEFT's own layout, with a hash of the base that it was trained on.

``Checkpointer.export(model, directory, adapters_only=True)`` writes it. ``load_adapter`` puts it on its base, and on no other.
"""

from safe_ckpt.peft.adapter import base_hash, check_base, load_adapter

__all__ = ["base_hash", "check_base", "load_adapter"]
