"""Settings from Python, YAML and the environment: checked, explained, documented.

This package is generic: the settings themselves are in ``safe_ckpt.config``, which imports ``fields``. Only ``sources``
imports PyYAML, and nothing here imports torch.
"""
