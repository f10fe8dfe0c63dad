"""Weights alone, whole and in Hugging Face's layout: for adapters that export them."""

from __future__ import annotations

from safe_ckpt.core.formats import hugging_face
from safe_ckpt.core.formats.hugging_face import parse_size
from safe_ckpt.core.saving import export
from safe_ckpt.core.saving.export import Exporter
from safe_ckpt.core.sharding import dtensor

__all__ = ["Exporter", "dtensor", "export", "hugging_face", "parse_size"]
