"""How each framework names, completes and orders its checkpoints; read without running anything."""
