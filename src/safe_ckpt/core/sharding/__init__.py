"""Tensors of which every rank has a part: facts, DCP plans, gathers. The only package that issues collectives."""
