"""Measuring times, and what steps would cost."""
