"""Helpers that are not about diffusion: files, units, warnings, checked dataclasses."""
