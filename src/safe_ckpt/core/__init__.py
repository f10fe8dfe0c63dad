"""The framework-neutral parts. Nothing here imports lightning, accelerate, deepspeed or transformers."""
