"""The method inside a model: layers, their caches, and what each computes at a step."""
