"""``python -m safe_ckpt.tools.cli``: what launchers such as torchrun start."""

from __future__ import annotations

from safe_ckpt.tools.cli import main

if __name__ == "__main__":
    main()
