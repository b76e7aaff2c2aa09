"""Benchmarks: one runner (``python -m benchmarks``), one module per measured thing."""
