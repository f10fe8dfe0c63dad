"""How a tree of frozen dataclasses is checked, read from YAML and the environment, and described.

Knows nothing of the settings themselves: they are in ``safe_ckpt.config``, which imports from here. Only ``yaml_file``,
``environment`` and ``show`` import PyYAML, and nothing here imports torch.
"""
