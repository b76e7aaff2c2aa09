"""Measuring: quality, times, and what steps would cost.

`quality` and `clip_comparison` compare outputs. `timing` and `step_clock` measure,
`cost_model`, `estimate` and `step_seconds` calculate; `slower_parts` decides by either.
"""
