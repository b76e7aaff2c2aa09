"""Which denoising steps are computed, and how.

`schedule` gives each step its action, from `step_lists`. `held_outputs` stand in for what was
skipped.
"""
