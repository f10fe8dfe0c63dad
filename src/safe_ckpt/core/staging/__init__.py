"""The copy of a state in host memory, and what keeps it consistent while training goes on."""
