"""What is not about diffusion: files, signals, units, warnings, checked dataclasses."""
