"""Which denoising steps are computed, and how.

`schedule` gives each step its action, from `step_lists`. `step_cache` skips further steps while
outputs hardly change, and `held_outputs` stand in for what was skipped.
"""
