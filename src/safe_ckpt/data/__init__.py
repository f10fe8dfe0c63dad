"""The place in the data, exact after a resume."""

from safe_ckpt.data.loader import resumable

__all__ = ["resumable"]
