"""Which denoising steps are computed, and how.

`schedule` gives each step its action. `held_outputs` stand in for what was skipped, and
`correction` puts skipped steps right afterwards.
"""
