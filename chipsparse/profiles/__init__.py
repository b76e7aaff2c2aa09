"""Configs that were tuned for a model: a `profile` has named qualities and a `tuned_range`."""
