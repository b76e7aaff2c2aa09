"""Measuring: quality, times, and what steps would cost.

`quality` and `clip_comparison` compare outputs. `timing` and `layer_times` measure,
`cost_model`, `estimate` and `slower_parts` calculate.
"""
