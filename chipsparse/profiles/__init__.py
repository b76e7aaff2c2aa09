"""Configs that were tuned for a model: a `profile` has `qualities` and a `tuned_range`."""
