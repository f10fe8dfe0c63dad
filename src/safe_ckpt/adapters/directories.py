"""Directories of checkpoints, as adapters use them: hold one, list what is committed in it, number, verify and retain."""

from __future__ import annotations

from safe_ckpt.core.directory import catalog, commit_order, extra_files, retention
from safe_ckpt.core.directory.catalog import WEIGHTS, Candidate, Catalog, is_of
from safe_ckpt.core.directory.retention import Decision
from safe_ckpt.core.directory.workspace import HIDDEN, Workspace
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.formats.verify import verify_entry, verify_if_ours, verify_share
from safe_ckpt.core.saving import one_shot, resume
from safe_ckpt.core.saving.held_directories import NAMES, HeldDirectories, refuse
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.durable import sync_directory
from safe_ckpt.core.storage.presence import ends_as_archive

__all__ = [
    "HIDDEN",
    "MANIFEST_NAME",
    "NAMES",
    "WEIGHTS",
    "Candidate",
    "Catalog",
    "Decision",
    "HeldDirectories",
    "Workspace",
    "catalog",
    "commit_order",
    "durable",
    "ends_as_archive",
    "extra_files",
    "is_of",
    "one_shot",
    "read_manifest",
    "refuse",
    "resume",
    "retention",
    "sync_directory",
    "verify_entry",
    "verify_if_ours",
    "verify_share",
]
